"""An engine by hand: a test goes on step by step and looks at what the policy asked for."""

from blend_core.policies.base import EngineLimits
from blend_core.policies.density_matched import ALL_RULES, DensityMatchedPolicy

LIMITS = EngineLimits(block_size=4, num_blocks=1_000, max_num_seqs=500, max_num_batched_tokens=2_000)


class Desk:
    """An engine by hand: prompts are complete in the step that starts them, and nothing is cached."""

    def __init__(self, plan, view, lengths, limits, policy):
        self.plan, self.view, self.lengths, self.limits = plan, view, lengths, limits
        self.prompt = dict(zip(plan.seq.tolist(), plan.num_prompt_tokens.tolist(), strict=True))
        self.policy = policy
        self.output, self.side, self.order, self.budgets = {}, {}, [], []
        self.kept = {}
        self.clock = self.num_preempted = 0
        self.update()

    def update(self):
        held = [
            -(-(self.prompt[seq] + output + 1) // self.limits.block_size)
            for seq, output in self.output.items()
        ]
        self.view.num_free_blocks = self.limits.num_blocks - sum(held)
        self.view.num_running = self.view.num_decoding = len(self.output)

    def step(self, num_steps=1):
        for _ in range(num_steps):
            self._step()
        return self

    def _step(self):
        budget = self.policy.begin_step(self.view)
        self.budgets.append(budget)
        started = []
        while budget > 0 and (admission := self.policy.next_request(self.view)) is not None:
            seq = admission.seq
            assert self.view.is_ready(seq)
            self.policy.admitted(seq, admission.side, 0)
            self.order.append(seq)
            self.side[seq] = admission.side
            budget -= self.prompt[seq]
            started.append(seq)
            self.output[seq] = self.kept.pop(seq, 0)
            num_decoding = self.view.num_decoding
            self.update()
            self.view.num_decoding = num_decoding
        for seq in started:
            self.policy.decoding(seq)
        self.policy.advanced(1)
        self.clock += 1
        for seq in [*self.output]:
            self.output[seq] += 1
            if self.output[seq] == self.lengths[seq]:
                self.policy.finished(seq, self.output.pop(seq))
        self.update()
        while self.view.num_free_blocks < 0 and len(self.output) > 1:
            self.preempt([*self.output][-1])

    def preempt(self, seq):
        self.kept[seq] = self.output.pop(seq)
        self.policy.preempted(seq)
        self.num_preempted += 1
        self.update()

    def run(self, num_steps=20_000):
        while self.policy.num_waiting or self.output:
            self._step()
            assert self.clock < num_steps, "it hangs"
        return self

    def of(self, side):
        return [seq for seq in self.order if self.side[seq] is side]


def desk_of(make_plan, view, requests, limits=LIMITS, lengths=(), rules=ALL_RULES, **options):
    plan = make_plan([(*row, 1.0) for row in requests], **options)
    true_lengths = {**{seq: output for seq, _, output in requests}, **dict(lengths)}
    return Desk(plan, view, true_lengths, limits, DensityMatchedPolicy(plan, limits, rules))


def dense(num, first=0, prompt=400):
    """Long prompts with next to no answer."""
    return [(first + number, prompt, 2) for number in range(num)]


def long(outputs, first=1_000, prompt=20):
    return [(first + number, prompt, output) for number, output in enumerate(outputs)]


def first_in_flight(desk, is_wanted):
    """Goes on until a request is in flight that is wanted."""
    while not any(map(is_wanted, desk.output)):
        desk.step()
    return next(filter(is_wanted, desk.output))


def hidden_kind(make_plan, view, *, truth, num, prompt=50, num_dense=100, outputs=(300,) * 40):
    """A kind of unknown length beside dense requests and long ones."""
    requests = [*dense(num_dense), *[(5_000 + n, prompt, 500) for n in range(num)], *long(outputs)]
    kinds = [-1] * num_dense + [0] * num + [-1] * len(outputs)
    lengths = {5_000 + n: truth for n in range(num)}
    return desk_of(make_plan, view, requests, kinds=kinds, lengths=lengths)
