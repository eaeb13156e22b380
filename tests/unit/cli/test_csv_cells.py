"""What the model wrote must not run as a formula in a spreadsheet."""

import pytest

from flows.cli.inspect import _spreadsheet_cell


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_text_that_begins_a_formula_gets_an_apostrophe(text: str) -> None:
    assert _spreadsheet_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["plain", "a=b", "", None, -1, 0.5])
def test_anything_else_is_printed_as_it_is(value: object) -> None:
    assert _spreadsheet_cell(value) == value
