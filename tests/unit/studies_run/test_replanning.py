"""A run shows lengths as requests end, and only what it has shown goes into the next revision."""

from dataclasses import replace

import numpy as np

from blend_core.planner import PlanConfig, build_plan
from blend_core.simulator import simulate
from blend_core.studies.replanning import SampleReplanner
from blend_core.studies.study import BLOCK_SIZE, study_limits

CONFIG = PlanConfig("dual_scan", BLOCK_SIZE)


class Watched(SampleReplanner):
    """Notes what had ended when the revision was made."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ended_seqs = []
        self.revised = None
        self.ended_before = None

    def ended(self, seq, num_output_tokens):
        self.ended_seqs.append(seq)
        super().ended(seq, num_output_tokens)

    def revision(self):
        plan = super().revision()
        if plan is not None:
            self.revised, self.ended_before = plan, list(self.ended_seqs)
        return plan


def run(workload, model, device):
    plan = build_plan(workload.requests, model, device, CONFIG)
    watched = Watched(workload.requests, plan, model, device, CONFIG)
    result = simulate(
        workload.requests,
        workload.num_output_tokens,
        plan,
        "dual_scan",
        model,
        device,
        study_limits(model, device),
        overlap=True,
        feedback=watched,
    )
    return plan, watched, result


def test_the_rest_is_planned_anew_once_the_samples_have_ended(make_workload, model, device):
    plan, watched, result = run(make_workload(preset=False), model, device)
    leads = set(plan.seq[plan.lead].tolist())
    assert leads
    assert watched.revised.revision == 1
    assert leads & set(watched.ended_before)
    assert not set(watched.revised.seq.tolist()) & set(watched.ended_before)
    assert {window.revision for window in result.windows} == {0, 1}
    assert result.num_output_tokens == make_workload(preset=False).num_output_tokens.sum()


def test_lengths_that_the_run_has_not_shown_change_nothing(make_workload, model, device):
    workload = make_workload(preset=False)
    plan, watched, _ = run(workload, model, device)
    longer = workload.num_output_tokens + 1_000
    shown = np.array(watched.ended_before)
    longer[shown] = workload.num_output_tokens[shown]
    other_plan, other, _ = run(replace(workload, num_output_tokens=longer), model, device)
    assert plan.to_arrow() == other_plan.to_arrow()
    assert watched.ended_before == other.ended_before
    assert watched.revised.to_arrow() == other.revised.to_arrow()


def test_a_plan_without_samples_is_never_planned_anew(make_workload, model, device):
    workload = make_workload()
    plan = build_plan(workload.requests, model, device, PlanConfig("dfs", BLOCK_SIZE))
    replanner = SampleReplanner(workload.requests, plan, model, device, CONFIG)
    replanner.ended(0, 5)
    assert replanner.revision() is None


def test_the_revision_waits_for_samples_that_run_long(make_workload, model, device):
    workload = make_workload(preset=False)
    plan = build_plan(workload.requests, model, device, CONFIG)
    replanner = SampleReplanner(workload.requests, plan, model, device, CONFIG)
    leads = plan.seq[plan.lead].tolist()
    for seq in leads[1:]:
        replanner.ended(seq, 10)
        assert replanner.revision() is None
    others = [seq for seq in plan.seq.tolist() if seq not in leads]
    for seq in others[: len(plan) // 4 - len(leads)]:
        replanner.ended(seq, 10)
    assert replanner.revision() is None
    for seq in others[len(plan) // 4 - len(leads) : len(plan) // 4 + 2]:
        replanner.ended(seq, 10)
    assert replanner.revision().revision == 1
    assert replanner.revision() is None
