"""The engine contract: `open`, then `run(source)` yields events as they happen.

An engine is opened once per rank and run. It pulls requests from a `RequestSource` in a bounded window,
admits them only as its `AdmissionPolicy` says, and streams results as they finish. Times are seconds since
the epoch (`started_at`, `finished_at`) or durations (`_s`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from blend_core.errors import RequestErrorCode
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits
from blend_core.request import Request
from blend_core.specs import DeviceProfile, ModelSpec


@dataclass(frozen=True, slots=True)
class RequestsAdmitted:
    """Requests that are in flight from the next step on, told before the outputs of that step, and before the
    engine's death if it dies in it.

    What was admitted and has not ended when the engine dies is what it may have died of. Told once a
    request: one that is preempted is not admitted anew.

    Attributes:
        seqs: the requests, in the order of their admission.
    """

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """One answer.

    Attributes:
        seq: the request.
        revision: plan revision in force when it was admitted.
        output_text: decoded answer, stop string cut off, special tokens left out.
        output_token_ids: tokens of the answer, the one that ended it included.
        finish_reason: OpenAI's `stop` (end of sequence or a stop string) or `length`.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: prompt tokens served from the cache at first admission.
        started_at: first admission.
        finished_at: last token.
    """

    seq: int
    revision: int
    output_text: str
    output_token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    started_at: float
    finished_at: float

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """One request that has no answer and will get none; the run goes on.

    Attributes:
        seq: the request.
        revision: plan revision in force.
        code: the row's `error_code`.
        message: one sentence, without the prompt.
        failed_at: when.
    """

    seq: int
    revision: int
    code: RequestErrorCode
    message: str
    failed_at: float


@dataclass(frozen=True, slots=True)
class RequestsReleased:
    """The answer to requests that a source asked back; told by an engine in a process of its own.

    Attributes:
        seqs: those that had not started: the engine has dropped them, and no later event is of them.
        kept: those that are in flight: they run on.
    """

    seqs: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The batch measured over a window of steps: closed after 64 steps or 1 s, never across a plan revision.

    `prefill_tokens_sq` and `decode_kv_tokens` are what the formulas need beside the counts, so that the
    density of a window can be told for any model and device, not only the one it ran on.

    Attributes:
        batch_index: 0, 1, … within the rank and run.
        revision: plan revision in force.
        started_at: start of its first step.
        duration_s: measured wall time of its steps, idle time between them left out.
        predicted_s: the performance model's time for the same steps.
        num_steps: forward passes.
        num_prefill_tokens: prompt tokens computed (cached ones not), recomputation after preemption included.
        num_decode_tokens: output tokens computed, the first of each answer not (it comes from the prefill).
        num_cached_tokens: prompt tokens served from the cache by admissions in the window.
        num_recomputed_tokens: those of `num_prefill_tokens` that had been computed before a preemption.
        prefill_tokens_sq: sum over chunks of `(c + t)^2 - c^2`, `t` tokens after `c` earlier ones.
        decode_kv_tokens: sum over decode tokens of the KV tokens read, the new one included.
        compute_s: seconds of compute at the device's peak figures (ALGORITHM §1).
        memory_s: seconds of KV reading at the device's peak bandwidth.
        kv_usage: mean share of KV blocks referred to by requests in flight, 0 to 1.
        num_running_left: mean requests in flight from the left side.
        num_running_right: mean requests in flight from the right side.
        num_preempted: preemptions.
        num_finished: requests that ended in the window.
    """

    batch_index: int
    revision: int
    started_at: float
    duration_s: float
    predicted_s: float
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    prefill_tokens_sq: int
    decode_kv_tokens: int
    compute_s: float
    memory_s: float
    kv_usage: float
    num_running_left: float
    num_running_right: float
    num_preempted: int
    num_finished: int

    @property
    def measured_density(self) -> float | None:
        """`compute_s / memory_s`, None where no KV was read."""
        return self.compute_s / self.memory_s if self.memory_s > 0 else None


EngineEvent = RequestsAdmitted | RequestsReleased | RequestFinished | RequestFailed | StepWindow


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is after `open`.

    Attributes:
        engine: name of the engine.
        model: the spec of the loaded weights.
        device: the profile that windows are reckoned with.
        limits: what the policy must respect.
        details: facts to record with the run (versions, dtype, threads, executor), by name.
    """

    engine: str
    model: ModelSpec
    device: DeviceProfile
    limits: EngineLimits
    details: dict[str, str]


class RequestSource(Protocol):
    """Where an engine gets its work from. Called from the engine's side; may block briefly on storage."""

    def plan(self) -> Plan:
        """The plan to start with."""

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        """The named requests, in the order asked for. Raises `StorageError` when they cannot be read."""

    def revision(self) -> Plan | None:
        """A later plan than the last one handed out, or the same revision with more requests; None without.

        Cheap: asked between steps.
        """

    def withdrawn(self) -> Sequence[int]:
        """Seqs cancelled or expired since the last call; the engine drops them without an event."""


class RecallingSource(RequestSource, Protocol):
    """A source beside others: requests that its engine has not started may be given to another engine.

    Its engine runs in a process of its own (`EngineProcess`), which keeps account of what has started there:
    a view from outside is always a moment behind.
    """

    def recalled(self) -> Sequence[int]:
        """Seqs asked back since the last call; answered by a `RequestsReleased` event.

        A revision that is handed out after this names none of them.
        """


class Engine(Protocol):
    """Executes one rank's share of a job."""

    def open(self) -> EngineInfo:
        """Loads the model once. Raises `EngineStartError` with what to do."""

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        """Runs everything in the source and yields events as they happen, one ending event per request.

        A request is told as admitted before anything comes of it; one that cannot run at all fails without.

        Raises `EngineDiedError` when the engine's process ends early, its memory does not suffice, or it
        fails in a way that it did not foresee. It must be opened anew then; requests without an ending event
        run again.
        """

    def close(self) -> None:
        """Frees the device. Idempotent; ends the engine's process and all its children."""
