"""A request as vLLM takes it, and why one can never run: told before vLLM sees it."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Final

from vllm import SamplingParams as VllmSampling
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from blend_core.engines.vllm.error_words import words_of
from blend_core.engines.vllm.scheduler_view import RUN_ARGUMENT, SEQ_ARGUMENT
from blend_core.errors import RequestErrorCode
from blend_core.request import Request, longest_kv_tokens
from blend_core.wording import count_text

Problem = tuple[RequestErrorCode, str]


@dataclass(frozen=True, slots=True)
class RequestRules:
    """What every request of a run must keep to.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: longest prompt plus answer.
        kv_capacity_tokens: tokens that the whole KV cache holds.
        lora_adapters: names of the adapters.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int
    lora_adapters: Collection[str]

    def problem(self, request: Request) -> Problem | None:
        """Why a request can never run, None where it can."""
        token_ids = request.prompt_token_ids
        if not len(token_ids):
            return RequestErrorCode.EMPTY_PROMPT, "The prompt has no tokens."
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            return (
                RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
                f"The prompt holds a token id outside the model's vocabulary of {self.vocab_size}.",
            )
        if len(token_ids) >= self.max_model_len:
            return (
                RequestErrorCode.PROMPT_TOO_LONG,
                f"The prompt has {count_text(len(token_ids), 'token')}; "
                f"the model takes at most {self.max_model_len - 1:,}.",
            )
        num_tokens = int(longest_kv_tokens(len(token_ids), request.sampling.max_tokens, self.max_model_len))
        if num_tokens > self.kv_capacity_tokens:
            return (
                RequestErrorCode.REQUEST_TOO_LARGE,
                f"Prompt and max_tokens need {count_text(num_tokens, 'token')} of KV cache, which holds "
                f"{self.kv_capacity_tokens:,}; lower max_tokens or give the engine more KV cache.",
            )
        if request.lora_adapter is not None and request.lora_adapter not in self.lora_adapters:
            return (
                RequestErrorCode.UNKNOWN_LORA_ADAPTER,
                "The engine has no LoRA adapter of the name that the request asks for; see `lora_adapters`.",
            )
        return _schema_problem(request.sampling.json_schema)


def _schema_problem(json_schema: str | None) -> Problem | None:
    if json_schema is None:
        return None
    try:
        schema = json.loads(json_schema)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        return RequestErrorCode.INVALID_SCHEMA, "The JSON schema is no JSON object."
    return None


SCHEMA_CHECK: Final = "_validate_structured_outputs"
"""Where vLLM checks that it can generate by a JSON schema."""


def refusal(error: Exception) -> Problem:
    """What becomes of a request that vLLM refused with this error.

    Of a JSON schema it says what it cannot generate by; elsewhere its own words may quote the prompt.
    """
    if any(frame.f_code.co_name == SCHEMA_CHECK for frame, _ in walk_tb(error.__traceback__)):
        return (
            RequestErrorCode.INVALID_SCHEMA,
            f"vLLM cannot generate by the request's JSON schema ({words_of(error)}); simplify it.",
        )
    return (
        RequestErrorCode.ENGINE_FAILED,
        f"vLLM refuses the request ({type(error).__name__}); check its sampling parameters.",
    )


def lora_requests(folders: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Adapters by name, as vLLM takes them, from their folders by name."""
    return {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(sorted(folders.items()), start=1)
    }


def vllm_prompt(request: Request) -> Any:
    """The prompt, as vLLM's renderer would give it."""
    return tokens_input(request.prompt_token_ids.tolist())


def vllm_sampling(request: Request, run: int, max_model_len: int) -> Any:
    """The sampling parameters in vLLM's form, with no more tokens than there is room for.

    Raises what vLLM raises on values that it refuses.
    """
    sampling = request.sampling
    max_tokens = min(sampling.max_tokens, max_model_len - request.num_prompt_tokens)
    structured = None
    if sampling.json_schema is not None:
        structured = StructuredOutputsParams(json=sampling.json_schema)
    return VllmSampling(
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_tokens, max_tokens),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=list(sampling.stop),
        ignore_eos=sampling.ignore_eos,
        structured_outputs=structured,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={SEQ_ARGUMENT: request.seq, RUN_ARGUMENT: run},
    )
