"""Small jobs for the contract suite: shared prefixes, true lengths, and estimates that may be wrong."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from blend_core.performance import StepTimeModel
from blend_core.plan import LengthGroup, Plan, PlanSummary
from blend_core.policies.base import EngineLimits
from blend_core.request import Request, RequestArrays, SamplingParams
from blend_core.specs import DeviceProfile, ModelSpec

MODEL = ModelSpec("tiny", 1_000_000, 2, 64, 4, 2, 32, 4, 4096, 1024)
DEVICE = DeviceProfile("tiny", 1e12, 1e11, 1e9, 0.5, 1e-5, 0.8, 0.15)


@dataclass(frozen=True)
class Job:
    """Requests by `seq` 0, 1, …: prompts, true output lengths, and what the planner believes they are."""

    prompts: list[list[int]]
    output_tokens: list[int]
    estimates: list[float]
    block_size: int

    def request(self, seq):
        sampling = SamplingParams(max_tokens=self.output_tokens[seq], temperature=0.0, ignore_eos=True)
        return Request(seq, np.array(self.prompts[seq], dtype=np.int32), sampling)

    def arrays(self):
        lengths = [len(prompt) for prompt in self.prompts]
        return RequestArrays(
            seq=np.arange(len(lengths), dtype=np.int64),
            token_ids=np.array([token for prompt in self.prompts for token in prompt], dtype=np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            min_tokens=np.zeros(len(lengths), dtype=np.int32),
            max_tokens=np.array(self.output_tokens, dtype=np.int32),
        )

    def plan(self, order=None, revision=0, lead=()):
        """A plan in the given order; density first by default."""
        prompt = np.array([len(tokens) for tokens in self.prompts], dtype=np.float64)
        output = np.array(self.estimates, dtype=np.float64)
        compute, memory = prompt + output, (prompt * output + output**2 / 2) / 50
        if order is None:
            order = sorted(range(len(prompt)), key=lambda seq: (-compute[seq] / memory[seq], seq))
        order = np.array(order, dtype=np.int64)
        shared = [0] * len(order)
        for place in range(1, len(order)):
            shared[place] = self._shared(order[place - 1], order[place])
        empty = np.zeros(0)
        summary = PlanSummary(
            model=MODEL.name,
            device=DEVICE.name,
            block_size=self.block_size,
            num_requests=len(order),
            num_prompt_tokens=int(prompt[order].sum()),
            estimated_output_tokens=float(output[order].sum()),
            compute_s=float(compute[order].sum()),
            memory_s=float(memory[order].sum()),
            density=float(compute[order].sum() / memory[order].sum()) if len(order) else 1.0,
            prefix_sharing_best=0.0,
            prefix_sharing_planned=0.0,
            optimum_s=0.0,
        )
        # Whose length is not what it is estimated to be is not known.
        is_wrong = output != np.array(self.output_tokens)
        return Plan(
            revision=revision,
            policy="dual_scan",
            summary=summary,
            seq=order,
            num_prompt_tokens=prompt[order].astype(np.int32),
            num_shared_tokens=np.array(shared, dtype=np.int32),
            max_tokens=np.array(self.output_tokens, dtype=np.int32)[order],
            estimated_output_tokens=output[order],
            estimated_output_tokens_sq=output[order] ** 2,
            compute_s=compute[order],
            memory_s=memory[order],
            lead=np.isin(order, list(lead)),
            length_group=np.where(is_wrong[order], 0, -1).astype(np.int32),
            length_groups=(LengthGroup(max(self.output_tokens)),),
            step_times=StepTimeModel(1e-3, 1e-5, 2e-3, 1e-9, 1e-7, 0.15),
            progress=empty,
            planned_density=empty,
        )

    def _shared(self, left, right):
        a, b = self.prompts[left], self.prompts[right]
        equal = 0
        while equal < min(len(a), len(b) - 1) and a[equal] == b[equal]:
            equal += 1
        return equal // self.block_size * self.block_size


def random_job(seed, num_requests=24, block_size=4, max_prompt=20, max_output=24, wrong=False):
    """Prompts of a few groups with common beginnings, some of them equal; every fourth answer is long."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(3, 200, size=int(rng.integers(1, max_prompt // 2))).tolist() for _ in range(3)]
    prompts, output_tokens = [], []
    for seq in range(num_requests):
        stem = stems[int(rng.integers(len(stems)))]
        tail = rng.integers(3, 200, size=int(rng.integers(0, max_prompt // 2))).tolist()
        prompts.append(stem + tail)
        longest = max_output if seq % 4 == 0 else max(2, max_output // 6)
        output_tokens.append(int(rng.integers(1, longest)))
    factor = rng.uniform(0.2, 3.0, size=num_requests) if wrong else np.ones(num_requests)
    estimates = [max(1.0, float(length * share)) for length, share in zip(output_tokens, factor, strict=True)]
    return Job(prompts, output_tokens, estimates, block_size)


class ListSource:
    """A `RequestSource` over a job; revisions and withdrawals come at their number of polls."""

    def __init__(self, job, plan, revisions=None, withdrawals=None):
        self._job = job
        self._plan = plan
        self._revisions = dict(revisions or {})
        self._withdrawals = dict(withdrawals or {})
        self._num_polls = 0
        self.fetched = []

    def plan(self):
        return self._plan

    def fetch(self, seqs):
        self.fetched.extend(seqs)
        return [self._job.request(seq) for seq in seqs]

    def revision(self):
        return self._revisions.pop(self._num_polls, None)

    def withdrawn(self):
        self._num_polls += 1
        return self._withdrawals.pop(self._num_polls, ())


# Few distinct tokens and short prompts, so that prefixes, whole prompts and prompts of whole blocks collide.
prompts = st.lists(st.lists(st.integers(3, 4), min_size=1, max_size=14), min_size=1, max_size=14)


@st.composite
def jobs(draw):
    drawn = draw(prompts)
    lengths = draw(st.lists(st.integers(1, 20), min_size=len(drawn), max_size=len(drawn)))
    factors = draw(st.lists(st.floats(0.2, 4.0), min_size=len(drawn), max_size=len(drawn)))
    estimates = [max(1.0, length * factor) for length, factor in zip(lengths, factors, strict=True)]
    return Job(drawn, lengths, estimates, block_size=4)


tight_limits = st.builds(EngineLimits, st.just(4), st.integers(5, 24), st.integers(1, 8), st.integers(8, 24))
"""Engines in which KV, requests in flight and a step's tokens all run out."""
