"""vLLM's scheduler with our queue: the class that is named to vLLM as `scheduler_cls`.

Nothing of vLLM's scheduling is changed but the order of waiting requests, when one may start, and how many
prompt tokens a step computes; steps are measured from inside. `test_vllm_contract.py` names what it rests on.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from blend_core.engines.vllm.admission_log import AdmissionLog
from blend_core.engines.vllm.admission_queue import AdmissionQueue
from blend_core.engines.vllm.control import LocalControl
from blend_core.engines.vllm.remote_control import ADDRESS_KEY, StepSender, admission_file, serve_calls
from blend_core.engines.vllm.reports import Admitted, CountedStep, Report, Stepped, StepReports
from blend_core.engines.vllm.scheduler_view import Readiness
from blend_core.policies.base import EngineLimits

ANSWERED: Final = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
)
"""How a request ends that has an answer; any other was refused or failed. One that ends with a stop string is
aborted: the process that reads texts finds that."""

_WAITING: Final = RequestStatus.WAITING
_COMPILING: Final = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
_RUNNING: Final = RequestStatus.RUNNING


class _Scheduled(NamedTuple):
    """A step that vLLM has scheduled, and what would be another a moment later.

    Attributes:
        output: vLLM's.
        started_at: seconds since the epoch.
        begin_s: the same on the clock of durations.
        run: number of the run.
        revision: plan revision in force.
        num_cached_tokens: of the prompts that it is the first to compute.
    """

    output: Any
    started_at: float
    begin_s: float
    run: int
    revision: int
    num_cached_tokens: int


class PolicyScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Admits as the policy says. It is the queue's `SchedulerView`.

    For configurations without async scheduling: with it a request is scheduled on before its last token is
    known, which vLLM's workers cannot compute here.

    Attributes:
        admission: the queue, in place of vLLM's own.
        control: what a run asks of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        self._pool = self.kv_cache_manager.block_pool
        self._most_tokens = int(self.scheduler_config.max_num_batched_tokens)
        self._is_on_cpu = self.vllm_config.device_config.device_type == "cpu"
        self._steps_overlap = self.vllm_config.max_concurrent_batches > 1
        self._is_pipeline = self.parallel_config.pipeline_parallel_size > 1
        limits = EngineLimits(
            block_size=self.block_size,
            # vLLM keeps one block as padding.
            num_blocks=(self._pool.num_gpu_blocks - 1) // self._num_groups,
            max_num_seqs=self.max_num_active_reqs,
            max_num_batched_tokens=self._most_tokens,
        )
        num_stages = int(self.parallel_config.pipeline_parallel_size)
        self.admission = AdmissionQueue(self, limits, time.perf_counter, num_stages)
        self.waiting = self.admission
        self._scheduled: _Scheduled | None = None
        # Steps that are counted and not through, and when each began.
        self._open_steps: deque[tuple[CountedStep, float]] = deque()
        self._last_end_s = self._added_s = self._beside_s = 0.0
        self._prepared: tuple[Any, float] | None = None
        self._told: list[Report] = []
        address = (self.vllm_config.additional_config or {}).get(ADDRESS_KEY)
        self._tell_admitted: Callable[[Admitted], None] = self._told.append
        tell_steps: Callable[[list[Stepped]], None] = self._told.extend
        if address is not None:
            self._tell_admitted = AdmissionLog(admission_file(address)).write
            tell_steps = StepSender(address)
        self._steps = StepReports(tell_steps)
        self.control = LocalControl(self.admission, self._steps, limits)
        if address is not None:
            serve_calls(address, self.control)

    # What vLLM's core asks.

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Decides the next step: the one that `prepare` decided, if it did."""
        if self._prepared is None:
            return self._schedule(throttle_prefills)
        (output, prepared_s), self._prepared = self._prepared, None
        assert self._scheduled is not None, "what is prepared is not counted"
        # Telling admissions is no part of the step.
        told_s = time.perf_counter() - prepared_s
        self._scheduled = self._scheduled._replace(begin_s=self._scheduled.begin_s + told_s)
        return output

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """Asked when a step is on its way to be computed: what can be done meanwhile is done here."""
        begin_s = time.perf_counter()
        self._count()
        # Not under the lock: where steps are read slowly, calls are answered all the same.
        self._steps.tell_due()
        self._beside_s += time.perf_counter() - begin_s
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Takes a step's tokens; reports the step."""
        if self._scheduled is not None:
            # Its bitmask needs the tokens of the step that is through, so that vLLM asks for it afterwards.
            begin_s = time.perf_counter()
            self._count()
            self._added_s += time.perf_counter() - begin_s
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        end_s = time.perf_counter()
        with self.admission.lock:
            ended = self.admission.reconcile(self.finished_req_ids)
            stepped = None
            if scheduler_output.total_num_scheduled_tokens:
                stepped = self._through(*self._open_steps.popleft(), end_s)
        if stepped is not None:
            self._steps.add(stepped)
        self._added_s += time.perf_counter() - end_s
        # Letting go of requests takes a while, which vLLM would take were they not known here.
        ended.clear()
        return outputs

    # What a run in the same process asks beside `control`.

    def prepare(self) -> None:
        """Decides the next step ahead, so that its admissions can be told before it computes anything."""
        if self._prepared is None and self.has_requests():
            self._prepared = self._schedule(False), time.perf_counter()

    def has_work(self) -> bool:
        """Whether there is a step to compute."""
        return self._prepared is not None or bool(self.has_requests())

    def take_reports(self) -> list[Report]:
        """What was told since the last call, where it is not sent to another process."""
        taken = self._told.copy()
        self._told.clear()
        return taken

    # What the queue asks.

    def num_free_blocks(self) -> int:
        """See `SchedulerView`."""
        return int(self._pool.get_num_free_blocks()) // self._num_groups

    def num_held_blocks(self, request: Any) -> int:
        """See `SchedulerView`."""
        blocks = self.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
        # References to the block that stands for none are not counted by vLLM.
        return sum(block.ref_cnt > 0 and not block.is_null for block in blocks)

    def readiness(self, request: Any) -> Readiness:
        """See `SchedulerView`."""
        status = request.status
        if status is _WAITING and self.lora_config is None:
            # As nearly all do; only after a preemption are there tokens on their way.
            return Readiness.READY
        if status is _COMPILING:
            grammar = request.structured_output_request.grammar
            if grammar is None:
                return Readiness.BLOCKED
            return Readiness.REFUSED if isinstance(grammar, Exception) else Readiness.READY
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return Readiness.BLOCKED
        if self.lora_config is not None and not self._has_place_for(_adapter_of(request)):
            return Readiness.BLOCKED
        return Readiness.READY

    def is_running(self, request: Any) -> bool:
        """See `SchedulerView`."""
        return request.status is _RUNNING

    def num_answer_tokens(self, request: Any) -> int:
        """See `SchedulerView`."""
        return int(request.num_output_tokens) if request.status in ANSWERED else 0

    def _has_place_for(self, adapter: int) -> bool:
        """Whether a request of the adapter, 0 for none, may run beside those that run."""
        adapters = {_adapter_of(running) for running in self.running} | {adapter}
        if self._is_on_cpu and len(adapters) > 1 and 0 in adapters:
            # vLLM's kernels for CPUs would give the requests without an adapter the one in the last place.
            return False
        return bool(len(adapters - {0}) <= self.lora_config.max_loras)

    def _schedule(self, throttle_prefills: bool) -> Any:
        admission = self.admission
        started_at, begin_s = time.time(), time.perf_counter()
        # Where the step before had nothing to compute, vLLM may not have asked for its bitmask.
        self._count()
        with admission.lock:
            # What ended since, an abort included: vLLM keeps the ids until it has scheduled a step.
            admission.reconcile(self.finished_req_ids)
            budget = admission.begin_step()
            num_decoding = admission.flight.num_decoding
            if self._steps_overlap:
                num_decoding -= self._num_pending()
            self.max_num_scheduled_tokens = min(self._most_tokens, num_decoding + budget)
            begun_s = time.perf_counter()
            output = super().schedule(throttle_prefills)
            scheduled_s = time.perf_counter()
            seqs, num_cached_tokens = admission.take_admitted(output.num_scheduled_tokens)
            run, revision = admission.num_runs, admission.revision
            self._scheduled = _Scheduled(output, started_at, begin_s, run, revision, num_cached_tokens)
            if seqs:
                self._tell_admitted(Admitted(seqs, revision))
        self._added_s += begun_s - begin_s + time.perf_counter() - scheduled_s
        return output

    def _count(self) -> None:
        """Counts the step that was scheduled last, if it was not counted yet."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        output, admission = scheduled.output, self.admission
        with admission.lock:
            counts = admission.end_step(output.num_scheduled_tokens, output.total_num_scheduled_tokens)
            if counts is None:
                return
            flight = admission.flight
            step = CountedStep(
                run=scheduled.run,
                revision=scheduled.revision,
                started_at=scheduled.started_at,
                counts=counts,
                num_cached_tokens=scheduled.num_cached_tokens,
                kv_usage=self.kv_cache_manager.usage,
                num_running_left=flight.num_left,
                num_running_right=len(flight.by_seq) - flight.num_left,
                num_preempted=admission.take_num_preempted(),
            )
            self._open_steps.append((step, scheduled.begin_s))

    def _num_pending(self) -> int:
        """Decoding requests that the next of overlapping steps leaves out: they have a token on its way."""
        if not self._is_pipeline:
            # Only the latest step is on its way.
            return self.admission.flight.num_through
        return sum(map(self._is_pending, self.running))

    def _is_pending(self, request: Any) -> bool:
        # In the words of vLLM's `schedule`, which has one more step counted when it asks.
        num_computed_tokens, num_placeholders = request.num_computed_tokens, request.num_output_placeholders
        return bool(
            num_computed_tokens == request.num_tokens + num_placeholders
            or num_computed_tokens + 1 >= self.max_model_len
            or self.current_step + 1 < request.next_decode_eligible_step
            or (
                num_placeholders > 0
                and num_computed_tokens + 2 - num_placeholders
                >= request.num_prompt_tokens + request.max_tokens
            )
        )

    def _through(self, step: CountedStep, begin_s: float, end_s: float) -> Stepped:
        # Steps may overlap: each begins where the one before ended.
        duration_s = end_s - max(begin_s, self._last_end_s)
        self._last_end_s = end_s
        asking_s, num_finished, asked_in_vain = self.admission.take_counts()
        added_s, self._added_s = self._added_s + asking_s, 0.0
        beside_s, self._beside_s = self._beside_s, 0.0
        return Stepped(step, max(0.0, duration_s), num_finished, added_s, beside_s, asked_in_vain)


class AsyncPolicyScheduler(PolicyScheduler, AsyncScheduler):  # type: ignore[misc]  # as above
    """The same for async scheduling: steps are scheduled before the tokens of those before them are known."""


def scheduler_class(*, is_async: bool) -> str:
    """The class that is named to vLLM: it takes any for both, and goes wrong later with the other one."""
    return f"{__name__}.{(AsyncPolicyScheduler if is_async else PolicyScheduler).__name__}"


def _adapter_of(request: Any) -> int:
    """vLLM's number of a request's LoRA adapter, 0 where it has none."""
    return 0 if request.lora_request is None else int(request.lora_request.lora_int_id)
