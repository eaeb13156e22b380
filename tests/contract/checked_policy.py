"""A policy that passes every call on and checks what `AdmissionPolicy` promises while it does."""

from blend_core.policies.base import AdmissionPolicy


class CheckedPolicy(AdmissionPolicy):
    """Wraps a policy. Fails in the middle of a run, at the call that breaks the contract.

    Attributes:
        admissions: seqs in order of admission, a preempted one again each time.
        sides: side of each seq's first admission.
        num_preempted: preemptions.
    """

    name = "checked"

    def __init__(self, inner, plan, limits, may_change_sides=()):
        self._inner = inner
        self._limits = limits
        self._may_change_sides = set(may_change_sides)
        self._waiting = set(plan.seq.tolist())
        self._preempted = {}
        self._prefilling = {}
        self._decoding = {}
        self._ended = set()
        self.admissions = []
        self.sides = {}
        self.num_preempted = 0

    @property
    def num_waiting(self):
        assert self._inner.num_waiting == len(self._waiting) + len(self._preempted)
        return self._inner.num_waiting

    @property
    def in_flight(self):
        return {**self._prefilling, **self._decoding}

    def upcoming(self, num_requests):
        seqs = list(self._inner.upcoming(num_requests))
        assert seqs == list(self._inner.upcoming(num_requests))
        assert len(seqs) == len(set(seqs)) <= num_requests
        assert len(seqs) == min(num_requests, self.num_waiting)
        assert all(seq in self._waiting or seq in self._preempted for seq in seqs)
        return seqs

    def begin_step(self, view):
        self._check_view(view)
        budget = self._inner.begin_step(view)
        assert 0 <= budget <= max(0, self._limits.max_num_batched_tokens - view.num_decoding)
        assert budget > 0 or view.num_decoding > 0, "a step would do nothing"
        return budget

    def next_request(self, view):
        self._check_view(view)
        admission = self._inner.next_request(view)
        assert admission == self._inner.next_request(view), "asked again, another answer"
        heads = self.upcoming(2)
        if admission is None:
            assert view.num_running or not any(map(view.is_ready, heads)), "the gate hangs"
            assert self._inner.quiet_steps(view) >= 1
            return None
        assert view.is_ready(admission.seq)
        assert admission.seq in heads, "asked for a request that was not upcoming"
        if admission.seq not in self._preempted:
            assert admission.seq in self._waiting
            passed_over = [seq for seq, side in self._preempted.items() if side is admission.side]
            assert set(passed_over) <= self._may_change_sides, "a preempted request was passed over"
        return admission

    def quiet_steps(self, view):
        return self._inner.quiet_steps(view)

    def admitted(self, seq, side, num_cached_tokens):
        assert seq not in self.in_flight
        assert seq not in self._ended
        assert num_cached_tokens % self._limits.block_size == 0
        self._waiting.discard(seq)
        self._preempted.pop(seq, None)
        self._prefilling[seq] = side
        self.admissions.append(seq)
        self.sides.setdefault(seq, side)
        self._inner.admitted(seq, side, num_cached_tokens)

    def decoding(self, seq):
        self._decoding[seq] = self._prefilling.pop(seq)
        self._inner.decoding(seq)

    def advanced(self, num_steps):
        assert num_steps >= 1
        self._inner.advanced(num_steps)

    def prepare(self):
        self._inner.prepare()
        self._check_ledger()

    def finished(self, seq, num_output_tokens):
        if seq in self._ended:
            # Withdrawn when it had ended already: that changes nothing.
            before = self._inner.num_waiting
            self._inner.finished(seq, num_output_tokens)
            assert self._inner.num_waiting == before
            return
        self._ended.add(seq)
        self._waiting.discard(seq)
        for phase in (self._preempted, self._prefilling, self._decoding):
            phase.pop(seq, None)
        self._inner.finished(seq, num_output_tokens)
        self._check_ledger()

    def preempted(self, seq):
        side = self.in_flight[seq]
        self._prefilling.pop(seq, None)
        self._decoding.pop(seq, None)
        self._preempted[seq] = side
        self.num_preempted += 1
        self._inner.preempted(seq)
        self._check_ledger()

    def revise(self, plan):
        before = self._inner.num_waiting
        self._inner.revise(plan)
        assert self._inner.num_waiting == before, "a revision lost or made requests"
        self._check_ledger()

    def _check_view(self, view):
        assert view.num_running == len(self.in_flight)
        assert view.num_decoding == len(self._decoding)
        assert 0 <= view.num_free_blocks <= self._limits.num_blocks
        assert view.num_running <= self._limits.max_num_seqs

    def _check_ledger(self):
        self._inner._ledger.check_integrity()
