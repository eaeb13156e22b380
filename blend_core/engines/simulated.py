"""The simulator behind the Engine contract: for dry runs and tests. Its answers are empty."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from blend_core.engines.base import (
    EngineEvent,
    EngineInfo,
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    RequestSource,
    StepWindow,
)
from blend_core.errors import RequestErrorCode
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import make_policy
from blend_core.request import Request, RequestArrays
from blend_core.simulation.prompts import PromptBlocks
from blend_core.simulation.stepper import SimulatedEnd, SimulationEvent, Stepper
from blend_core.specs import DeviceProfile, ModelSpec

OutputLengths = Callable[[Request], int]
"""Says how long a request's answer will be, in tokens."""

_FETCH_SIZE = 4096


@dataclass(frozen=True, slots=True)
class SampledOutputLengths:
    """Lengths drawn evenly between `min_tokens` and `max_tokens`, the same for the same seed and `seq`.

    Attributes:
        seed: of the draw.
    """

    seed: int

    def __call__(self, request: Request) -> int:
        """Output tokens of the request, at least 1."""
        first = max(1, request.sampling.min_tokens)
        last = max(first, request.sampling.max_tokens)
        return int(np.random.default_rng((self.seed, request.seq)).integers(first, last, endpoint=True))


class SimulatedEngine:
    """An `Engine` that computes no token: it tells how long a job would take on a device, with which batches.

    Every answer has an empty text and token ids that are all 0, which only give its length; `details` says
    `simulated: true`. Times are simulated seconds after the time of the call to `run`, which itself takes no
    longer than the simulation does. All prompts are fetched at the start, since only their hashes are kept.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: DeviceProfile,
        limits: EngineLimits,
        policy_name: str,
        *,
        overlap: bool,
        output_lengths: OutputLengths,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Holds nothing but its options.

        Args:
            model: what would run.
            device: on what.
            limits: KV blocks and batch bounds.
            policy_name: one of `POLICY_NAMES`.
            overlap: whether decode attention would run beside compute.
            output_lengths: true lengths of the answers; cut to `max_tokens`.
            clock: seconds since the epoch.
        """
        self._info = EngineInfo(
            engine="simulated",
            model=model,
            device=device,
            limits=limits,
            details={"simulated": "true", "policy": policy_name, "overlap": str(overlap).lower()},
        )
        self._policy_name = policy_name
        self._overlap = overlap
        self._output_lengths = output_lengths
        self._clock = clock

    def open(self) -> EngineInfo:
        """Returns what is simulated."""
        return self._info

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        """Simulates everything in the source; see `Engine.run`."""
        plan = source.plan()
        job = _Job.fetch(source, plan, self._output_lengths)
        stepper = Stepper(
            job.seqs,
            PromptBlocks.of(job.prompts, self._info.limits.block_size),
            job.output_tokens,
            make_policy(self._policy_name, plan, self._info.limits),
            self._info.model,
            self._info.device,
            self._info.limits,
            revision=plan.revision,
            overlap=self._overlap,
            started_at=self._clock(),
        )
        while True:
            stepper.withdraw(source.withdrawn())
            revision = source.revision()
            window = None if revision is None else stepper.revise(revision)
            if window is not None:
                yield window
            if stepper.is_done:
                break
            events = stepper.advance()
            admitted = stepper.take_admitted()
            if admitted:
                yield RequestsAdmitted(admitted)
            for event in events:
                yield job.event(event)
        window = stepper.flush()
        if window is not None:
            yield window

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class _Job:
    seqs: list[int]
    prompts: RequestArrays
    output_tokens: list[int]

    @classmethod
    def fetch(cls, source: RequestSource, plan: Plan, output_lengths: OutputLengths) -> "_Job":
        seqs = plan.seq.tolist()
        token_ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        num_prompt_tokens, output_tokens, min_tokens, max_tokens = [], [], [], []
        for first in range(0, len(seqs), _FETCH_SIZE):
            for request in source.fetch(seqs[first : first + _FETCH_SIZE]):
                token_ids.append(np.asarray(request.prompt_token_ids, dtype=np.int32))
                num_prompt_tokens.append(request.num_prompt_tokens)
                output_tokens.append(max(1, min(output_lengths(request), request.sampling.max_tokens)))
                min_tokens.append(request.sampling.min_tokens)
                max_tokens.append(request.sampling.max_tokens)
        prompts = RequestArrays(
            seq=np.array(seqs, dtype=np.int64),
            token_ids=np.concatenate([np.zeros(0, dtype=np.int32), *token_ids]),
            offsets=np.concatenate([[0], np.cumsum(num_prompt_tokens)]).astype(np.int64),
            min_tokens=np.array(min_tokens, dtype=np.int32),
            max_tokens=np.array(max_tokens, dtype=np.int32),
        )
        return cls(seqs, prompts, output_tokens)

    def event(self, event: SimulationEvent) -> EngineEvent:
        if isinstance(event, StepWindow):
            return event
        return self._ending(event)

    def _ending(self, end: SimulatedEnd) -> RequestFinished | RequestFailed:
        seq = self.seqs[end.row]
        num_prompt_tokens = int(self.prompts.offsets[end.row + 1] - self.prompts.offsets[end.row])
        if not end.fits:
            return RequestFailed(
                seq=seq,
                revision=end.revision,
                code=RequestErrorCode.REQUEST_TOO_LARGE,
                message="Prompt and answer need more KV cache than there is; lower max_tokens.",
                failed_at=end.finished_at,
            )
        is_longest = end.num_output_tokens >= int(self.prompts.max_tokens[end.row])
        return RequestFinished(
            seq=seq,
            revision=end.revision,
            output_text="",
            output_token_ids=(0,) * end.num_output_tokens,
            finish_reason="length" if is_longest else "stop",
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=end.num_cached_tokens,
            started_at=end.started_at,
            finished_at=end.finished_at,
        )
