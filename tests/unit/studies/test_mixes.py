"""Mixes meet their targets and stay the same for a seed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blend_core.errors import PlanError
from blend_core.studies.mixes import (
    PAPER_TARGETS,
    Setting,
    build_workload,
    grid_targets,
    paper_mix,
    real_mixes,
)
from blend_core.studies.workload import Workload, workload_figures


def figures_of(workload: Workload, setting: Setting) -> tuple[float, float, float]:
    figures = workload_figures(
        workload.requests, workload.num_output_tokens, setting.model, setting.device, setting.block_size
    )
    return figures.density, figures.prefix_sharing, figures.optimum_s / 3600


@pytest.mark.parametrize("is_real", [True, False])
@pytest.mark.parametrize(("name", "density", "sharing"), PAPER_TARGETS)
def test_paper_mixes_meet_their_targets_within_two_percent(
    request: pytest.FixtureRequest,
    setting: Setting,
    name: str,
    density: float,
    sharing: float,
    *,
    is_real: bool,
) -> None:
    folder = request.getfixturevalue("traces") if is_real else None
    longer = replace(setting, hours=5.0)
    workload = build_workload(paper_mix(folder, name, density, sharing), longer, 0)
    workload.requests.check_integrity()
    assert (workload.name, workload.data) == (name, "real" if is_real else "generated")
    assert figures_of(workload, longer) == pytest.approx((density, sharing, 5.0), rel=0.02)


def test_the_same_seed_gives_the_same_workload(setting: Setting) -> None:
    mix = paper_mix(None, "trace-1", 1.4, 0.35)
    one, again, other = (build_workload(mix, setting, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.requests.segment_ids, again.requests.segment_ids)
    assert np.array_equal(one.num_output_tokens, again.num_output_tokens)
    assert not np.array_equal(one.num_output_tokens[:100], other.num_output_tokens[:100])


def test_hidden_and_preset_mixes_differ_in_what_is_told_alone(setting: Setting) -> None:
    preset, hidden = (
        build_workload(paper_mix(None, "trace-2", 0.9, 0.35, preset=preset), setting, 0)
        for preset in (True, False)
    )
    assert np.array_equal(preset.num_output_tokens, hidden.num_output_tokens)
    assert (preset.requests.min_tokens == preset.requests.max_tokens).any()
    assert not (hidden.requests.min_tokens == hidden.requests.max_tokens).any()
    assert (hidden.num_output_tokens <= hidden.requests.max_tokens).all()


def test_the_grid_has_65_workloads_and_its_corners_can_be_built(setting: Setting) -> None:
    targets = grid_targets()
    assert len(set(targets)) == 65
    for name, density, sharing in (targets[0], targets[4], targets[-5], targets[-1]):
        figures = figures_of(build_workload(paper_mix(None, name, density, sharing), setting, 0), setting)
        # One hour holds a few hundred long answers, whose mean still moves with each of them.
        assert figures == pytest.approx((density, sharing, 1.0), rel=0.05)


def test_real_mixes_have_a_density_of_one(setting: Setting, traces: Path) -> None:
    for mix in real_mixes(traces):
        workload = build_workload(mix, setting, 0)
        density, _, hours = figures_of(workload, setting)
        assert density == pytest.approx(1.0, abs=0.05)
        assert hours == pytest.approx(1.0, rel=0.05)


def test_a_kind_that_is_used_up_cuts_the_others(setting: Setting, traces: Path) -> None:
    mooncake = next(mix for mix in real_mixes(traces) if mix.name == "mooncake+r1")
    longer = replace(setting, hours=8.0)
    workload = build_workload(mooncake, longer, 0)
    density, _, hours = figures_of(workload, longer)
    assert density == pytest.approx(1.0, abs=0.02)
    assert hours < 6


def test_targets_out_of_reach_are_refused(setting: Setting) -> None:
    with pytest.raises(PlanError, match=r"density 1000\.0"):
        build_workload(paper_mix(None, "impossible", 1000.0, 0.35), setting, 0)
