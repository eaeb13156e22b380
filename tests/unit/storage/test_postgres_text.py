import pytest

from storage.postgres_text import clean_text, cut_text


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
