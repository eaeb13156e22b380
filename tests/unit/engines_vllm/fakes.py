"""As much of vLLM's scheduler as its queue meets: requests, a pool of blocks, and a step.

The step goes about it as vLLM 0.32 does (`Scheduler.schedule`); that it does is what the contract suite looks
after.
"""

from types import SimpleNamespace

from blend_core.engines.vllm.admission_queue import AdmissionQueue
from blend_core.engines.vllm.control import LocalControl
from blend_core.engines.vllm.reports import StepReports
from blend_core.engines.vllm.scheduler_view import RUN_ARGUMENT, SEQ_ARGUMENT, Readiness
from blend_core.policies.base import EngineLimits

BLOCK_SIZE = 4


class FakeRequest:
    def __init__(self, seq, prompt, num_output_tokens, run=1):
        self.request_id = f"{seq}-x"
        self.sampling_params = SimpleNamespace(extra_args={SEQ_ARGUMENT: seq, RUN_ARGUMENT: run})
        self.prompt = tuple(prompt)
        self.output = 0
        self.longest = num_output_tokens
        self.num_computed_tokens = 0
        self.status = "waiting"
        self.readiness = Readiness.READY
        self.blocks = 0

    @property
    def num_prompt_tokens(self):
        return len(self.prompt)

    @property
    def max_tokens(self):
        return self.longest

    @property
    def num_output_tokens(self):
        return self.output

    @property
    def num_tokens(self):
        return len(self.prompt) + self.output


class FakeScheduler:
    """Runs requests without prefix sharing; it is the queue's `SchedulerView`."""

    def __init__(self, *, num_blocks=20, max_num_seqs=8, max_num_batched_tokens=32, skips=()):
        self.limits = EngineLimits(BLOCK_SIZE, num_blocks, max_num_seqs, max_num_batched_tokens)
        self.free = num_blocks
        self.running = []
        self.requests = {}
        self.skips = set(skips)
        self.finished_ids = set()
        self.budgets = []
        self.prefilled = []
        self.admitted = ()
        self.queue = AdmissionQueue(self, self.limits, lambda: 0.0)
        self.told = []
        self.reports = StepReports(self.told.append)
        self.control = LocalControl(self.queue, self.reports, self.limits)

    def num_free_blocks(self):
        return self.free

    def num_held_blocks(self, request):
        return 0

    def readiness(self, request):
        return request.readiness

    def is_running(self, request):
        return request.status == "running"

    def num_answer_tokens(self, request):
        return request.output

    def add(self, request):
        self.requests[request.request_id] = request
        self.queue.add_request(request)
        return request

    def step(self):
        """One step; returns seqs that ran in it."""
        queue = self.queue
        queue.reconcile(self.finished_ids)
        budget = queue.begin_step()
        self.budgets.append(budget)
        left = min(self.limits.max_num_batched_tokens, budget + queue.num_decoding)
        scheduled, preempted = {}, False
        for request in list(self.running):
            if request not in self.running or left == 0:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, left)
            while not self._allocate(request, num_new):
                victim = self.running.pop()
                preempted = True
                self._free(victim)
                victim.status, victim.num_computed_tokens = "preempted", 0
                scheduled.pop(victim.request_id, None)
                queue.prepend_request(victim)
                if victim is request:
                    break
            if request.status == "running":
                scheduled[request.request_id] = num_new
                left -= num_new
        skipped = []
        while not preempted and left > 0 and queue:
            request = queue.peek_request()
            assert request is queue.peek_request()
            if request.readiness is not Readiness.READY or request.request_id in self.skips:
                skipped.append(queue.pop_request())
                continue
            num_new = min(request.num_tokens, left)
            if not self._allocate(request, num_new):
                break
            assert queue.pop_request() is request
            self.running.append(request)
            request.status = "running"
            scheduled[request.request_id] = num_new
            left -= num_new
        if skipped:
            queue.prepend_requests(skipped)
        self.prefilled.append(
            sum(
                num
                for one, num in scheduled.items()
                if self.requests[one].num_computed_tokens == 0 or num > 1
            )
        )
        for request_id, num_new in scheduled.items():
            self.requests[request_id].num_computed_tokens += num_new
        self.finished_ids = set()
        self.admitted += queue.take_admitted(scheduled)[0]
        counts = queue.end_step(scheduled, sum(scheduled.values()))
        self._sample(scheduled)
        queue.reconcile(self.finished_ids)
        queue.flight.check_integrity()
        return [int(one.split("-")[0]) for one in scheduled], counts

    def abort(self, request):
        """Ends a request from outside, waiting or running."""
        self._finish(request, "aborted")

    def _sample(self, scheduled):
        for request_id in scheduled:
            request = self.requests[request_id]
            if request.num_computed_tokens == request.num_tokens:
                request.output += 1
                if request.output >= request.longest:
                    self._finish(request)

    def _finish(self, request, status="finished"):
        if request in self.running:
            self.running.remove(request)
            self._free(request)
            self.finished_ids.add(request.request_id)
        else:
            self.queue.remove_requests([request])
        request.status = status
        del self.requests[request.request_id]

    def _allocate(self, request, num_new):
        needed = -(-(request.num_computed_tokens + num_new) // BLOCK_SIZE) - request.blocks
        if needed > self.free:
            return False
        self.free -= needed
        request.blocks += needed
        return True

    def _free(self, request):
        self.free += request.blocks
        request.blocks = 0
