"""What requests of one kind have in common, as a short key: their answers are about as long every night.

A key is a hash, so that no prompt can be read from it. It covers whatever else shapes the length of an
answer: endpoint, bounds, stop strings, variables of the chat template.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from blend_core.request import SamplingParams

OPENING_CHARS: Final = 24
"""Characters of a first message that stand for its template: about the words before the first value."""

OPENING_TOKENS: Final = 8
"""Tokens of a prompt given as token ids that do."""

_KEY_DIGITS: Final = 16
_encode = msgspec.json.Encoder().encode


def row_template_key(system: str | None, prompt: str, sampling: SamplingParams) -> str:
    """Key of the rows that fill a source's templates."""
    return _key(("rows", system, prompt), sampling)


def chat_key(
    endpoint: str,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    sampling: SamplingParams,
) -> str:
    """Key of a chat: its system messages; without one, how its first message opens."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    shared = system or messages[0]["content"][:OPENING_CHARS]
    return _key((endpoint, shared, template_kwargs), sampling)


def completion_key(endpoint: str, prompt: str | Sequence[int], sampling: SamplingParams) -> str:
    """Key of a completion: how its prompt opens."""
    opening = prompt[:OPENING_CHARS] if isinstance(prompt, str) else prompt[:OPENING_TOKENS]
    return _key((endpoint, opening), sampling)


def _key(shared: tuple[Any, ...], sampling: SamplingParams) -> str:
    # A stop string may hold half a character, which is no JSON text.
    stop = [text.encode(errors="surrogatepass") for text in sampling.stop]
    shape: tuple[Any, ...] = (sampling.max_tokens, sampling.min_tokens, stop, sampling.ignore_eos)
    if sampling.json_schema is not None:
        shape = (*shape, sampling.json_schema)
    return hashlib.sha256(_encode((shared, shape))).hexdigest()[:_KEY_DIGITS]
