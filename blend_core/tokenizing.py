"""Prompts to token ids with the model's own tokenizer and chat template."""

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blend_core.errors import ConfigurationError, RequestError, RequestErrorCode
from blend_core.tokenizer_folder import load_tokenizer

TokenIds = npt.NDArray[np.int32]
Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of one model folder.

    Nothing is truncated, padded or cleaned up. A chat's special tokens, the beginning-of-sequence token among
    them, come from its template alone; those of a completion from the tokenizer: no prompt begins with two.

    Batches are encoded on all cores by the tokenizer library itself. One request at fault harms no other. Not
    safe to share between threads.

    Attributes:
        vocab_size: rows of the model's embedding: token ids are below it.
        bos_token_id: the beginning-of-sequence token, where the model has one.
    """

    __slots__ = ("_fast", "_reserved_kwargs", "_tokenizer", "bos_token_id", "vocab_size")

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer of a Hugging Face folder.

        Raises:
            ConfigurationError: the folder has no tokenizer that can be loaded, or not a fast one.
        """
        # The library warns on every later fork unless the choice is made explicitly; this is its own default.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            tokenizer = load_tokenizer(folder)
        except Exception as error:
            raise ConfigurationError(
                f"The tokenizer in {folder} cannot be loaded ({type(error).__name__}); "
                "save the model's tokenizer there again."
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigurationError(
                f"The tokenizer in {folder} has no tokenizer.json; save a fast tokenizer there."
            )
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._reserved_kwargs = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {
            "messages"
        }
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.vocab_size = _vocab_size(folder, len(tokenizer))

    def render_chat(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """The text of a chat, up to where the assistant's answer begins.

        Args:
            messages: `role` and `content`.
            template_kwargs: further variables of the template.

        Raises:
            RequestError: CHAT_TEMPLATE_FAILED.
        """
        kwargs = template_kwargs or {}
        reserved = next((name for name in kwargs if name in self._reserved_kwargs), None)
        if reserved is not None:
            raise _template_error(f"{reserved!r} is not a variable that a request may set")
        if not self._tokenizer.chat_template:
            raise _template_error("the model has none; send /v1/completions instead")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **kwargs
            )
        except Exception as error:
            raise _template_error(_template_reason(error)) from None
        if not isinstance(text, str) or not text:
            raise _template_error("it renders to nothing")
        return text

    def encode_chat(
        self,
        chats: Sequence[Sequence[Message]],
        template_kwargs: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[TokenIds | RequestError]:
        """Token ids of each chat, or what is wrong with it.

        Args:
            chats: the messages of each.
            template_kwargs: further variables of the template for each chat; None for none.

        Returns:
            For each chat `(num_prompt_tokens,)` int32, read-only, or an error: CHAT_TEMPLATE_FAILED or
            TOKENIZER_FAILED.
        """
        texts: list[str | RequestError] = []
        for index, messages in enumerate(chats):
            try:
                texts.append(self.render_chat(messages, template_kwargs[index] if template_kwargs else None))
            except RequestError as error:
                texts.append(error)
        return self._encode(texts, add_special_tokens=False)

    def encode_completion(self, prompts: Sequence[str]) -> list[TokenIds | RequestError]:
        """Token ids of each prompt with the tokenizer's own special tokens, or what is wrong with it.

        A prompt that already begins with the beginning-of-sequence token gets no second one.

        Returns:
            For each prompt `(num_prompt_tokens,)` int32, read-only, or a TOKENIZER_FAILED error.
        """
        encoded = self._encode(prompts, add_special_tokens=True)
        return [ids if isinstance(ids, RequestError) else self._with_one_bos(ids) for ids in encoded]

    def check_token_ids(self, token_ids: Sequence[int]) -> TokenIds | RequestError:
        """Token ids of the user's own as an array, or TOKEN_OUT_OF_VOCABULARY."""
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            return RequestError(
                f"A token id is not in the model's vocabulary of {self.vocab_size}.",
                RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
            )
        return _frozen(token_ids)

    def _with_one_bos(self, ids: TokenIds) -> TokenIds:
        doubled = len(ids) > 1 and self.bos_token_id is not None and ids[0] == ids[1] == self.bos_token_id
        return ids[1:] if doubled else ids

    def _encode(
        self, texts: Sequence[str | RequestError], *, add_special_tokens: bool
    ) -> list[TokenIds | RequestError]:
        good = [text for text in texts if isinstance(text, str)]
        encoded = iter(self._encode_batch(good, add_special_tokens))
        return [text if isinstance(text, RequestError) else next(encoded) for text in texts]

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[TokenIds | RequestError]:
        try:
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not _is_tokenizer_fault(error):
                raise
            # The library fails a batch as a whole: find the texts that are at fault by halves.
            if len(texts) == 1:
                return [_tokenizer_error("the tokenizer cannot encode the prompt")]
            middle = len(texts) // 2
            return self._encode_batch(texts[:middle], add_special_tokens) + self._encode_batch(
                texts[middle:], add_special_tokens
            )
        return [self._checked(encoding.ids) for encoding in encodings]

    def _checked(self, ids: list[int]) -> TokenIds | RequestError:
        if not ids:
            return _tokenizer_error("the prompt has no tokens")
        return _frozen(ids)


def _frozen(ids: Sequence[int]) -> TokenIds:
    array = np.array(ids, dtype=np.int32)
    array.flags.writeable = False
    return array


def _vocab_size(folder: Path, num_tokens: int) -> int:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return num_tokens
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else num_tokens


def _is_tokenizer_fault(error: BaseException) -> bool:
    # A panic of the library's Rust code derives from BaseException and has no importable class.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _template_reason(error: Exception) -> str:
    # Templates refuse input by `raise_exception("…")`; other messages may quote the prompt and stay out.
    if type(error).__name__ == "TemplateError":
        return str(error)[:200] or "the template refused the messages"
    return f"the template failed with {type(error).__name__}"


def _template_error(reason: str) -> RequestError:
    return RequestError(
        f"The chat template cannot be filled: {reason}.", RequestErrorCode.CHAT_TEMPLATE_FAILED
    )


def _tokenizer_error(reason: str) -> RequestError:
    return RequestError(f"The prompt cannot be tokenised: {reason}.", RequestErrorCode.TOKENIZER_FAILED)
