"""Jobs that cannot run at all fail with a sentence that says what to do."""

from typing import Any

import pytest

from blend_core.errors import ConfigurationError, SourceError
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.wiring import Wiring
from storage.job_status import JobStatus
from storage.jobs import get_job

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
