"""Whatever the job, the memory, the revisions and the withdrawals: the contract holds and nothing is lost."""

import pytest
from cases import ListSource, jobs, tight_limits
from checked_policy import CheckedPolicy
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from blend_core.policies.factory import POLICY_NAMES, make_policy


@pytest.mark.parametrize("policy_name", POLICY_NAMES)
@given(
    data=st.data(),
    job=jobs(),
    limits=tight_limits,
    prepares=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_revisions_and_withdrawals_lose_nothing(policy_name, data, job, limits, prepares):
    names = list(range(len(job.prompts)))
    lead = data.draw(st.sets(st.sampled_from(names)), label="lead")
    polls = data.draw(st.lists(st.integers(1, 40), unique=True, max_size=3), label="revisions at")
    revisions = {}
    for revision, poll in enumerate(sorted(polls), start=1):
        order = data.draw(st.permutations(names), label="order")
        kept = data.draw(st.integers(1, len(names)), label="named")
        revisions[poll] = job.plan(order=order[:kept], revision=revision)
    withdrawn = data.draw(st.sets(st.sampled_from(names)), label="withdrawn")
    withdrawals = {data.draw(st.integers(1, 40), label="withdrawn at"): sorted(withdrawn)}
    outliving = [seq for seq in names if job.output_tokens[seq] >= 2 * job.estimates[seq]]

    def make(plan, limits):
        return CheckedPolicy(make_policy(policy_name, plan, limits), plan, limits, outliving)

    source = ListSource(job, job.plan(lead=lead), revisions, withdrawals)
    ended = [event.seq for event in FakeEngine(limits, prepares=prepares).run(source, make)]
    assert len(ended) == len(set(ended))
    assert set(ended) | withdrawn == set(names)
