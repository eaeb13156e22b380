"""What must hold after any kill: every request has exactly one result, and no result was made twice.

Plain functions over what was read from the database, from the exported objects and from the record of
admissions, so that doctored data can show that they find what they are for.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Item:
    """One line or row that was put into a source.

    Attributes:
        source_uri: the object, or `sql:<number>`.
        source_line: line or row there, from 1.
        custom_id: its id; None for a line that has none that can be read.
    """

    source_uri: str
    source_line: int
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One row of `request`."""

    seq: int
    item: Item


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One row of `result`: what must never change once it is there."""

    seq: int
    status: str
    run_id: str | None
    finished_at: str


@dataclass(frozen=True, slots=True)
class ExportedLine:
    """One line of the output or the error object."""

    line_id: str
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The results that were committed when something was about to be killed.

    Attributes:
        at_s: seconds since the epoch, after they were read.
        results: by seq.
    """

    at_s: float
    results: Mapping[int, ResultRow]


@dataclass(frozen=True, slots=True)
class Admission:
    """Requests that an engine was given.

    Attributes:
        at_s: seconds since the epoch.
        seqs: which.
    """

    at_s: float
    seqs: Sequence[int]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Everything that was read about one job after its end.

    Attributes:
        has_ended: whether its state is an end state; a job that hangs in its export has every result, too.
        num_outputs: objects of answers and of errors that its row names.
    """

    job_id: str
    has_ended: bool
    num_outputs: int
    items: Sequence[Item]
    requests: Sequence[RequestRow]
    results: Sequence[ResultRow]
    lines: Sequence[ExportedLine]
    counters: Mapping[str, int]
    snapshots: Sequence[Snapshot] = ()
    admissions: Sequence[Admission] = ()
    num_finished_in_windows: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong, one sentence per request concerned.

    Attributes:
        lost: by what was lost.
        duplicated: by what is there twice or was run twice.
        sum_holds: succeeded + errored + expired + cancelled = total, in the counters and in the rows.
        has_ended: whether the job came to an end state with its output.
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    duplicated: Mapping[str, str] = field(default_factory=dict)
    sum_holds: bool = True
    has_ended: bool = True

    @property
    def is_clean(self) -> bool:
        return not self.lost and not self.duplicated and self.sum_holds and self.has_ended


def check(job: JobRecord) -> Findings:
    """Holds a job's rows, lines and admissions against what was put into its sources."""
    lost: dict[str, str] = {}
    duplicated: dict[str, str] = {}
    _compare(_named(job.items), (row.item for row in job.requests), "request row", lost, duplicated)
    seqs = {row.seq: f"seq {row.seq}" for row in job.requests}
    _compare(seqs, (row.seq for row in job.results), "result", lost, duplicated)
    keys = {
        ExportedLine(f"batch_req_{job.job_id}-{row.seq}", row.item.custom_id): f"seq {row.seq}"
        for row in job.requests
    }
    _compare(keys, job.lines, "exported line", lost, duplicated)
    for reason, found in (
        ("its result was replaced", replaced_results(job.snapshots, job.results)),
        ("was given to an engine after it had a result", admitted_again(job.snapshots, job.admissions)),
    ):
        duplicated.update({f"seq {seq}, {reason}": reason for seq in sorted(found)})
    num_answered = sum(row.run_id is not None for row in job.results)
    for extra in range(num_answered, job.num_finished_in_windows):
        duplicated[f"finish {extra}"] = "engines finished more requests than have an answer"
    has_ended = job.has_ended and (job.num_outputs > 0 or not job.requests)
    return Findings(lost, duplicated, sum_holds(job.counters, job.results), has_ended)


def sum_holds(counters: Mapping[str, int], results: Iterable[ResultRow]) -> bool:
    """Whether the job's counters add up to its total and say what the rows say."""
    states = ("succeeded", "errored", "expired", "cancelled")
    by_state = Counter(row.status for row in results)
    return counters["total"] == sum(counters[state] for state in states) and all(
        by_state[state] == counters[state] for state in states
    )


def replaced_results(snapshots: Iterable[Snapshot], final: Iterable[ResultRow]) -> set[int]:
    """Results that were there at a kill and are others now. A missing one is counted as lost elsewhere."""
    now = {row.seq: row for row in final}
    return {
        seq
        for snapshot in snapshots
        for seq, row in snapshot.results.items()
        if seq in now and now[seq] != row
    }


def admitted_again(snapshots: Sequence[Snapshot], admissions: Iterable[Admission]) -> set[int]:
    """Requests that an engine was given after they were known to have a result."""
    again: set[int] = set()
    for admission in admissions:
        for snapshot in snapshots:
            if snapshot.at_s < admission.at_s:
                again.update(seq for seq in admission.seqs if seq in snapshot.results)
    return again


def _named(items: Iterable[Item]) -> dict[Item, str]:
    return {item: f"line {item.source_line} of {item.source_uri}" for item in items}


def _compare(
    expected: Mapping[object, str],
    found: Iterable[object],
    what: str,
    lost: dict[str, str],
    duplicated: dict[str, str],
) -> None:
    """Every expected thing exactly once, and nothing else."""
    counts = Counter(found)
    for key, name in expected.items():
        if counts[key] == 0:
            lost[f"{name}, {what}"] = f"has no {what}"
        elif counts[key] > 1:
            duplicated[f"{name}, {what}"] = f"has {counts[key]} of {what}"
    for key in counts.keys() - expected.keys():
        duplicated[f"{key}, {what}"] = f"is a {what} that nothing asked for"
