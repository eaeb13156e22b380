"""Drafts to token ids, and whether a prompt leaves the model room for an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from blend_core.errors import RequestError, RequestErrorCode
from blend_core.request import SamplingParams
from blend_core.tokenizing import TokenIds, Tokenizer
from blend_core.wording import count_text
from flows.ingest.draft import Draft


def encode_drafts(drafts: Sequence[Draft], tokenizer: Tokenizer) -> Iterator[TokenIds | RequestError]:
    """Token ids in the order of the drafts, or what is wrong; each kind of prompt is encoded as one batch."""
    chats = [draft for draft in drafts if draft.messages is not None]
    texts = [draft.prompt for draft in drafts if draft.prompt is not None]
    encoded_chats = iter(
        tokenizer.encode_chat(
            [draft.messages or [] for draft in chats], [draft.template_kwargs for draft in chats]
        )
    )
    encoded_texts = iter(tokenizer.encode_completion(texts))
    for draft in drafts:
        if draft.messages is not None:
            yield next(encoded_chats)
        elif draft.prompt is not None:
            yield next(encoded_texts)
        else:
            yield tokenizer.check_token_ids(draft.prompt_token_ids or [])


def fitted_request(
    draft: Draft, token_ids: TokenIds | RequestError, max_model_len: int
) -> tuple[TokenIds, SamplingParams] | RequestError:
    """The prompt, and the draft's sampling parameters with `max_tokens` cut to the room that is left.

    A prompt needs room for itself and at least one output token, or `min_tokens` where that is more; else it
    is PROMPT_TOO_LONG. `token_ids` is what `encode_drafts` gave; an error stays what it is.
    """
    if isinstance(token_ids, RequestError):
        return token_ids
    sampling, num_prompt_tokens = draft.sampling, len(token_ids)
    room = max_model_len - num_prompt_tokens
    least = max(1, sampling.min_tokens)
    if room < least:
        return RequestError(
            f"The prompt has {count_text(num_prompt_tokens, 'token')} and must leave room for {least:,} of "
            f"output; the model's context is {count_text(max_model_len, 'token')}.",
            RequestErrorCode.PROMPT_TOO_LONG,
        )
    return token_ids, replace(sampling, max_tokens=room) if sampling.max_tokens > room else sampling
