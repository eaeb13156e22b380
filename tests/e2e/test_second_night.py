"""What a night writes down about lengths is what the next night plans with."""

from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from flows.job_outcome import JobOutcome
from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.wiring import Wiring
from storage.jobs import request_cancel
from storage.plans import load_plan, next_revision
from storage.results import iter_results

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

NUM_CHATS, NUM_ROWS = 60, 40


class Lines(SilentProgress):
    """Keeps the outcome of each stage."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def stage_finished(self, stage: str, detail: str) -> None:
        self.outcomes[stage] = detail


def run(wiring: Wiring, spec: Any, progress: SilentProgress) -> JobOutcome:
    return run_job(wiring, create_job(wiring, spec), progress)


def mean_lengths(wiring: Wiring, job_id: str) -> dict[bool, float]:
    """Mean output tokens of chats (True) and of rows."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for row in iter_results(wiring.database, job_id):
        assert row.num_output_tokens is not None
        lengths[str(row.custom_id).startswith("chat")].append(row.num_output_tokens)
    return {is_chat: float(np.mean(values)) for is_chat, values in lengths.items()}


def test_the_second_night_samples_nothing_and_estimates_what_the_first_measured(
    wiring: Wiring, make_job: Any
) -> None:
    spec = make_job(num_chats=NUM_CHATS, num_rows=NUM_ROWS, max_tokens=20)

    first = run(wiring, spec, SilentProgress())
    lines = Lines()
    second = run(wiring, spec, lines)

    assert (first.status, second.status) == ("completed", "completed")
    sampled = load_plan(wiring.database, wiring.objects, first.job_id, revision=0)
    plan = load_plan(wiring.database, wiring.objects, second.job_id, revision=0)
    assert sampled.lead.any()
    assert not plan.lead.any()
    assert next_revision(wiring.database, second.job_id) == 1
    is_chat = plan.seq < NUM_CHATS
    means = mean_lengths(wiring, first.job_id)
    assert plan.estimated_output_tokens[is_chat] == pytest.approx(means[True])
    assert plan.estimated_output_tokens[~is_chat] == pytest.approx(means[False])
    assert "lengths of 100 known from earlier nights" in lines.outcomes["plan"]

    with wiring.database.connect() as connection:
        found = connection.execute(
            sa.text(
                "SELECT l.num_samples, count(*) AS num_requests FROM output_length l"
                " JOIN request_result q USING (prompt_template) WHERE q.job_id = :job_id"
                " GROUP BY l.prompt_template, l.num_samples ORDER BY num_requests"
            ),
            {"job_id": second.job_id},
        ).all()
    # Half of the first night's answers and all of the second's.
    assert [tuple(row) for row in found] == [(60, NUM_ROWS), (90, NUM_CHATS)]


def test_a_cancelled_job_is_not_remembered(wiring: Wiring, make_job: Any) -> None:
    job_id = create_job(wiring, make_job(num_chats=40, max_tokens=21))

    class Cancelled(SilentProgress):
        def counted(self, num_done: int, num_total: int | None) -> None:
            if num_total is not None and num_done >= 20:
                request_cancel(wiring.database, job_id)

    outcome = run_job(wiring, job_id, Cancelled())

    assert outcome.status == "cancelled"
    with wiring.database.connect() as connection:
        statement = sa.text("SELECT count(*) FROM output_length WHERE job_id = :job_id")
        assert connection.execute(statement, {"job_id": job_id}).scalar_one() == 0
