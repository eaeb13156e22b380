"""Tables for terminals and artifacts."""

from flows.tables import markdown_table, text_table


def test_columns_line_up_and_numbers_stand_right() -> None:
    table = text_table(("name", "n"), [("a", 5), ("bcd", 12345)])
    assert table.splitlines() == ["name       n", "----  ------", "a          5", "bcd   12,345"]


def test_nothing_is_shown_as_a_dash_and_keeps_a_column_of_numbers_right() -> None:
    assert text_table(("n",), [(None,), (10.5,)]).splitlines()[2:] == ["    -", "10.50"]


def test_text_over_several_lines_stays_in_its_row() -> None:
    assert len(text_table(("text",), [("one\ntwo",)]).splitlines()) == 3


def test_a_bar_in_a_cell_does_not_break_markdown() -> None:
    assert markdown_table(("a",), [("x|y",)]).splitlines()[-1] == "| x&#124;y |"


def test_no_rows_leave_the_headers() -> None:
    assert text_table(("a", "b"), []).splitlines()[0] == "a  b"
