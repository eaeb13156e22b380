"""The checks of `make test-faults` find what was lost, doubled or run again: shown with doctored data."""

from dataclasses import replace

import pytest
from faults.checks import (
    Admission,
    ExportedLine,
    Findings,
    Item,
    JobRecord,
    RequestRow,
    ResultRow,
    Snapshot,
    check,
)

ITEMS = (*(Item("s3://b/in.jsonl", line, f"id-{line}") for line in range(1, 6)), Item("sql:1", 1, "1"))
REQUESTS = tuple(RequestRow(seq, item) for seq, item in enumerate(ITEMS))
RESULTS = (
    *(ResultRow(seq, "succeeded", "run_a", f"2026-11-29 02:00:0{seq}") for seq in range(5)),
    ResultRow(5, "errored", None, "2026-11-29 02:00:00"),
)
LINES = tuple(ExportedLine(f"batch_req_job_x-{row.seq}", row.item.custom_id) for row in REQUESTS)


@pytest.fixture
def record() -> JobRecord:
    """A job that went well: two kills, in which three and then five results were there."""
    return JobRecord(
        job_id="job_x",
        has_ended=True,
        num_outputs=2,
        items=ITEMS,
        requests=REQUESTS,
        results=RESULTS,
        lines=LINES,
        counters={"total": 6, "succeeded": 5, "errored": 1, "expired": 0, "cancelled": 0},
        snapshots=(
            Snapshot(10.0, {row.seq: row for row in RESULTS[:2] + RESULTS[5:]}),
            Snapshot(20.0, {row.seq: row for row in RESULTS}),
        ),
        admissions=(Admission(5.0, (0, 1, 2)), Admission(12.0, (2, 3, 4))),
        num_finished_in_windows=5,
    )


def test_a_job_that_went_well_is_clean(record: JobRecord) -> None:
    assert check(record) == Findings()
    assert check(record).is_clean


@pytest.mark.parametrize("doctored", [{"has_ended": False}, {"num_outputs": 0}])
def test_a_job_that_hangs_in_its_export_is_not_clean_though_nothing_is_lost(
    record: JobRecord, doctored: dict[str, int]
) -> None:
    findings = check(replace(record, **doctored))  # type: ignore[arg-type]

    assert (findings.lost, findings.duplicated, findings.has_ended) == ({}, {}, False)
    assert not findings.is_clean


def test_a_line_without_a_request_row_is_lost(record: JobRecord) -> None:
    findings = check(
        replace(record, requests=REQUESTS[1:], results=RESULTS[1:], lines=LINES[1:], snapshots=())
    )

    assert list(findings.lost) == ["line 1 of s3://b/in.jsonl, request row"]
    assert not findings.is_clean


def test_a_request_without_a_result_is_lost(record: JobRecord) -> None:
    findings = check(replace(record, results=RESULTS[:2] + RESULTS[3:], num_finished_in_windows=4))

    assert list(findings.lost) == ["seq 2, result"]


def test_a_result_without_an_exported_line_is_lost(record: JobRecord) -> None:
    assert list(check(replace(record, lines=LINES[:-1])).lost) == ["seq 5, exported line"]


def test_a_line_under_another_id_is_lost_and_too_much(record: JobRecord) -> None:
    findings = check(replace(record, lines=(ExportedLine(LINES[0].line_id, "id-2"), *LINES[1:])))

    assert list(findings.lost) == ["seq 0, exported line"]
    assert len(findings.duplicated) == 1


@pytest.mark.parametrize(
    ("doctored", "what"),
    [
        ({"requests": (*REQUESTS, REQUESTS[0])}, "line 1 of s3://b/in.jsonl, request row"),
        ({"results": (*RESULTS, RESULTS[3])}, "seq 3, result"),
        ({"lines": (*LINES, LINES[4])}, "seq 4, exported line"),
    ],
)
def test_what_is_there_twice_is_found(record: JobRecord, doctored: dict[str, object], what: str) -> None:
    findings = check(replace(record, **doctored))

    assert what in findings.duplicated
    assert not findings.is_clean


def test_a_request_that_was_read_twice_is_found(record: JobRecord) -> None:
    again = RequestRow(6, ITEMS[0])
    findings = check(
        replace(
            record,
            requests=(*REQUESTS, again),
            results=(*RESULTS, ResultRow(6, "succeeded", "run_b", "2026-11-29 02:01:00")),
            lines=(*LINES, ExportedLine("batch_req_job_x-6", "id-1")),
        )
    )

    assert list(findings.duplicated) == ["line 1 of s3://b/in.jsonl, request row"]


@pytest.mark.parametrize("change", [{"run_id": "run_b"}, {"finished_at": "2026-11-29 03:00:00"}])
def test_a_result_that_was_replaced_after_a_kill_is_found(record: JobRecord, change: dict[str, str]) -> None:
    findings = check(replace(record, results=(replace(RESULTS[0], **change), *RESULTS[1:])))

    assert list(findings.duplicated) == ["seq 0, its result was replaced"]


def test_a_request_that_an_engine_was_given_again_after_its_result_is_found(record: JobRecord) -> None:
    findings = check(replace(record, admissions=(*record.admissions, Admission(12.0, (1,)))))

    assert list(findings.duplicated) == ["seq 1, was given to an engine after it had a result"]


def test_a_request_without_a_result_at_the_kill_may_be_given_again(record: JobRecord) -> None:
    assert check(replace(record, admissions=(*record.admissions, Admission(13.0, (4,))))).is_clean


def test_more_finishes_in_engines_than_answers_are_found(record: JobRecord) -> None:
    assert list(check(replace(record, num_finished_in_windows=6)).duplicated) == ["finish 5"]


@pytest.mark.parametrize("counter", ["total", "succeeded", "errored", "expired"])
def test_counters_that_do_not_add_up_are_found(record: JobRecord, counter: str) -> None:
    counters = {**record.counters, counter: record.counters[counter] + 1}

    assert not check(replace(record, counters=counters)).sum_holds


def test_counters_that_add_up_and_say_other_than_the_rows_are_found(record: JobRecord) -> None:
    counters = {**record.counters, "succeeded": 4, "errored": 2}

    assert not check(replace(record, counters=counters)).sum_holds
