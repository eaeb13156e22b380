"""Lengths by prompt template in Postgres: counted once a job, faded, and read back for the next night."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sqlalchemy as sa

from blend_core.engines.base import RequestFinished
from blend_core.errors import StaleRunError
from storage.database import Database
from storage.jobs import create_job
from storage.objects import ObjectStore
from storage.output_lengths import load_length_priors, remember_output_lengths
from storage.ownership import Run
from storage.recorder import Recorder
from storage.requests import RequestRow, RequestWriter
from storage.runs import start_run

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

Answer = tuple[str | None, int, int, str]
"""Template, max_tokens, output tokens, finish reason."""


def taken(db: Database, job_id: str) -> Run:
    return start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)


@pytest.fixture
def night(db: Database, objects: ObjectStore) -> Callable[..., Run]:
    """A job with one request for each answer, all of them answered."""

    def make(answers: Sequence[Answer], model: str = "tiny") -> Run:
        job_id = create_job(db, name="night", model=model, spec={})
        with RequestWriter(db, job_id) as writer:
            for seq, (template, max_tokens, _, _) in enumerate(answers):
                writer.add(
                    RequestRow(
                        seq, "s3://in/a.jsonl", seq + 1, max_tokens=max_tokens, prompt_template=template
                    )
                )
        run = taken(db, job_id)
        with Recorder(db, objects, run) as recorder:
            for seq, (_, _, num_tokens, reason) in enumerate(answers):
                tokens = tuple(range(num_tokens))
                recorder.finished(
                    RequestFinished(seq, 0, "x", tokens, reason, 5, 0, 1_700_000_000.0, 1_700_000_001.0)
                )
        return run

    return make


def stored(db: Database, model: str = "tiny") -> dict[str, tuple[float, float, dict[int, float]]]:
    statement = sa.text("SELECT * FROM output_length_stat WHERE model = :model")
    with db.connect() as connection:
        rows = connection.execute(statement, {"model": model}).all()
    return {
        row.prompt_template: (
            row.num_samples,
            row.sum_output_tokens,
            dict(zip(row.bin_tokens, row.bin_samples, strict=True)),
        )
        for row in rows
    }


def test_answers_are_counted_by_template_and_a_job_once(db: Database, night: Callable[..., Run]) -> None:
    run = night([("a", 50, 10, "stop")] * 30 + [("b", 50, 3, "stop")] * 20 + [(None, 4, 4, "length")] * 20)

    assert remember_output_lengths(db, run) == 2
    found = stored(db)
    assert found == {"a": (30, 300, {8: 30}), "b": (20, 60, {0: 20})}

    assert remember_output_lengths(db, run) == 0
    assert stored(db) == found


def test_a_later_run_of_the_job_does_not_count_it_again(db: Database, night: Callable[..., Run]) -> None:
    run = night([("again", 50, 10, "stop")] * 30, model="again")
    assert remember_output_lengths(db, run) == 1
    with db.connect() as connection:
        connection.execute(
            sa.text(
                "UPDATE run SET lease_expires_at = clock_timestamp() - interval '1 s' WHERE run_id = :id"
            ),
            {"id": run.run_id},
        )
    later = taken(db, run.job_id)

    assert remember_output_lengths(db, later) == 0
    with pytest.raises(StaleRunError):
        remember_output_lengths(db, run)
    assert stored(db, "again")["again"][0] == 30


def test_answers_cut_by_their_bound_count_with_it_and_those_short_of_context_do_not(
    db: Database, night: Callable[..., Run]
) -> None:
    answers = [("c", 50, 50, "length")] * 10 + [("c", 50, 20, "stop")] * 10 + [("c", 12, 12, "length")] * 10
    assert remember_output_lengths(db, night(answers, model="cut")) == 1
    assert stored(db, "cut") == {"c": (20, 700, {16: 10, 48: 10})}


def test_a_template_with_a_handful_of_answers_is_not_kept(db: Database, night: Callable[..., Run]) -> None:
    run = night([(f"t{number}", 50, 10, "stop") for number in range(20)], model="few")
    assert remember_output_lengths(db, run) == 0
    assert stored(db, "few") == {}


def test_the_next_night_reads_what_was_remembered_and_fades_it(
    db: Database, night: Callable[..., Run]
) -> None:
    first = night([("d", 50, 10, "stop")] * 40 + [("e", 50, 30, "stop")] * 40, model="two nights")
    remember_output_lengths(db, first)
    second = night([("new", 50, 40, "stop")] * 2 + [("d", 50, 40, "stop")] * 40, model="two nights")

    seqs = np.array([41, 0, 7])
    priors = load_length_priors(db, second.job_id, "two nights", seqs)
    assert priors.template.tolist() == [0, -1, 0]
    (lengths,) = priors.templates
    assert (lengths.num_answers, lengths.sum_tokens, lengths.sum_tokens_sq) == (40, 400, 4000)
    assert lengths.bins == ((8, 40.0),)

    remember_output_lengths(db, second)
    assert stored(db, "two nights") == {
        "d": (60, 200 + 1600, {8: 20, 40: 40}),
        "e": (40, 1200, {24: 40}),
    }


def test_another_model_knows_nothing(db: Database, night: Callable[..., Run]) -> None:
    run = night([("f", 50, 10, "stop")] * 40, model="one model")
    remember_output_lengths(db, run)
    priors = load_length_priors(db, run.job_id, "another", np.arange(40))
    assert priors.templates == ()
    assert (priors.telling() == -1).all()


def test_the_read_only_role_sees_means_in_sql(db: Database, night: Callable[..., Run]) -> None:
    run = night([("g", 50, 10, "stop")] * 20 + [("g", 50, 20, "stop")] * 20, model="reader")
    remember_output_lengths(db, run)
    with db.connect() as connection:
        connection.execute(sa.text("SET LOCAL ROLE blend_read_only"))
        row = connection.execute(sa.text("SELECT * FROM output_length WHERE model = 'reader'")).one()
    assert (row.num_samples, row.mean_output_tokens, row.stddev_output_tokens) == (40, 15, 5)
    assert (row.max_tokens, row.job_id) == (50, run.job_id)
