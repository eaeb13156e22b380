"""One run: requests from a source, step by step, events as they happen."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from blend_core.engines.base import (
    EngineEvent,
    EngineInfo,
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    RequestSource,
)
from blend_core.engines.torch.accounting import StepMeter
from blend_core.engines.torch.batch import ScheduledRows, build_batch
from blend_core.engines.torch.device_memory import out_of_memory_is_death
from blend_core.engines.torch.executor import Executor
from blend_core.engines.torch.sampler import sample
from blend_core.engines.torch.scheduler import ScheduledStep, Scheduler
from blend_core.engines.torch.sequence import AnswerRules, Sequence
from blend_core.engines.windows import WindowAccumulator
from blend_core.errors import EngineError, RequestErrorCode
from blend_core.policies.factory import make_policy
from blend_core.request import Request, longest_kv_tokens
from blend_core.wording import count_text


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where times come from.

    Attributes:
        now: seconds since the epoch.
        elapsed: seconds of a clock that never jumps, for durations.
    """

    now: Callable[[], float]
    elapsed: Callable[[], float]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a run needs of an opened engine.

    Attributes:
        info: as given to the engine's user.
        rules: of every answer.
        executor: runs the steps.
        device: of the tensors.
        dtype: of the tensors.
        policy: name of the admission policy.
        request_timeout_s: seconds from a request's first admission in which it must end; None without end.
    """

    info: EngineInfo
    rules: AnswerRules
    executor: Executor
    device: torch.device
    dtype: torch.dtype
    policy: str
    request_timeout_s: float | None


class Run:
    """Works through a source. The KV cache's blocks all belong to it while it lasts."""

    def __init__(self, model: LoadedModel, source: RequestSource, clocks: Clocks) -> None:
        """Takes the source's plan and makes the policy over it."""
        plan = source.plan()
        limits = model.info.limits
        self._model = model
        self._source = source
        self._clocks = clocks
        self._limits = limits
        self._policy = make_policy(model.policy, plan, limits)
        self._scheduler = Scheduler(self._policy, limits, clocks.now)
        self._scheduler.set_revision(plan.revision)
        self._revision = plan.revision
        self._windows = WindowAccumulator(
            model.info.model, model.info.device, plan.revision, overlap=model.executor.overlap
        )
        # In the order of admission, which is the order in which they run out.
        self._deadlines: dict[int, float] = {}
        # Fetched in bulk when a look-ahead of one full batch is no longer at hand.
        self._look_ahead = limits.max_num_seqs
        self._fetch_size = 4 * limits.max_num_seqs

    @property
    def scheduler(self) -> Scheduler:
        """For checks of its integrity."""
        return self._scheduler

    def events(self) -> Iterator[EngineEvent]:
        """Runs until no request is left.

        Raises:
            EngineError: the policy admits nothing although requests wait and none is in flight.
            EngineDiedError: a step needs more memory than the device has.
        """
        while True:
            self._drop_withdrawn()
            yield from self._take_revision()
            yield from self._fetch()
            if not self._policy.num_waiting and not self._scheduler.num_running:
                break
            yield from self._step()
        window = self._windows.flush()
        if window is not None:
            yield window

    def _drop_withdrawn(self) -> None:
        for seq in self._source.withdrawn():
            self._drop(seq)

    def _take_revision(self) -> Iterator[EngineEvent]:
        plan = self._source.revision()
        if plan is None:
            return
        window = self._windows.revise(plan.revision)
        if window is not None:
            yield window
        self._policy.revise(plan)
        self._revision = plan.revision
        self._scheduler.set_revision(plan.revision)
        self._scheduler.keep_only(set(self._policy.upcoming(self._fetch_size)))

    def _fetch(self) -> Iterator[EngineEvent]:
        """Brings the requests that are due soon within reach; those that cannot run at all fail here."""
        # Again and again, as all that were fetched may fail and the next ones be unknown yet.
        while not all(self._scheduler.knows(seq) for seq in self._policy.upcoming(self._look_ahead)):
            upcoming = self._policy.upcoming(self._fetch_size)
            missing = [seq for seq in upcoming if not self._scheduler.knows(seq)]
            requests = self._source.fetch(missing)
            if [request.seq for request in requests] != missing:
                raise EngineError(
                    "The source did not return the requests that were asked for; run the job again."
                )
            for request in requests:
                problem = self._problem(request)
                if problem is None:
                    self._scheduler.add(Sequence(request, self._model.rules))
                else:
                    yield self._failed(request.seq, *problem)

    def _problem(self, request: Request) -> tuple[RequestErrorCode, str] | None:
        """Why a request can never run."""
        token_ids, max_model_len = request.prompt_token_ids, self._model.rules.max_model_len
        vocab_size = self._model.info.model.vocab_size
        if not len(token_ids):
            return RequestErrorCode.EMPTY_PROMPT, "The prompt has no tokens."
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            return (
                RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
                f"The prompt holds a token id outside the model's vocabulary of {vocab_size}.",
            )
        if len(token_ids) >= max_model_len:
            return (
                RequestErrorCode.PROMPT_TOO_LONG,
                f"The prompt has {count_text(len(token_ids), 'token')}; "
                f"the model takes at most {max_model_len - 1:,}.",
            )
        num_tokens = int(longest_kv_tokens(len(token_ids), request.sampling.max_tokens, max_model_len))
        capacity = self._limits.num_blocks * self._limits.block_size
        if num_tokens > capacity:
            return (
                RequestErrorCode.REQUEST_TOO_LARGE,
                f"Prompt and max_tokens need {count_text(num_tokens, 'token')} of KV cache, "
                f"which holds {capacity:,}; "
                "lower max_tokens or give the engine more KV cache.",
            )
        return None

    def _step(self) -> Iterator[EngineEvent]:
        started_at, start = self._clocks.now(), self._clocks.elapsed()
        step = self._scheduler.schedule()
        if not step.decodes and not step.prefills:
            raise EngineError(
                f"Policy {self._model.policy} admits none of {self._policy.num_waiting} waiting requests "
                "although nothing runs; choose another policy and report this."
            )
        scheduled = self._clocks.elapsed()
        if step.admitted:
            self._set_deadlines(step.admitted, start)
            yield RequestsAdmitted(tuple(step.admitted))
        told_s = self._clocks.elapsed() - scheduled
        meter = StepMeter(self._scheduler, step, started_at)
        with out_of_memory_is_death(self._model.device):
            sampling, tokens = self._compute(step)
        ended = self._settle(step, sampling, tokens)
        ended += self._end_overdue()
        window = self._windows.add(meter.record(self._clocks.elapsed() - start - told_s, len(ended)))
        yield from ended
        if window is not None:
            yield window

    def _compute(self, step: ScheduledStep) -> tuple[list[Sequence], list[int | None]]:
        """One forward pass; returns the requests that got a token, and the tokens."""
        decodes = [_rows(sequence, 1) for sequence in step.decodes]
        prefills = [_rows(sequence, num_tokens) for sequence, num_tokens in step.prefills]
        model = self._model
        batch = build_batch(decodes, prefills, self._limits.block_size, model.device, model.dtype)
        logits = model.executor.execute(batch)
        sampling = step.decodes + [
            sequence for (sequence, _), rows in zip(step.prefills, prefills, strict=True) if rows.samples
        ]
        if not sampling:
            return [], []
        return sampling, sample(logits, [sequence.sampled_row() for sequence in sampling])

    def _settle(
        self, step: ScheduledStep, sampling: list[Sequence], tokens: list[int | None]
    ) -> list[EngineEvent]:
        """Takes the tokens, tells the policy, and returns the events of the requests that ended."""
        for sequence, num_tokens in [*((sequence, 1) for sequence in step.decodes), *step.prefills]:
            sequence.num_computed_tokens += num_tokens
            sequence.num_once_computed_tokens = max(
                sequence.num_once_computed_tokens, sequence.num_computed_tokens
            )
        for sequence in sampling:
            if not sequence.is_decoding:
                sequence.is_decoding = True
                self._policy.decoding(sequence.seq)
        self._policy.advanced(1)
        ended: list[EngineEvent] = []
        for sequence, token_id in zip(sampling, tokens, strict=True):
            event = self._take(sequence, token_id)
            if event is not None:
                ended.append(event)
        return ended

    def _set_deadlines(self, admitted: list[int], started_s: float) -> None:
        timeout_s = self._model.request_timeout_s
        if timeout_s is not None:
            self._deadlines.update(dict.fromkeys(admitted, started_s + timeout_s))

    def _end_overdue(self) -> list[EngineEvent]:
        """Ends requests that have been in the engine for too long, preempted ones that wait included."""
        ended: list[EngineEvent] = []
        now_s = self._clocks.elapsed()
        for seq, deadline_s in list(self._deadlines.items()):
            if deadline_s > now_s:
                break
            num_tokens = self._scheduler.num_output_tokens(seq)
            ended.append(
                self._failed(
                    seq,
                    RequestErrorCode.TIMED_OUT,
                    f"The request took longer than {self._model.request_timeout_s:g} s (request_timeout_s); "
                    f"the {num_tokens} tokens of its answer so far are thrown away.",
                )
            )
        return ended

    def _take(self, sequence: Sequence, token_id: int | None) -> EngineEvent | None:
        if token_id is None:
            self._deadlines.pop(sequence.seq, None)
            self._scheduler.discard(sequence.seq)
            return self._failure(
                sequence.seq, RequestErrorCode.ENGINE_FAILED, "The model's logits are no finite numbers."
            )
        try:
            ending = sequence.take(token_id)
        except Exception as error:  # whatever its tokenizer raises is this request's fault alone
            return self._failed(
                sequence.seq,
                RequestErrorCode.ENGINE_FAILED,
                f"The answer could not be decoded ({type(error).__name__}).",
            )
        if ending is None:
            return None
        self._drop(sequence.seq, sequence.num_output_tokens)
        now = self._clocks.now()
        return RequestFinished(
            seq=sequence.seq,
            revision=sequence.revision,
            output_text=ending.text,
            output_token_ids=tuple(sequence.output_token_ids),
            finish_reason=ending.finish_reason,
            num_prompt_tokens=sequence.request.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            started_at=now if sequence.started_at is None else sequence.started_at,
            finished_at=now,
        )

    def _failed(self, seq: int, code: RequestErrorCode, message: str) -> RequestFailed:
        self._drop(seq)
        return self._failure(seq, code, message)

    def _drop(self, seq: int, num_output_tokens: int = 0) -> None:
        self._deadlines.pop(seq, None)
        self._scheduler.drop(seq, num_output_tokens)

    def _failure(self, seq: int, code: RequestErrorCode, message: str) -> RequestFailed:
        return RequestFailed(seq, self._revision, code, message, self._clocks.now())


def _rows(sequence: Sequence, num_tokens: int) -> ScheduledRows:
    start = sequence.num_computed_tokens
    return ScheduledRows(
        token_ids=sequence.token_ids[start : start + num_tokens],
        num_computed_tokens=start,
        block_ids=sequence.block_ids,
        samples=start + num_tokens == len(sequence.token_ids),
    )
