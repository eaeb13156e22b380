"""One run on an opened vLLM: requests from a source in a bounded window, events as they happen."""

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from blend_core.engines.base import (
    EngineEvent,
    EngineInfo,
    RequestFailed,
    RequestFinished,
    RequestsAdmitted,
    RequestSource,
    StepWindow,
)
from blend_core.engines.vllm.core import Core
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.engines.vllm.reports import Admitted, Stepped
from blend_core.engines.vllm.request_window import RequestWindow
from blend_core.engines.vllm.requests import (
    RequestRules,
    lora_requests,
    refusal,
    vllm_prompt,
    vllm_sampling,
)
from blend_core.engines.windows import WindowAccumulator
from blend_core.errors import EngineDiedError, EngineError, RequestErrorCode
from blend_core.request import Request

_FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class OpenedVllm:
    """What a run needs of an opened engine.

    Attributes:
        info: as given to the engine's user.
        core: the loaded model with its scheduler.
        options: what it was opened with.
        max_model_len: longest prompt plus answer.
    """

    info: EngineInfo
    core: Core
    options: VllmEngineOptions
    max_model_len: int


class Run:
    """Works through a source. vLLM holds a bounded window of it, from both ends of the plan.

    Attributes:
        added_s: what steps waited for our part of the scheduler, over all of them.
        beside_s: what it took beside that, while steps were computed.
        num_steps: steps that are through.
    """

    def __init__(
        self,
        opened: OpenedVllm,
        source: RequestSource,
        now: Callable[[], float],
        elapsed: Callable[[], float],
    ) -> None:
        """Takes the source's plan and gives it to the scheduler."""
        plan = source.plan()
        info = opened.info
        self._core = opened.core
        self._source = source
        self._now = now
        self._elapsed = elapsed
        self._timeout_s = opened.options.request_timeout_s
        self._rules = RequestRules(
            vocab_size=info.model.vocab_size,
            max_model_len=opened.max_model_len,
            kv_capacity_tokens=info.limits.num_blocks * info.limits.block_size,
            lora_adapters=opened.options.lora_adapters,
        )
        self._adapters = lora_requests(opened.options.lora_adapters)
        self._revision = self._window_revision = plan.revision
        self._windows = WindowAccumulator(info.model, info.device, plan.revision, overlap=False)
        self._open = dict.fromkeys(plan.seq.tolist())
        self._ever_named = set(self._open)
        self._window = RequestWindow(opened.core.control, opened.core.abort, info.limits.max_num_seqs)
        # In the order of admission, which is the order in which they run out.
        self._deadlines: dict[int, float] = {}
        self.added_s = self.beside_s = 0.0
        self.num_steps = 0
        self._number = opened.core.start(opened.options.policy, plan)

    def events(self) -> Generator[EngineEvent]:
        """Runs until no request is left.

        Raises:
            EngineError: requests wait, and the policy names none of them.
            EngineDiedError: vLLM's core is gone; what it had told by then has come before.
        """
        is_dead = False
        try:
            yield from self._events()
        except EngineDiedError as error:
            is_dead = True
            for item in self._core.last_words():
                yield from self._hear(item)
            raise self._core.why(error) from error
        finally:
            if self._window and not is_dead:
                # It is given up.
                with suppress(EngineDiedError):
                    self._drop(list(self._window))

    def _events(self) -> Iterator[EngineEvent]:
        while True:
            self._drop_withdrawn()
            self._take_revision()
            yield from self._feed()
            if not self._open:
                break
            if not self._window:
                raise EngineError(
                    f"The policy names none of {len(self._open)} waiting requests although nothing runs; "
                    "choose another policy and report this."
                )
            yield from self._step()
            yield from self._end_overdue()
        for report in self._core.last_reports():
            yield from self._hear(report)
        window = self._windows.flush()
        if window is not None:
            yield window

    def _drop_withdrawn(self) -> None:
        withdrawn = self._source.withdrawn()
        if withdrawn:
            self._drop([seq for seq in withdrawn if seq in self._open])

    def _drop(self, seqs: list[int]) -> None:
        """Ends requests, in flight, queued or not even fetched."""
        queued = [seq for seq in seqs if seq in self._window]
        self._core.control.withdraw(seqs, queued)
        self._core.abort([str(seq) for seq in queued])
        for seq in seqs:
            self._forget(seq)

    def _forget(self, seq: int) -> None:
        self._open.pop(seq, None)
        self._window.forget(seq)
        self._deadlines.pop(seq, None)

    def _take_revision(self) -> None:
        plan = self._source.revision()
        if plan is not None:
            self._core.control.revise(plan)
            self._revision = plan.revision
            self._window.look_again()
            # A rank may have taken requests over from another; what ended here may still be named, too.
            new = [seq for seq in plan.seq.tolist() if seq not in self._ever_named]
            self._ever_named.update(new)
            self._open.update(dict.fromkeys(new))

    def _feed(self) -> Iterator[EngineEvent]:
        """Queues the requests that are due soon; those that cannot run at all fail here."""
        for missing in self._window.missing(len(self._open)):
            if not self._open.keys() >= set(missing):
                raise EngineError(
                    "The policy names requests that have ended; choose another policy and report this."
                )
            requests = self._source.fetch(missing)
            if [request.seq for request in requests] != missing:
                raise EngineError(
                    "The source did not return the requests that were asked for; run the job again."
                )
            for request in requests:
                yield from self._queue(request)

    def _queue(self, request: Request) -> Iterator[EngineEvent]:
        problem = self._rules.problem(request)
        if problem is None:
            try:
                self._core.add(
                    str(request.seq),
                    vllm_prompt(request),
                    vllm_sampling(request, self._number, self._rules.max_model_len),
                    self._adapters.get(request.lora_adapter or ""),
                )
            except EngineDiedError:
                raise
            except Exception as error:  # whatever vLLM raises on a request is that request's fault alone
                problem = refusal(error)
                self._core.abort([str(request.seq)])
        if problem is None:
            self._window.queued[request.seq] = request
        else:
            yield self._failed(request.seq, *problem)

    def _step(self) -> Iterator[EngineEvent]:
        self._window.step()
        for item in self._core.step():
            yield from self._hear(item)

    def _hear(self, item: Any) -> Iterator[EngineEvent]:
        """Takes a `Report`, or one of vLLM's outputs."""
        if isinstance(item, Admitted):
            yield from self._admit(item)
        elif isinstance(item, Stepped):
            yield from self._count(item)
        elif item.finished:
            yield from self._end(int(item.request_id), item)

    def _admit(self, report: Admitted) -> Iterator[EngineEvent]:
        # One that was withdrawn a moment ago may have started all the same.
        known = self._window.start(report.seqs, self._now(), report.revision)
        if self._timeout_s is not None:
            deadline_s = self._elapsed() + self._timeout_s
            self._deadlines.update(dict.fromkeys(known, deadline_s))
        if known:
            yield RequestsAdmitted(known)

    def _count(self, report: Stepped) -> Iterator[EngineEvent]:
        if report.asked_in_vain:
            # Of whichever run: to look once too often does no harm.
            self._window.look_again()
        if report.step.run != self._number:
            # The last steps of one that was given up.
            return
        self.added_s += report.added_s
        self.beside_s += report.beside_s
        self.num_steps += 1
        windows: list[StepWindow | None] = []
        if report.step.revision > self._window_revision:
            # Steps that were scheduled before the revision have come before.
            self._window_revision = report.step.revision
            windows.append(self._windows.revise(report.step.revision))
        windows.append(self._windows.add(report.record()))
        yield from (window for window in windows if window is not None)

    def _end(self, seq: int, output: Any) -> Iterator[EngineEvent]:
        if seq not in self._open:
            return
        request, started_at, revision = self._window.started.get(seq) or (
            self._window.queued[seq],
            self._now(),
            self._revision,
        )
        answer = output.outputs[0]
        if answer.finish_reason not in _FINISH_REASONS:
            yield self._ended_badly(request, str(answer.finish_reason))
            return
        self._forget(seq)
        yield RequestFinished(
            seq=seq,
            revision=revision,
            output_text=answer.text,
            output_token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens or 0,
            started_at=started_at,
            finished_at=self._now(),
        )

    def _ended_badly(self, request: Request, reason: str) -> RequestFailed:
        if request.sampling.json_schema is not None:
            code = RequestErrorCode.INVALID_SCHEMA
            message = "vLLM cannot generate by the request's JSON schema; simplify it."
        else:
            code, message = RequestErrorCode.ENGINE_FAILED, f"vLLM ended the request with {reason!r}."
        # The scheduler may not know of it: vLLM's core could not even queue it.
        return self._failed(request.seq, code, message)

    def _end_overdue(self) -> Iterator[EngineEvent]:
        """Ends requests that have been in the engine for too long, preempted ones that wait included."""
        now_s = self._elapsed()
        for seq, deadline_s in list(self._deadlines.items()):
            if deadline_s > now_s:
                break
            self._drop([seq])
            yield self._failure(
                seq,
                RequestErrorCode.TIMED_OUT,
                f"The request took longer than {self._timeout_s:g} s (request_timeout_s); its answer so far "
                "is thrown away.",
            )

    def _failed(self, seq: int, code: RequestErrorCode, message: str) -> RequestFailed:
        self._core.control.withdraw([seq], [])
        self._forget(seq)
        return self._failure(seq, code, message)

    def _failure(self, seq: int, code: RequestErrorCode, message: str) -> RequestFailed:
        return RequestFailed(seq, self._revision, code, message, self._now())
