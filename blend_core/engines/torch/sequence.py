"""One request while the engine has it: its tokens, its blocks, how its answer ends."""

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass

from blend_core.engines.torch.block_pool import BlockHash, extend_chain
from blend_core.engines.torch.detokenizer import Detokenizer, StopMatcher
from blend_core.engines.torch.sampler import SampledRow, derived_seed
from blend_core.policies.base import Side
from blend_core.request import Request


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What is the same for every answer of a run.

    Attributes:
        max_model_len: longest prompt plus answer.
        eos_token_ids: tokens that end an answer.
        run_seed: behind requests that bring no seed.
        detokenizer: of the model.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]
    run_seed: int
    detokenizer: Detokenizer


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended.

    Attributes:
        text: decoded answer, stop string cut off.
        finish_reason: `stop` or `length`.
    """

    text: str
    finish_reason: str


class Sequence:
    """A request with its answer so far.

    Attributes:
        request: as the source gave it.
        token_ids: prompt and answer so far.
        block_ids: KV blocks, in order; empty while waiting.
        num_computed_tokens: leading tokens whose KV is there.
        num_once_computed_tokens: the most that ever were, before a preemption threw them away.
        num_named_blocks: leading blocks that were offered to the prefix cache.
        is_decoding: its prompt is complete, each step adds a token.
        side: from which end of the plan it was last admitted.
        revision: plan revision at first admission.
        started_at: first admission; None before it.
        num_cached_tokens: prompt tokens that came from the cache at first admission.
        max_output_tokens: `max_tokens`, or less where the model's positions end.
    """

    __slots__ = (
        "_chain",
        "_matcher",
        "_rules",
        "_seed",
        "block_ids",
        "is_decoding",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_named_blocks",
        "num_once_computed_tokens",
        "request",
        "revision",
        "side",
        "started_at",
        "token_ids",
    )

    def __init__(self, request: Request, rules: AnswerRules) -> None:
        """Starts without an answer."""
        sampling = request.sampling
        stop = [string for string in sampling.stop if string]
        self.request = request
        self.token_ids: list[int] = request.prompt_token_ids.tolist()
        self.block_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_once_computed_tokens = 0
        self.num_named_blocks = 0
        self.is_decoding = False
        self.side = Side.LEFT
        self.revision = 0
        self.started_at: float | None = None
        self.num_cached_tokens = 0
        self.max_output_tokens = min(sampling.max_tokens, rules.max_model_len - request.num_prompt_tokens)
        self._rules = rules
        self._seed = derived_seed(rules.run_seed, request.seq) if sampling.seed is None else sampling.seed
        self._matcher = StopMatcher(rules.detokenizer, stop) if stop else None
        self._chain: list[BlockHash] = []

    @property
    def seq(self) -> int:
        """Number of the request."""
        return self.request.seq

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The answer so far."""
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not there: 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    def chain(self, block_size: int, num_blocks: int) -> TokenIds[BlockHash]:
        """Names of the first `num_blocks` whole blocks."""
        extend_chain(self._chain, self.token_ids, block_size, num_blocks)
        return self._chain[:num_blocks]

    def sampled_row(self) -> SampledRow:
        """How the next token is drawn."""
        sampling = self.request.sampling
        early = self.num_output_tokens < sampling.min_tokens and not sampling.ignore_eos
        banned = self._rules.eos_token_ids if early else frozenset[int]()
        return SampledRow(sampling, self._seed, self.num_output_tokens, banned)

    def take(self, token_id: int) -> Ending | None:
        """Appends a token; returns how the answer ends, if it does.

        Raises whatever the tokenizer raises on tokens that it cannot decode.
        """
        self.token_ids.append(token_id)
        sampling, decode = self.request.sampling, self._rules.detokenizer.decode
        if token_id in self._rules.eos_token_ids and not sampling.ignore_eos:
            return Ending(decode(self.output_token_ids[:-1]), "stop")
        if self._matcher is not None:
            cut = self._matcher.push(token_id, counts=self.num_output_tokens >= sampling.min_tokens)
            if cut is not None:
                return Ending(cut, "stop")
        if self.num_output_tokens >= self.max_output_tokens:
            return Ending(decode(self.output_token_ids), "length")
        return None

    def lose_blocks(self) -> None:
        """Forgets its KV; tokens stay, to be computed again as prompt."""
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_named_blocks = 0
        self.is_decoding = False
