"""What parsing makes of a line or a row, before it has token ids."""

from enum import StrEnum
from typing import Any

import msgspec

from blend_core.errors import RequestError
from blend_core.request import SamplingParams


class Endpoint(StrEnum):
    """The endpoints of OpenAI's Batch format that can be run."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class Draft(msgspec.Struct, frozen=True, gc=False):
    """A valid request whose prompt is still text, messages or the user's own token ids.

    Exactly one of `messages`, `prompt` and `prompt_token_ids` is not None. A msgspec struct because a
    dataclass costs ten times as much to make, and there is one for every line; out of the garbage collector's
    sight because it cannot be part of a cycle.

    Attributes:
        custom_id: the user's name for it; None for a row of a query without an id column.
        endpoint: chat or completion.
        model: the model that the request asks for; recorded, the job's model runs it.
        messages: `role` and `content` (text), as the chat template gets them.
        template_kwargs: further variables of the chat template.
        prompt: text of a completion.
        prompt_token_ids: token ids of a completion, not negative; the vocabulary is not checked here.
        sampling: complete, except that `max_tokens` may still be more than the context has room for.
        body: the bytes that it came from.
        prompt_template: key of what it has in common with requests whose answers are likely to be alike.
        lora_adapter: name of the LoRA adapter that is to answer.
    """

    custom_id: str | None
    endpoint: Endpoint
    model: str | None
    messages: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    prompt: str | None
    prompt_token_ids: list[int] | None
    sampling: SamplingParams
    body: bytes
    prompt_template: str
    lora_adapter: str | None = None


class SourceItem(msgspec.Struct, frozen=True, gc=False):
    """One non-blank line or row of a source, parsed.

    Attributes:
        source_uri: the object or query.
        source_line: line of the object or row of the query, from 1.
        custom_id: the user's name for it where valid, also of a request that is at fault elsewhere.
        parsed: the request, or what is wrong with it.
        excerpt: first characters of the prompt, or of the raw line of a bad one.
    """

    source_uri: str
    source_line: int
    custom_id: str | None
    parsed: Draft | RequestError
    excerpt: str
