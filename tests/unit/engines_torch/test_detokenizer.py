from pathlib import Path

import pytest
from tokenizers import Tokenizer

from blend_core.engines.torch.detokenizer import Detokenizer, StopMatcher
from blend_core.errors import ConfigurationError

TEXT = "The word is thing. Größe 日本 🙂 said so many times; then it stops."


@pytest.fixture(scope="module")
def detokenizer(tiny_llama: Path) -> Detokenizer:
    return Detokenizer(tiny_llama)


@pytest.fixture(scope="module")
def token_ids(tiny_llama: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(TEXT).ids
    return ids


def cut(detokenizer: Detokenizer, token_ids: list[int], *stop: str, min_tokens: int = 0) -> str | None:
    """The answer when the first stop string comes, None when none does."""
    matcher = StopMatcher(detokenizer, stop)
    for num_tokens, token_id in enumerate(token_ids, start=1):
        found = matcher.push(token_id, counts=num_tokens >= min_tokens)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_string_is_found_wherever_it_lies(
    detokenizer: Detokenizer, token_ids: list[int], length: int
) -> None:
    assert len(token_ids) > len(TEXT) // 4
    for start in range(len(TEXT) - length):
        stop = TEXT[start : start + length]
        assert cut(detokenizer, token_ids, stop) == TEXT[: TEXT.index(stop)]


def test_the_earliest_of_several_wins(detokenizer: Detokenizer, token_ids: list[int]) -> None:
    assert cut(detokenizer, token_ids, "times", "日本", "never") == TEXT[: TEXT.index("日本")]
    assert cut(detokenizer, token_ids, "never") is None


def test_a_stop_string_before_min_tokens_does_not_count(
    detokenizer: Detokenizer, token_ids: list[int]
) -> None:
    assert cut(detokenizer, token_ids, "s", min_tokens=len(token_ids) - 3) == TEXT[: TEXT.rindex("s")]


def test_special_and_unknown_tokens_leave_no_text(detokenizer: Detokenizer, token_ids: list[int]) -> None:
    assert detokenizer.decode([1, *token_ids, 2, 99_999]) == TEXT


def test_a_folder_without_a_readable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Detokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Detokenizer(tmp_path)
