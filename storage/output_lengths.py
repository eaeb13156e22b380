"""Lengths of answers by prompt template: what one night writes down and the next one plans with."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg

from blend_core.length_distribution import LENGTH_GRID
from blend_core.length_priors import LengthPriors, TemplateLengths, first_length, no_priors
from storage.database import Database
from storage.ownership import Run, hold_job

MIN_ANSWERS_OF_A_NIGHT: Final = 8
"""A template with fewer answers in a job is not written down: there may be one for every request."""

# An answer that was cut before the longest that its template allows was short of context; how long it would
# have been is not known. The others that were cut are as long as their template lets them be.
_COUNT: Final = """
WITH template AS (
    SELECT prompt_template, max(max_tokens) AS longest FROM request
     WHERE job_id = %(job_id)s AND prompt_template IS NOT NULL GROUP BY prompt_template),
answer AS (
    SELECT prompt_template, longest, greatest(r.num_output_tokens, 1)::double precision AS num_tokens
      FROM request q JOIN template USING (prompt_template)
      JOIN result r ON r.job_id = q.job_id AND r.seq = q.seq
     WHERE q.job_id = %(job_id)s AND r.status = 'succeeded'
       AND (r.finish_reason = 'stop' OR q.max_tokens = longest))
SELECT prompt_template, longest, width_bucket(num_tokens, %(grid)s::double precision[]) - 1 AS place,
       count(*), sum(num_tokens), sum(num_tokens ^ 2)
  FROM answer GROUP BY prompt_template, longest, place ORDER BY prompt_template, place
"""
_SELECT: Final = """
SELECT prompt_template, num_samples, sum_output_tokens, sum_output_tokens_sq, bin_tokens, bin_samples
  FROM output_length_stat WHERE model = %(model)s AND prompt_template = ANY (%(templates)s)
 ORDER BY prompt_template
"""
_WRITE: Final = """
INSERT INTO output_length_stat (model, prompt_template, num_samples, sum_output_tokens, sum_output_tokens_sq,
                                max_tokens, bin_tokens, bin_samples, job_id)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (model, prompt_template) DO UPDATE SET
    num_samples = excluded.num_samples, sum_output_tokens = excluded.sum_output_tokens,
    sum_output_tokens_sq = excluded.sum_output_tokens_sq, max_tokens = excluded.max_tokens,
    bin_tokens = excluded.bin_tokens, bin_samples = excluded.bin_samples, job_id = excluded.job_id,
    updated_at = clock_timestamp()
"""


def remember_output_lengths(db: Database, run: Run) -> int:
    """Counts the answers of the run's job into the statistics; returns how many templates they told of.

    A job is counted once; again it changes nothing and returns 0. Call it when every request has ended: the
    answers that come first are the short ones.

    Raises:
        StaleRunError: the run no longer owns its job; nothing is written.
    """
    with db.raw() as connection:
        hold_job(connection, run)
        marked = connection.execute(
            "UPDATE batch_job SET lengths_counted_at = clock_timestamp()"
            " WHERE job_id = %s AND lengths_counted_at IS NULL RETURNING model",
            (run.job_id,),
        ).fetchone()
        if marked is None:
            return 0
        (model,) = marked
        rows = connection.execute(_COUNT, {"job_id": run.job_id, "grid": LENGTH_GRID.tolist()}).fetchall()
        tonight = {key: _night(bins) for key, bins in groupby(rows, key=lambda row: (row[0], row[1]))}
        tonight = {
            key: lengths for key, lengths in tonight.items() if lengths.num_answers >= MIN_ANSWERS_OF_A_NIGHT
        }
        # Two jobs that end at once would each miss what the other adds. Readers are not held up.
        connection.execute("LOCK TABLE output_length_stat IN SHARE ROW EXCLUSIVE MODE")
        earlier = _stored(connection, model, [template for template, _ in tonight])
        with connection.cursor() as cursor:
            cursor.executemany(
                _WRITE,
                [
                    _row(model, template, longest, lengths, earlier.get(template), run.job_id)
                    for (template, longest), lengths in tonight.items()
                ],
            )
    return len(tonight)


def load_length_priors(db: Database, job_id: str, model: str, seqs: npt.NDArray[np.int64]) -> LengthPriors:
    """What earlier nights of a model tell of the named requests of a job, in the order of `seqs`."""
    with db.raw() as connection:
        templates = connection.execute(
            "SELECT DISTINCT prompt_template FROM request WHERE job_id = %s AND prompt_template IS NOT NULL",
            (job_id,),
        ).fetchall()
        stored = _stored(connection, model, [template for (template,) in templates])
        if not stored:
            return no_priors(len(seqs))
        with connection.cursor(name="templates", binary=True) as cursor:
            cursor.itersize = 100_000
            cursor.execute(
                "SELECT q.seq, t.number - 1 FROM request q"
                " JOIN unnest(%s::text[]) WITH ORDINALITY AS t (prompt_template, number)"
                " ON t.prompt_template = q.prompt_template WHERE q.job_id = %s",
                (list(stored), job_id),
            )
            known = np.array(list(cursor), dtype=np.int64).reshape(-1, 2)
    place_of = np.full(int(max(known[:, 0].max(), seqs.max(initial=0))) + 1, -1, dtype=np.int64)
    place_of[known[:, 0]] = known[:, 1]
    return LengthPriors(place_of[seqs], tuple(stored.values()))


def load_template_priors(db: Database, model: str, templates: Sequence[str]) -> LengthPriors:
    """What earlier nights of a model tell of requests that are in no job yet, named by their templates."""
    with db.raw() as connection:
        stored = _stored(connection, model, sorted(set(templates)))
    place_of = {template: place for place, template in enumerate(stored)}
    template = np.array([place_of.get(template, -1) for template in templates], dtype=np.int64)
    return LengthPriors(template, tuple(stored.values()))


def _stored(connection: psycopg.Connection, model: str, templates: list[str]) -> dict[str, TemplateLengths]:
    """What is stored of the templates, in their order."""
    rows = connection.execute(_SELECT, {"model": model, "templates": templates}).fetchall()
    return {
        template: TemplateLengths(number, total, total_sq, tuple(zip(tokens, samples, strict=True)))
        for template, number, total, total_sq, tokens, samples in rows
    }


def _night(bins: Iterable[tuple[Any, ...]]) -> TemplateLengths:
    """The lengths of one template in one job, from the rows of `_COUNT`."""
    _, _, places, numbers, sums, sums_sq = zip(*bins, strict=True)
    return TemplateLengths(
        num_answers=float(sum(numbers)),
        sum_tokens=float(sum(sums)),
        sum_tokens_sq=float(sum(sums_sq)),
        bins=tuple(
            (first_length(place), float(number)) for place, number in zip(places, numbers, strict=True)
        ),
    )


def _row(
    model: str,
    template: str,
    longest: int,
    tonight: TemplateLengths,
    earlier: TemplateLengths | None,
    job_id: str,
) -> tuple[Any, ...]:
    lengths = tonight if earlier is None else tonight.after(earlier)
    return (
        model,
        template,
        lengths.num_answers,
        lengths.sum_tokens,
        lengths.sum_tokens_sq,
        longest,
        [tokens for tokens, _ in lengths.bins],
        [number for _, number in lengths.bins],
        job_id,
    )
