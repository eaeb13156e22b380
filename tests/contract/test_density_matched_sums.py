"""What `density_matched` keeps up as things happen equals a recount, whatever happens."""

import pytest
from cases import ListSource, jobs, tight_limits
from checked_policy import CheckedPolicy
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.policies.factory import make_policy
from blend_core.policies.ledger import Phase


class AtOnce(list):
    """In place of what kinds have still to be told: tells it at once."""

    def append(self, tell):
        tell()


class RecountedPolicy(CheckedPolicy):
    """Recounts after each step and each event between steps; with `tells`, kinds are told before."""

    tells = False

    def advanced(self, num_steps):
        super().advanced(num_steps)
        self.recount()

    def finished(self, seq, num_output_tokens):
        super().finished(seq, num_output_tokens)
        self.recount()

    def preempted(self, seq):
        super().preempted(seq)
        self.recount()

    def revise(self, plan):
        super().revise(plan)
        self.recount()

    def begin_step(self, view):
        budget = super().begin_step(view)
        self.recount()
        return budget

    def recount(self):
        policy = self._inner
        if self.tells:
            policy._tell_kinds()
        ledger = policy._ledger
        decoding = [slot for slot, phase in enumerate(ledger.phase) if phase is Phase.DECODING]
        assert policy._num_decoding == len(decoding)
        held = sum(ledger.num_prompt_tokens[slot] + ledger.num_output_tokens(slot) for slot in decoding)
        assert policy._decode_kv_tokens == held
        candidate = policy._look_ahead.candidate
        assert candidate is None or ledger.is_waiting(candidate)
        assert (policy._look_ahead.projection.mean >= 0).all()
        assert (policy._look_ahead.projection.variance >= 0).all()
        if policy._untold:
            return
        in_flight = {
            slot for slot, phase in enumerate(ledger.phase) if phase in (Phase.PREFILLING, Phase.DECODING)
        }
        counted = [
            (slot, side)
            for kind in policy._sides.kinds()
            for side, slots in kind.in_flight.items()
            for slot in slots
        ]
        assert sorted(counted) == sorted((slot, ledger.side[slot]) for slot in in_flight)
        for kind in policy._sides.kinds():
            waiting = [
                slot
                for slot, phase in enumerate(ledger.phase)
                if phase is Phase.WAITING and policy._sides.kind(slot) is kind
            ]
            assert kind.num_waiting == len(waiting)
            prefill = sum(ledger.num_prompt_tokens[slot] - ledger.num_shared_tokens[slot] for slot in waiting)
            work = kind.work()
            assert work.num_prefill_tokens == pytest.approx(prefill)
            if kind.lengths is None:
                output = sum(ledger.output_tokens[slot] for slot in waiting)
                assert work.num_output_tokens == pytest.approx(output)


@given(
    data=st.data(),
    job=jobs(),
    limits=tight_limits,
    prepares=st.booleans(),
    tells=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_sums_equal_a_recount_whatever_happens(data, job, limits, prepares, tells):
    revisions, withdrawals, lead = _events(data, job)

    def make(plan, limits):
        policy = RecountedPolicy(
            make_policy("density_matched", plan, limits), plan, limits, range(len(job.prompts))
        )
        policy.tells = tells
        return policy

    source = ListSource(job, job.plan(lead=lead), revisions, withdrawals)
    list(FakeEngine(limits, prepares=prepares).run(source, make))


@given(
    data=st.data(),
    job=jobs(),
    limits=tight_limits,
    prepares=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_kinds_that_are_told_at_once_change_no_answer(data, job, limits, prepares):
    revisions, withdrawals, lead = _events(data, job)
    answers = []
    for at_once in (False, True):
        told = []

        def make(plan, limits, at_once=at_once, told=told):
            policy = make_policy("density_matched", plan, limits)
            if at_once:
                policy._untold = AtOnce()
            for name in ("begin_step", "next_request"):
                setattr(policy, name, _noting(getattr(policy, name), told))
            return policy

        source = ListSource(job, job.plan(lead=lead), revisions, withdrawals)
        list(FakeEngine(limits, prepares=prepares).run(source, make))
        answers.append(told)
    assert answers[0] == answers[1]


def _noting(call, told):
    def noted(*arguments):
        answer = call(*arguments)
        told.append(answer)
        return answer

    return noted


def _events(data, job):
    """Revisions and withdrawals by poll, and who is sampled."""
    names = list(range(len(job.prompts)))
    revisions = {}
    for revision, poll in enumerate(sorted(data.draw(st.sets(st.integers(1, 40), max_size=2))), start=1):
        order = data.draw(st.permutations(names))
        revisions[poll] = job.plan(order=order[: data.draw(st.integers(1, len(names)))], revision=revision)
    withdrawals = {
        poll: [data.draw(st.sampled_from(names))]
        for poll in data.draw(st.sets(st.integers(1, 40), max_size=3))
    }
    return revisions, withdrawals, data.draw(st.sets(st.sampled_from(names)))
