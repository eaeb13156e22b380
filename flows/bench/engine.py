"""The torch engine under each admission policy, on one mixed file with KV so scarce that order matters."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blend_core.engines.base import (
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    RequestsReleased,
    StepWindow,
)
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.errors import ConfigurationError, EngineError, RequestError
from blend_core.model_store import ModelStore
from blend_core.planner import PlanConfig, build_plan
from blend_core.request import Request, RequestArrays, SamplingParams
from blend_core.specs import DeviceProfile, ModelSpec, load_device_profile
from blend_core.tokenizing import Tokenizer
from flows.demo import gsm8k_questions, mmlu_prompts
from flows.job_source import JobSource
from flows.settings import Settings

if TYPE_CHECKING:
    from blend_core.engines.torch.engine import TorchEngine

POLICIES = ("fcfs", "dfs", "dual_scan", "density_matched")
SHORT_ANSWER_TOKENS = 2
LONG_ANSWER_TOKENS = 96
LONG_ANSWER_SHARE = 0.25
BLOCK_SIZE = 16
NUM_KV_TOKENS = 2048
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """What one policy reached.

    Attributes:
        policy: its name.
        output_tokens_per_s: output tokens per second of wall time.
        total_tokens_per_s: prompt tokens, cached ones included, and output tokens per second of wall time.
        prefix_sharing: share of prompt tokens served from the cache at first admission.
        num_preempted: preemptions.
    """

    policy: str
    output_tokens_per_s: float
    total_tokens_per_s: float
    prefix_sharing: float
    num_preempted: int


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The figures of every policy, in the same order as they ran.

    Attributes:
        engine: name of the engine.
        model: the model's name.
        policies: one entry per policy; `fcfs` first.
    """

    engine: str
    model: str
    policies: tuple[PolicyFigures, ...]


def run_engine_bench(
    settings: Settings, model: str, num_requests: int, tell: Callable[[str], None]
) -> EngineFigures:
    """Runs the file once per policy with the same engine settings.

    Answers have preset lengths, so that every policy does the same work.

    Raises:
        ConfigurationError: the model is not known, or its tokenizer does not take the prompts.
        EngineError: a request had no answer.
    """
    from blend_core.engines.torch.engine import TorchEngine

    folder = ModelStore(settings.home / "models").resolve(model)
    requests = mixed_requests(Tokenizer(folder), num_requests, seed=0)
    device = load_device_profile(settings.engine.device_profile)
    figures = []
    for policy in POLICIES:
        options = TorchEngineOptions(
            model_folder=str(folder),
            policy=policy,
            device_profile=device,
            dtype=settings.engine.dtype,
            device=settings.engine.device,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_KV_TOKENS // BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_threads=settings.engine.num_threads or None,
        )
        engine = TorchEngine(options)
        try:
            spec = engine.open().model
            figures.append(_run_policy(engine, policy, requests, spec, device))
        finally:
            engine.close()
        tell(f"{policy}: {figures[-1].total_tokens_per_s:,.0f} tokens/s")
    return EngineFigures(TorchEngine.name, model, tuple(figures))


def mixed_requests(tokenizer: Tokenizer, num_requests: int, seed: int) -> list[Request]:
    """MMLU 5-shot prompts with short answers and GSM8K questions with long ones, shuffled.

    Raises:
        ConfigurationError: see `numbered_requests`.
    """
    num_long = round(num_requests * LONG_ANSWER_SHARE)
    short_prompts, questions = mmlu_prompts(), gsm8k_questions()
    rng = random.Random(seed)
    chosen = rng.sample(short_prompts, min(num_requests - num_long, len(short_prompts)))
    short = tokenizer.encode_completion(chosen)
    long = tokenizer.encode_chat([[{"role": "user", "content": text}] for text in questions[:num_long]])
    answers = [(ids, SHORT_ANSWER_TOKENS) for ids in short] + [(ids, LONG_ANSWER_TOKENS) for ids in long]
    rng.shuffle(answers)
    return numbered_requests(
        (ids, SamplingParams(num_tokens, min_tokens=num_tokens, temperature=0.0, ignore_eos=True))
        for ids, num_tokens in answers
    )


def numbered_requests(
    prompts: Iterable[tuple[npt.NDArray[np.int32] | RequestError, SamplingParams]],
) -> list[Request]:
    """Requests of a benchmark's file, each with its place there as `seq`.

    Raises:
        ConfigurationError: a prompt could not be tokenised; without it figures would be of another file.
    """
    requests = []
    for seq, (token_ids, sampling) in enumerate(prompts):
        if isinstance(token_ids, RequestError):
            raise ConfigurationError(
                f"Prompt {seq} of the benchmark's file cannot be tokenised ({token_ids.code}); choose a "
                "model whose tokenizer takes it."
            )
        requests.append(Request(seq, token_ids, sampling))
    return requests


def request_arrays(requests: Sequence[Request]) -> RequestArrays:
    """The requests in flat arrays."""
    lengths = np.array([request.num_prompt_tokens for request in requests], dtype=np.int64)
    return RequestArrays(
        seq=np.array([request.seq for request in requests], dtype=np.int64),
        token_ids=np.concatenate([request.prompt_token_ids for request in requests]),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
        min_tokens=np.array([request.sampling.min_tokens for request in requests], dtype=np.int32),
        max_tokens=np.array([request.sampling.max_tokens for request in requests], dtype=np.int32),
    )


def _run_policy(
    engine: "TorchEngine", policy: str, requests: Sequence[Request], model: ModelSpec, device: DeviceProfile
) -> PolicyFigures:
    plan = build_plan(
        request_arrays(requests), model, device, PlanConfig(policy, BLOCK_SIZE, sample_fraction=0)
    )
    source = JobSource(plan, lambda seqs: [requests[seq] for seq in seqs])
    num_output = num_prompt = num_cached = num_preempted = 0
    busy_s = 0.0
    for event in engine.run(source):
        match event:
            case RequestFinished():
                num_output += event.num_output_tokens
                num_prompt += event.num_prompt_tokens
                num_cached += event.num_cached_tokens
            case StepWindow():
                num_preempted += event.num_preempted
                busy_s += event.duration_s
            case RequestsAdmitted() | RequestsReleased():
                pass
            case RequestFailed():
                raise EngineError(
                    f"Request {event.seq} failed under {policy}: {event.message}", seq=event.seq
                )
    return PolicyFigures(
        policy=policy,
        output_tokens_per_s=num_output / busy_s,
        total_tokens_per_s=(num_prompt + num_output) / busy_s,
        prefix_sharing=num_cached / num_prompt,
        num_preempted=num_preempted,
    )
