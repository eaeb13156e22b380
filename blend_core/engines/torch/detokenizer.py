"""Token ids back to text: whole answers, and piece by piece where stop strings must be seen."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from blend_core.errors import ConfigurationError


class Detokenizer:
    """The model's own tokenizer, for decoding only."""

    __slots__ = ("_tokenizer",)

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigurationError` when the folder's `tokenizer.json` is missing or unreadable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(
                f"{folder} holds no tokenizer.json; give a folder with the model's tokenizer."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigurationError(f"{path} cannot be read ({error}); fetch the model again.") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Ids that the tokenizer does not know leave no trace."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


class StopMatcher:
    """Watches one answer grow and finds the first stop string in its text.

    Text is decoded from a few tokens back and kept only when it ends in a whole character, so a stop string
    is found wherever token borders fall, and each token costs the same however long the answer is.
    """

    __slots__ = ("_detokenizer", "_num_emitted", "_num_read", "_stop", "_text", "_token_ids")

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        """Starts on an empty answer; `stop` has no empty string."""
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._text = ""
        self._num_emitted = 0
        self._num_read = 0

    def push(self, token_id: int, *, counts: bool) -> str | None:
        """Adds a token. Returns the answer cut before the first stop string, or None when there is none yet.

        Args:
            token_id: the next token of the answer.
            counts: False while `min_tokens` is not reached; a stop string that ends before then never counts.
        """
        self._token_ids.append(token_id)
        before = self._detokenizer.decode(self._token_ids[self._num_emitted : self._num_read])
        now = self._detokenizer.decode(self._token_ids[self._num_emitted :])
        new = now[len(before) :]
        found = self._cut(new) if counts and new else None
        if new and not new.endswith("\ufffd"):
            self._text += new
            self._num_emitted, self._num_read = self._num_read, len(self._token_ids)
        return found

    def _cut(self, new: str) -> str | None:
        """Text before the earliest stop string that ends in the new part."""
        known = len(self._text)
        text = self._text + new
        found: list[int] = []
        for stop in self._stop:
            at = text.find(stop, max(0, known - len(stop) + 1))
            if at >= 0:
                found.append(at)
        return text[: min(found)] if found else None
