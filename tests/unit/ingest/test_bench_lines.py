"""The lines that the benchmark reads are what it says they are."""

from flows.bench.ingest import request_lines
from flows.ingest.parse import ParseOptions, parse_line


def test_lines_are_valid_distinct_and_over_a_kilobyte_in_the_mean() -> None:
    lines = b"".join(request_lines(2_500)).splitlines()
    drafts = [parse_line(line, ParseOptions("smollm2-135m")) for line in lines]
    assert (
        len({draft.custom_id for draft in drafts})
        == len({str(d.messages or d.prompt) for d in drafts})
        == 2_500
    )
    assert sum(map(len, lines)) / len(lines) >= 1_000
    assert {draft.prompt is None for draft in drafts} == {True, False}


def test_the_same_lines_every_time() -> None:
    assert list(request_lines(1_500)) == list(request_lines(1_500))
