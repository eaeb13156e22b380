"""Jobs that cannot run at all fail with a sentence that says what to do."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blend_core.errors import ConfigurationError, SourceError, StorageError
from flows.progress import SilentProgress
from flows.running import create_job, run_job, run_stages
from flows.stages import JobContext
from flows.stopping import StopSignal
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job
from storage.results import counts

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]


def test_an_unknown_model_fails_the_job_with_what_to_do(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=2, model="no-such-model"))

    with pytest.raises(ConfigurationError, match="blend model add"):
        run_job(wiring, job_id, SilentProgress())

    job = get_job(wiring.database, job_id)
    assert job.status is JobStatus.FAILED
    assert "blend model add" in (job.error_message or "")


def test_a_source_that_is_not_there_fails_the_job(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(s3=[wiring.objects.uri("tests/nothing/here.jsonl")]))

    with pytest.raises(SourceError, match=r"here\.jsonl"):
        run_job(wiring, job_id, SilentProgress())

    assert get_job(wiring.database, job_id).status is JobStatus.FAILED


@pytest.mark.parametrize("broke_off_at", ["plan", "export"])
def test_only_a_job_that_has_all_its_results_goes_on_without_its_model(
    wiring: Wiring, make_job: Any, tiny_model: str, tmp_path: Path, broke_off_at: str
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    job_id = create_job(wiring, make_job(num_chats=2, model=str(model)))

    def break_off(name: str, stage: Callable[[JobContext], str], context: JobContext) -> str:
        if name == broke_off_at:
            raise StorageError("The test's.")
        return stage(context)

    with pytest.raises(StorageError, match="The test's"):
        run_stages(wiring, job_id, SilentProgress(), StopSignal(), break_off)
    shutil.rmtree(model)

    if counts(wiring.database, job_id).pending:
        with pytest.raises(ConfigurationError, match="blend model add"):
            run_job(wiring, job_id, SilentProgress())
        assert get_job(wiring.database, job_id).status is JobStatus.IN_PROGRESS
    else:
        outcome = run_job(wiring, job_id, SilentProgress())
        assert (outcome.status, outcome.succeeded) == ("completed", 2)
        assert get_job(wiring.database, job_id).output_uri is not None
