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


def test_a_request_without_an_answer_is_no_sample(make_workload, model, device):
    workload = make_workload(preset=False)
    # Long prompts and long answers need more KV than this.
    limits = replace(study_limits(model, device), num_blocks=60)
    plan = build_plan(workload.requests, model, device, CONFIG)
    output = workload.num_output_tokens
    num_held_tokens = workload.requests.num_prompt_tokens + output - 1
    does_not_fit = set(np.flatnonzero(num_held_tokens > 60 * BLOCK_SIZE).tolist())
    leads = set(plan.seq[plan.lead].tolist())
    assert leads & does_not_fit
    assert leads - does_not_fit
    told: dict[int, int] = {}

    class Listening(SampleReplanner):
        def ended(self, seq, num_output_tokens):
            told[seq] = num_output_tokens
            super().ended(seq, num_output_tokens)

        def revision(self):
            revised = super().revision()
            if revised is not None:
                self.revised = revised
            return revised

    listening = Listening(workload.requests, plan, model, device, CONFIG)
    result = simulate(
        workload.requests, output, plan, "dual_scan", model, device, limits, overlap=True, feedback=listening
    )
    assert result.num_refused == len(does_not_fit)
    assert {seq for seq, length in told.items() if length == 0} == does_not_fit
    counted = sum(count for group in listening.revised.length_groups for _, count in group.counts)
    assert counted <= len(leads - does_not_fit)


def test_samples_of_which_none_has_an_answer_tell_nothing(make_workload, model, device):
    workload = make_workload(preset=False)
    plan = build_plan(workload.requests, model, device, CONFIG)
    replanner = SampleReplanner(workload.requests, plan, model, device, CONFIG)
    for seq in plan.seq[plan.lead].tolist():
        replanner.ended(seq, 0)
    assert replanner.revision() is None
