"""Look at a request file before anything runs: every fault of its lines, and what a plan of it promises."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from blend_core.errors import RequestError, RequestErrorCode
from blend_core.plan import PlanSummary
from blend_core.planner import PlanConfig, build_plan
from blend_core.policies.base import EngineLimits
from blend_core.request import RequestArrays
from blend_core.simulator import SimulationResult, simulate
from blend_core.specs import DeviceProfile, ModelSpec
from blend_core.tokenizing import Tokenizer
from flows.ingest.custom_ids import CustomIds
from flows.ingest.draft import Draft
from flows.ingest.parse import ParseOptions, is_blank, parse_line

FORECAST_POLICIES = ("fcfs", "dfs", "dual_scan")
MAX_SIMULATED_REQUESTS = 4_000
LINES_AT_ONCE = 4096
BYTES_PER_TOKEN = 4
"""Bytes of text that stand for a token where the model has no tokenizer here."""


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A non-blank line as it was found.

    Attributes:
        number: line of the file, from 1.
        custom_id: where it is valid.
        draft: the request, None for a bad line.
        code: what is wrong, None for a good line.
        reason: one sentence, empty for a good line.
    """

    number: int
    custom_id: str | None
    draft: Draft | None
    code: RequestErrorCode | None
    reason: str


def check_lines(lines: Iterable[tuple[int, bytes]], options: ParseOptions) -> Iterator[CheckedLine]:
    """Every non-blank line, parsed and checked, repeated ids included. Memory is bounded by the ids alone."""
    known = CustomIds()
    numbered = ((number, line) for number, line in lines if not is_blank(line))
    while batch := [_checked(number, line, options) for number, line in islice(numbered, LINES_AT_ONCE)]:
        named = [line for line in batch if line.custom_id is not None]
        first_use = known.add(
            [str(line.custom_id) for line in named], np.array([line.number for line in named], dtype=np.int64)
        )
        repeated = {
            line.number: int(first) for line, first in zip(named, first_use, strict=True) if first >= 0
        }
        for line in batch:
            yield _duplicate(line, repeated[line.number]) if line.number in repeated else line


def _checked(number: int, line: bytes, options: ParseOptions) -> CheckedLine:
    try:
        draft = parse_line(line, options)
    except RequestError as error:
        custom_id = error.ids.get("custom_id")
        return CheckedLine(
            number, None if custom_id is None else str(custom_id), None, error.code, error.message
        )
    return CheckedLine(number, draft.custom_id, draft, None, "")


def _duplicate(line: CheckedLine, first: int) -> CheckedLine:
    if line.code is not None:
        return line
    reason = f"`custom_id` was used in line {first} already."
    return CheckedLine(line.number, line.custom_id, None, RequestErrorCode.DUPLICATE_CUSTOM_ID, reason)


@dataclass(frozen=True, slots=True)
class DryRequests:
    """Requests of a file as a planner reads them.

    Attributes:
        arrays: the requests that can be planned.
        num_bad: lines that would become error rows.
    """

    arrays: RequestArrays
    num_bad: int


def read_requests(
    lines: Iterable[CheckedLine], tokenizer: Tokenizer | None, max_model_len: int
) -> DryRequests:
    """Token ids of every good line.

    Args:
        lines: as `check_lines` gives them.
        tokenizer: the model's own; None takes groups of `BYTES_PER_TOKEN` bytes for tokens, which keeps
            shared prefixes and gets lengths roughly right for English.
        max_model_len: longest prompt plus answer; longer prompts count as bad, answers are cut to what is
            left.
    """
    prompts: list[npt.NDArray[np.int32]] = []
    bounds: list[tuple[int, int]] = []
    num_bad = 0
    checked = iter(lines)
    while batch := list(islice(checked, LINES_AT_ONCE)):
        drafts = [line.draft for line in batch if line.draft is not None]
        num_bad += len(batch) - len(drafts)
        encoded = (
            _encode(drafts, tokenizer) if tokenizer is not None else [_pieces(draft) for draft in drafts]
        )
        for draft, token_ids in zip(drafts, encoded, strict=True):
            if isinstance(token_ids, RequestError) or not 0 < len(token_ids) < max_model_len:
                num_bad += 1
                continue
            max_tokens = min(draft.sampling.max_tokens, max_model_len - len(token_ids))
            prompts.append(token_ids)
            bounds.append((min(draft.sampling.min_tokens, max_tokens), max_tokens))
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    limits = np.array(bounds, dtype=np.int32).reshape(-1, 2)
    arrays = RequestArrays(
        seq=np.arange(len(prompts), dtype=np.int64),
        token_ids=np.concatenate(prompts) if prompts else np.empty(0, dtype=np.int32),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
        min_tokens=np.ascontiguousarray(limits[:, 0]),
        max_tokens=np.ascontiguousarray(limits[:, 1]),
    )
    return DryRequests(arrays, num_bad)


def _encode(drafts: Sequence[Draft], tokenizer: Tokenizer) -> list[npt.NDArray[np.int32] | RequestError]:
    chats = [draft for draft in drafts if draft.messages is not None]
    texts = [draft for draft in drafts if draft.prompt is not None]
    encoded_chats = iter(
        tokenizer.encode_chat(
            [draft.messages or [] for draft in chats], [draft.template_kwargs for draft in chats]
        )
    )
    encoded_texts = iter(tokenizer.encode_completion([draft.prompt or "" for draft in texts]))
    return [
        next(encoded_chats)
        if draft.messages is not None
        else next(encoded_texts)
        if draft.prompt is not None
        else tokenizer.check_token_ids(draft.prompt_token_ids or [])
        for draft in drafts
    ]


def _pieces(draft: Draft) -> npt.NDArray[np.int32]:
    """Groups of bytes as token ids: equal text gives equal ids."""
    if draft.prompt_token_ids is not None:
        return np.array(draft.prompt_token_ids, dtype=np.int32)
    text = draft.prompt
    if text is None:
        text = "".join(f"{message['role']}\n{message['content']}\n" for message in draft.messages or [])
    data = text.encode()
    padded = data + bytes(-len(data) % BYTES_PER_TOKEN)
    return np.frombuffer(padded, dtype=np.int32) & np.int32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class PolicyForecast:
    """What a policy promises for a file.

    Attributes:
        policy: its name.
        prefix_sharing: share of prompt tokens that neighbours in its order share.
        estimated_duration_s: simulated; None where the file is too large to simulate.
        simulated_sharing: prefix sharing in the simulation; None like the duration.
        num_preempted: preemptions in the simulation; None like the duration.
    """

    policy: str
    prefix_sharing: float
    estimated_duration_s: float | None
    simulated_sharing: float | None
    num_preempted: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """A dry run of planning.

    Attributes:
        summary: of the plan for `dual_scan`; what does not depend on the order holds for every policy.
        policies: one entry per policy.
    """

    summary: PlanSummary
    policies: tuple[PolicyForecast, ...]


def forecast(
    requests: RequestArrays, model: ModelSpec, device: DeviceProfile, limits: EngineLimits
) -> Forecast:
    """Plans and simulates the requests under each policy, as an engine without overlap would run them.

    Answers are taken to be as long as the planner estimates.

    Raises:
        PlanError: there is no request to plan.
    """
    forecasts = []
    summary: PlanSummary | None = None
    for policy in FORECAST_POLICIES:
        config = PlanConfig(policy=policy, block_size=limits.block_size, sample_fraction=0.0)
        plan = build_plan(requests, model, device, config)
        simulated: SimulationResult | None = None
        if len(plan) <= MAX_SIMULATED_REQUESTS:
            lengths = np.empty(len(requests), dtype=np.int64)
            # Rows of `requests` are numbered by seq here, so a plan's seqs are rows.
            lengths[plan.seq] = np.maximum(np.rint(plan.estimated_output_tokens), 1).astype(np.int64)
            simulated = simulate(requests, lengths, plan, policy, model, device, limits, overlap=False)
        forecasts.append(
            PolicyForecast(
                policy=policy,
                prefix_sharing=plan.summary.prefix_sharing_planned,
                estimated_duration_s=None if simulated is None else simulated.duration_s,
                simulated_sharing=None if simulated is None else simulated.prefix_sharing,
                num_preempted=None if simulated is None else simulated.num_preempted,
            )
        )
        summary = plan.summary
    assert summary is not None
    return Forecast(summary, tuple(forecasts))
