import pytest

from storage.postgres_text import clean_text, cut_text, unstorable_text, without_values


@pytest.mark.parametrize("text", ["", "plain", "naïve 漢字 🙂", "tab\tand\nline"])
def test_text_that_postgres_can_hold_stays_as_it_is(text: str) -> None:
    assert clean_text(text) == (text, False)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\0b", "a\ufffdb"),
        ("é\0", "é\ufffd"),
        ("a\ud800", "a\ufffd"),
        ("\udc00b", "\ufffdb"),
        ("\ud83d\ude42", "🙂"),
        ("\ud83d\0\ude42", "\ufffd\ufffd\ufffd"),
    ],
)
def test_nul_and_lone_surrogates_are_replaced_and_told(text: str, cleaned: str) -> None:
    assert clean_text(text) == (cleaned, True)
    cleaned.encode()


def test_a_cut_text_says_that_it_goes_on() -> None:
    assert cut_text("abcdef", 6) == "abcdef"
    assert cut_text("abcdefg", 6) == "abcde…"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"sql": [{"query": "SELECT 1", "prompt": "a\0"}]}, "spec.sql[0].prompt"),
        ({"s3": ["s3://a", "s3://\ud800"]}, "spec.s3[1]"),
        ({"a\0b": 1}, "spec.a\ufffdb"),
        ("\0", "spec"),
        ({"fine": ["naïve 🙂", 1, None, 0.5, True]}, None),
    ],
)
def test_the_place_of_a_text_that_postgres_cannot_hold_is_named(value: object, place: str | None) -> None:
    assert unstorable_text(value, "spec") == place


def test_a_message_of_the_server_loses_the_value_that_it_quotes() -> None:
    assert without_values('invalid input syntax for type integer: "my\nsecret"') == (
        "invalid input syntax for type integer"
    )
    assert without_values('column "a" does not exist') == 'column "a" does not exist'
    assert without_values(None) is None
