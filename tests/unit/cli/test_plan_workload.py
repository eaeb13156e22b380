"""What `blend plan` takes the lengths of answers from."""

from pathlib import Path

import numpy as np
import pytest

from blend_core.length_priors import LengthPriors, TemplateLengths
from blend_core.request import RequestArrays
from blend_core.specs import load_device_profile, model_spec_preset
from flows.cli.plan_source import PlanInput
from flows.cli.plan_workload import workload_of
from flows.dry_run.lengths import LengthBasis
from flows.job_parts import JobOptions, Policy
from flows.serving import Serving
from flows.settings import EngineSettings, Settings


@pytest.mark.parametrize(
    ("min_tokens", "basis"), [(0, LengthBasis.EARLIER_NIGHTS), (50, LengthBasis.MAX_TOKENS)]
)
def test_earlier_nights_are_what_is_known_only_where_a_length_is_not_fixed(
    tmp_path: Path, min_tokens: int, basis: LengthBasis
) -> None:
    requests = RequestArrays(
        seq=np.arange(1, dtype=np.int64),
        token_ids=np.arange(5, dtype=np.int32),
        offsets=np.array([0, 5], dtype=np.int64),
        min_tokens=np.array([min_tokens], dtype=np.int32),
        max_tokens=np.array([50], dtype=np.int32),
    )
    earlier = TemplateLengths(80.0, 80 * 20.0, 80 * 20.0**2, ((20, 80.0),))
    settings = Settings(home=tmp_path, engine=EngineSettings(name="torch"))
    asked = PlanInput(
        source="job.yaml",
        requests=requests,
        num_bad=0,
        bad_by_code={},
        counted_with_tokenizer=True,
        model=model_spec_preset("llama-3.1-8b"),
        serving=Serving.of(settings.engine, JobOptions()),
        policy=Policy.DFS,
        recorded={},
        priors=LengthPriors(np.zeros(1, dtype=np.int64), (earlier,)),
    )
    workload = workload_of(
        asked,
        settings,
        load_device_profile("l4"),
        is_own_engine=False,
        expected_output_tokens=None,
        overlap=False,
        quick=False,
        on_progress=lambda text: None,
    )
    assert workload.lengths.basis is basis
