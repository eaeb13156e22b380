"""What is told where an engine does not start."""

from types import SimpleNamespace
from typing import Any

import pytest

from blend_core.errors import EngineStartError
from flows.job_spec import BatchJobSpec
from flows.stages import infer
from flows.stages.infer import infer_job


def message_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    def refuse(context: Any, engines: Any) -> None:
        raise EngineStartError("vLLM did not start.", rank=0)

    monkeypatch.setattr(infer, "hold_devices", lambda context, devices, held: [])
    monkeypatch.setattr(infer, "_run_ranks", refuse)
    spec = BatchJobSpec.model_validate({"s3": ["s3://b/k"], "options": options})
    wiring = SimpleNamespace(rank_devices=lambda spec: ())
    context: Any = SimpleNamespace(wiring=wiring, spec=spec, job_id="job_1")
    with pytest.raises(EngineStartError) as caught:
        infer_job(context)
    assert caught.value.ids == {"rank": 0}
    return caught.value.message


def test_options_of_the_jobs_own_are_named_with_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    told = message_of(monkeypatch, vllm={"max_model_len": 16384, "dtype": "half"})
    assert told.startswith("vLLM did not start. The job's own vLLM options (max_model_len, dtype) stay")
    assert "`blend cancel job_1`" in told


def test_where_the_machine_alone_has_options_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert message_of(monkeypatch) == "vLLM did not start."
