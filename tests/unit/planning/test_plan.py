"""A plan as a file, its integrity, and the density it foresees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.plan import Plan, frozen, planned_density_at
from blend_core.planner import PlanConfig, build_plan
from blend_core.request import RequestArrays
from blend_core.specs import DeviceProfile, ModelSpec

MakeRequests = Callable[..., RequestArrays]


@pytest.fixture
def plan(make_requests: MakeRequests, llama_8b: ModelSpec, a100: DeviceProfile) -> Plan:
    prompts = [[1] * 16 + [i, i] for i in range(40)]
    requests = make_requests(prompts, max_tokens=list(range(1, 41)), min_tokens=0)
    return build_plan(requests, llama_8b, a100, PlanConfig("dual_scan", block_size=16))


def test_a_plan_survives_its_file(plan: Plan) -> None:
    simulated = replace(
        plan,
        progress=frozen(np.array([0.0, 1 / 3, 1.0])),
        planned_density=frozen(np.array([np.inf, 1.1, 0.2])),
        summary=replace(plan.summary, estimated_duration_s=12.5, density=float("inf")),
    )
    for one in (plan, simulated):
        data = one.to_arrow()
        again = Plan.from_arrow(data)
        assert again.to_arrow() == data
        assert again.summary == one.summary
        assert (again.revision, again.policy) == (one.revision, one.policy)
        for name in ("seq", "num_shared_tokens", "estimated_output_tokens_sq", "lead", "planned_density"):
            assert np.array_equal(getattr(again, name), getattr(one, name))
            assert not getattr(again, name).flags.writeable


@pytest.mark.parametrize("data", [b"", b"no plan at all", b"ARROW1\0\0" * 20])
def test_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    with pytest.raises(PlanError, match="plan the job again"):
        Plan.from_arrow(data)


def test_a_cut_off_file_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanError):
        Plan.from_arrow(plan.to_arrow()[:-100])


@pytest.mark.parametrize(
    ("column", "place", "value"),
    [
        ("seq", 0, 39),
        ("num_shared_tokens", 0, 16),
        ("num_shared_tokens", 3, 15),
        ("num_shared_tokens", 3, -16),
        ("num_shared_tokens", 3, 32),
        ("max_tokens", 3, 0),
        ("estimated_output_tokens", 3, 1e6),
        ("estimated_output_tokens_sq", 3, 0.0),
        ("compute_s", 3, np.nan),
        ("memory_s", 3, -1.0),
        ("num_prompt_tokens", 3, 19),
    ],
)
def test_damage_is_found(plan: Plan, column: str, place: int, value: Any) -> None:
    plan.check_integrity()
    values = getattr(plan, column).copy()
    if column == "seq":
        value = values[5]
    values[place] = value
    damaged = replace(plan, **{column: frozen(values)})
    with pytest.raises(PlanError, match="damaged"):
        damaged.check_integrity()


def test_a_writable_column_is_found(plan: Plan) -> None:
    with pytest.raises(PlanError, match="writable"):
        replace(plan, seq=plan.seq.copy()).check_integrity()


def test_density_between_simulated_points_lies_on_the_line(plan: Plan) -> None:
    simulated = replace(plan, progress=np.array([0.0, 0.5, 1.0]), planned_density=np.array([2.0, 1.0, 0.0]))
    assert planned_density_at(plan, 0.5) is None
    assert planned_density_at(simulated, 0.25) == pytest.approx(1.5)
    assert planned_density_at(simulated, 1.0) == 0.0
