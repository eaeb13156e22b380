"""What `blend status JOB` says of a job that stopped, each thing once."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from blend_core.errors import EngineStartError, ObjectGoneError
from flows.cli.job_standing import deaths_line, holder_line, stopped_line, stopped_lines, stopped_list
from flows.job_spec import BatchJobSpec
from flows.stages.infer import _with_own_options
from storage.lost_runs import LiveRun, StoppedJob
from storage.object_errors import needed_to_go_on
from storage.suspects import EngineDeath

AGAIN = "continue it with: blend run --job-id job_1"


def test_a_run_that_was_told_to_end_has_not_failed_and_is_continued_in_one_sentence() -> None:
    reason = "The process was told to end; job job_1 keeps its results; run it again to continue it."
    told = f"Nothing runs it: its latest run was told to end; {AGAIN}"
    assert stopped_lines("job_1", reason, was_told_to_end=True) == (told,)


def test_what_continues_a_failed_job_waits_for_its_reason_to_be_mended() -> None:
    reason = "The disk is full."
    assert stopped_lines("job_1", reason, was_told_to_end=False) == (
        f"Its latest run failed: {reason}",
        f"Nothing runs it; once that is mended, {AGAIN}",
    )


def test_a_run_that_says_to_end_the_job_has_no_continuation_told() -> None:
    for reason in (of_options_of_its_own(), of_an_object_that_is_gone()):
        told = stopped_lines("job_1", reason, was_told_to_end=False)
        assert told == (f"Its latest run failed: {reason}", "Nothing runs it.")


def of_options_of_its_own() -> str:
    spec = BatchJobSpec.model_validate({"s3": ["s3://b/k"], "options": {"vllm": {"max_loras": 2}}})
    context: Any = SimpleNamespace(spec=spec, job_id="job_1")
    return str(_with_own_options(EngineStartError("vLLM did not start."), context))


def of_an_object_that_is_gone() -> str:
    with pytest.raises(ObjectGoneError) as caught, needed_to_go_on():
        raise ObjectGoneError("It is gone.", uri="s3://b/plan")
    return str(caught.value)


def test_a_list_tells_a_job_that_failed_from_one_that_stopped() -> None:
    told = "Nothing runs job job_1 (night, in_progress); "
    stopped = StoppedJob("job_1", "night", "in_progress", has_failed=False)
    assert stopped_line(stopped) == told + AGAIN
    failed = StoppedJob("job_1", "night", "in_progress", has_failed=True)
    assert stopped_line(failed) == (
        f"{told}its latest run failed; see why, and what to do, with: blend status job_1"
    )


def test_of_a_run_that_left_no_reason_none_is_told() -> None:
    assert stopped_lines("job_1", None, was_told_to_end=False) == (f"Nothing runs it; {AGAIN}",)


def test_a_death_that_the_runs_error_tells_is_counted_alone() -> None:
    death = EngineDeath(datetime(2026, 11, 30, 2, 5, 7, tzinfo=UTC), "The engine was killed.", 3)
    given_up = f"The engine died 6 times in a row; it is given up. The last time: {death.reason}"
    assert deaths_line([death] * 6, given_up) == "Its engine died 6 times, last at 02:05:07."
    for other in (None, "The disk is full."):
        assert deaths_line([death], other) == "Its engine died once, last at 02:05:07: The engine was killed."


def test_a_job_whose_run_is_dead_is_continued_in_the_same_words() -> None:
    started_at = datetime(2026, 11, 30, 2, 5, 7, tzinfo=UTC)
    dead = LiveRun("run_1", "job_1", {}, started_at, heartbeat_age_s=90.0, lease_left_s=-60.0)
    assert holder_line(dead).endswith(f"counts as dead, last sign of life 90 s ago; {AGAIN}")


def test_of_many_stopped_jobs_the_latest_are_named_and_the_others_counted():
    jobs = [StoppedJob(f"job_{number}", "nights", "in_progress", has_failed=False) for number in (3, 1, 2, 4)]
    assert stopped_list(jobs, 4) == [stopped_line(job) for job in sorted(jobs, key=lambda job: job.job_id)]
    assert stopped_list(jobs, 3)[0] == (
        "Nothing runs 1 older job either; `blend status --json` lists all (stopped_jobs)"
    )
    assert stopped_list(jobs, 2) == [
        "Nothing runs 2 older jobs either; `blend status --json` lists all (stopped_jobs)",
        stopped_line(jobs[0]),
        stopped_line(jobs[3]),
    ]
