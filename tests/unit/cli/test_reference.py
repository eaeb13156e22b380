"""Tables in the documentation say what the program reads."""

from pathlib import Path

import pytest

from flows.reference import DOCUMENTS, with_table

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_generated_table_has_not_drifted(name: str) -> None:
    mark, table = DOCUMENTS[name]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert with_table(text, mark, table()) == text, "run: python -m flows.reference"


def test_every_variable_and_field_has_a_meaning() -> None:
    for _, table in DOCUMENTS.values():
        for line in table().splitlines()[2:]:
            assert line.split("|")[3].strip(), line


def test_only_what_lies_between_the_marks_is_replaced() -> None:
    text = "before\n<!-- t -->\nold\n<!-- /t -->\nafter"
    assert with_table(text, "t", "new") == "before\n<!-- t -->\nnew\n<!-- /t -->\nafter"


def test_a_document_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        with_table("nothing", "t", "new")
