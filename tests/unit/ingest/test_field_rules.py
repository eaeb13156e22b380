"""The documentation of the rules and the rules are one."""

from pathlib import Path

from blend_core.errors import RequestErrorCode
from flows.ingest.draft import Endpoint
from flows.ingest.fields import FIELD_RULES, RULES_BY_ENDPOINT, rules_table

DOCUMENT = Path(__file__).parents[3] / "docs" / "requests.md"


def test_the_document_shows_the_rules_in_force() -> None:
    assert rules_table() in DOCUMENT.read_text(encoding="utf-8"), "put rules_table() into docs/requests.md"


def test_no_field_has_two_rules() -> None:
    for endpoint in Endpoint:
        named = [rule.name for rule in FIELD_RULES if endpoint in rule.endpoints]
        assert len(named) == len(set(named)) == len(RULES_BY_ENDPOINT[endpoint])


def test_every_code_of_an_error_row_is_documented() -> None:
    documented = "".join((DOCUMENT.parent / name).read_text() for name in ("requests.md", "failures.md"))
    assert [code.value for code in RequestErrorCode if f"`{code}`" not in documented] == []
