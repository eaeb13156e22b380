"""Requests as the planner and the engines see them: token ids and sampling parameters, no text."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def longest_kv_tokens(
    num_prompt_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike, max_model_len: int
) -> npt.NDArray[np.int64]:
    """Returns the tokens of KV that requests need with the longest answer they may have; arguments broadcast.

    A request that needs more than the whole cache holds is refused before it runs. The model's length ends an
    answer, too, and the last token of one is never read.
    """
    longest = np.asarray(num_prompt_tokens, dtype=np.int64) + np.asarray(max_tokens, dtype=np.int64)
    return np.asarray(np.minimum(longest, max_model_len) - 1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is sampled; field names are vLLM's.

    Attributes:
        max_tokens: upper bound of output tokens, at least 1.
        min_tokens: no end-of-sequence token and no stop string counts before that many output tokens.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: 0 keeps the whole vocabulary.
        seed: None draws from the run's own generator.
        stop: strings that end the answer; they are cut from its text.
        ignore_eos: generate on after an end-of-sequence token.
        json_schema: the JSON schema, as JSON, that the answer keeps to; None lets it be any text.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None

    @property
    def has_preset_length(self) -> bool:
        """Whether the answer's length is fixed before it runs, as `output_length.preset_lengths` says of
        many."""
        return self.min_tokens >= self.max_tokens or self.max_tokens == 1


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt with its sampling parameters.

    Attributes:
        seq: number of the request in its job, from 0.
        prompt_token_ids: `(num_prompt_tokens,)` int32, never empty, read-only.
        sampling: how the answer is sampled.
        lora_adapter: name of the LoRA adapter that answers; None for the model itself.
    """

    seq: int
    prompt_token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    lora_adapter: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrays:
    """Every request of a job in flat arrays: what the planner reads. Row order carries no meaning.

    Attributes:
        seq: `(num_requests,)` int64, unique.
        token_ids: `(num_prompt_tokens_in_total,)` int32, the prompts one after the other.
        offsets: `(num_requests + 1,)` int64; prompt `i` is `token_ids[offsets[i]:offsets[i + 1]]`, never
            empty.
        min_tokens: `(num_requests,)` int32. Equal to `max_tokens` where the output length is preset.
        max_tokens: `(num_requests,)` int32, at least 1.
    """

    seq: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    min_tokens: npt.NDArray[np.int32]
    max_tokens: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def num_prompt_tokens(self) -> npt.NDArray[np.int64]:
        """`(num_requests,)` prompt tokens of each request."""
        return np.diff(self.offsets)

    def take(self, indices: npt.NDArray[np.int64]) -> "RequestArrays":
        """Returns a copy with the named rows only, in the order of `indices`. Does not mutate."""
        starts, ends = self.offsets[indices], self.offsets[indices + 1]
        offsets = np.zeros(len(indices) + 1, dtype=np.int64)
        np.cumsum(ends - starts, out=offsets[1:])
        prompts = [self.token_ids[start:end] for start, end in zip(starts, ends, strict=True)]
        return RequestArrays(
            seq=self.seq[indices],
            token_ids=np.concatenate(prompts) if prompts else np.empty(0, dtype=np.int32),
            offsets=offsets,
            min_tokens=self.min_tokens[indices],
            max_tokens=self.max_tokens[indices],
        )

    def lexical_order(self) -> npt.NDArray[np.int64]:
        """Returns `(num_requests,)` rows in lexical order of the token ids, equal prompts by `seq`."""
        # Here and below: the compiler loads slowly, and engines, which know requests too, need no order.
        from blend_core.prompt_order import order_of_tokens

        return order_of_tokens(self.token_ids, self.offsets, self.seq)

    def shared_with_previous(self, order: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
        """Returns `(len(order),)` leading tokens that each row of `order` shares with the row before it.

        In whole blocks, and never the whole prompt; the first row shares 0.
        """
        from blend_core.prompt_order import common_tokens

        shared: npt.NDArray[np.int64] = common_tokens(self.token_ids, self.offsets, order, block_size)
        return shared
