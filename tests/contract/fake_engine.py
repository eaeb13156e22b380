"""An engine without a model, the plain twin of the others: token blocks, single steps, loops."""

from blend_core.engines.base import RequestFailed, RequestFinished
from blend_core.errors import RequestErrorCode


class _Block:
    def __init__(self):
        self.key = None
        self.num_references = 0


class _Running:
    def __init__(self, request, side, kept):
        self.request = request
        self.side = side
        self.kept = kept
        self.tokens = [*request.prompt_token_ids.tolist(), *kept]
        self.num_prefill_tokens = len(self.tokens)
        self.num_computed = 0
        self.blocks = []
        self.is_decoding = False

    @property
    def output(self):
        return self.tokens[self.request.num_prompt_tokens :]

    def add_token(self):
        # An answer that nobody else has: no two requests can share a block of it.
        self.tokens.append(-1 - self.request.seq * 100_000 - len(self.tokens))


class FakeEngine:
    """Runs a source under a policy and yields endings. Counts by the letter of `StepWindow` in `counts`.

    It knows `num_upcoming` requests ahead; the others are not ready. With `prepares` it has time for the
    policy while a step is computed.
    """

    def __init__(self, limits, num_upcoming=8, *, prepares=False):
        self._prepares = prepares
        self._limits = limits
        self._num_upcoming = num_upcoming
        self._empty = [_Block() for _ in range(limits.num_blocks)]
        self._evictable = []
        self._cached = {}
        self._requests = {}
        self._kept = {}
        self._once_computed = {}
        self._running = []
        self._first_cached = {}
        self.counts = dict.fromkeys(
            (
                "num_steps",
                "num_prefill_tokens",
                "num_decode_tokens",
                "num_cached_tokens",
                "num_recomputed_tokens",
                "prefill_tokens_sq",
                "decode_kv_tokens",
                "num_preempted",
                "num_finished",
            ),
            0,
        )

    # The view of the policy.

    @property
    def num_free_blocks(self):
        return len(self._empty) + len(self._evictable)

    @property
    def num_running(self):
        return len(self._running)

    @property
    def num_decoding(self):
        return sum(running.is_decoding for running in self._running)

    def num_held_blocks(self, seq):
        tokens = [*self._requests[seq].prompt_token_ids.tolist(), *self._kept.get(seq, [])]
        return sum(block.num_references > 0 for block in self._hits(tokens))

    def is_ready(self, seq):
        return seq in self._requests

    # The loop.

    def run(self, source, make_policy):
        policy = make_policy(source.plan(), self._limits)
        while policy.num_waiting or self._running:
            for seq in source.withdrawn():
                self._withdraw(policy, seq)
            plan = source.revision()
            if plan is not None:
                policy.revise(plan)
            wanted = [seq for seq in policy.upcoming(self._num_upcoming) if seq not in self._requests]
            for request in source.fetch(wanted):
                self._requests[request.seq] = request
            if policy.num_waiting or self._running:
                yield from self._step(policy)
                self.check_integrity()

    def _step(self, policy):
        failed = []
        may_admit = self._make_room(policy, failed)
        decoding = [running for running in self._running if running.is_decoding]
        for running in decoding:
            running.blocks += self._take_for(running, len(running.tokens))
        completed, num_chunks = self._prefill(policy, policy.begin_step(self), may_admit, failed)
        yield from failed
        if not decoding and not num_chunks:
            assert failed, "a step without work"
            return
        self.counts["num_steps"] += 1
        for running in decoding:
            self.counts["num_decode_tokens"] += 1
            self.counts["decode_kv_tokens"] += len(running.tokens)
            self._compute(running, 1)
        for running in completed:
            running.is_decoding = True
            policy.decoding(running.request.seq)
        policy.advanced(1)
        if self._prepares:
            policy.prepare()
        for running in decoding + completed:
            running.add_token()
        for running in [*self._running]:
            if running.is_decoding and len(running.output) == running.request.sampling.max_tokens:
                self.counts["num_finished"] += 1
                self._leave(running)
                policy.finished(running.request.seq, len(running.output))
                yield self._ending(running)

    def _make_room(self, policy, failed):
        may_admit = True
        while self._num_growing() > self.num_free_blocks:
            may_admit = False
            latest = self._running[-1]
            self._leave(latest)
            seq = latest.request.seq
            self._kept[seq] = latest.output
            self._once_computed[seq] = max(self._once_computed.get(seq, 0), latest.num_computed)
            if not self._running:
                policy.finished(seq, 0)
                failed.append(self._too_large(seq))
                break
            policy.preempted(seq)
            self.counts["num_preempted"] += 1
        return may_admit

    def _num_growing(self):
        return sum(
            self._num_missing(running, len(running.tokens))
            for running in self._running
            if running.is_decoding
        )

    def _num_missing(self, running, num_tokens):
        return -(-num_tokens // self._limits.block_size) - len(running.blocks)

    def _prefill(self, policy, budget, may_admit, failed):
        completed, num_chunks = [], 0
        while budget > 0:
            partial = [
                running for running in self._running if not running.is_decoding and running not in completed
            ]
            if not partial:
                if not may_admit or len(self._running) >= self._limits.max_num_seqs:
                    break
                admission = policy.next_request(self)
                if admission is None or not self._admit(policy, admission, failed):
                    break
                continue
            assert len(partial) == 1
            running = partial[0]
            before = running.num_computed
            num_tokens = min(budget, running.num_prefill_tokens - before)
            self._compute(running, num_tokens)
            budget -= num_tokens
            num_chunks += 1
            once = self._once_computed.get(running.request.seq, 0)
            self.counts["num_prefill_tokens"] += num_tokens
            self.counts["prefill_tokens_sq"] += (before + num_tokens) ** 2 - before**2
            self.counts["num_recomputed_tokens"] += sum(
                before <= at < before + num_tokens for at in range(once)
            )
            if running.num_computed == running.num_prefill_tokens:
                completed.append(running)
        return completed, num_chunks

    def _admit(self, policy, admission, failed):
        seq = admission.seq
        running = _Running(self._requests[seq], admission.side, self._kept.get(seq, []))
        hits = self._hits(running.tokens)
        idle = sum(block.num_references == 0 for block in hits)
        num_new = -(-len(running.tokens) // self._limits.block_size) - len(hits)
        if num_new > self.num_free_blocks - idle:
            assert not self._running, "a request was named that does not fit"
            policy.finished(seq, 0)
            failed.append(self._too_large(seq))
            return True
        for block in hits:
            if block.num_references == 0:
                self._evictable.remove(block)
            block.num_references += 1
        running.blocks = hits + self._take(num_new)
        running.num_computed = len(hits) * self._limits.block_size
        self._running.append(running)
        if seq not in self._first_cached:
            self._first_cached[seq] = running.num_computed
            self.counts["num_cached_tokens"] += running.num_computed
        policy.admitted(seq, admission.side, running.num_computed)
        return True

    def _withdraw(self, policy, seq):
        for running in [*self._running]:
            if running.request.seq == seq:
                self._leave(running)
        policy.finished(seq, 0)

    # Blocks.

    def _key(self, tokens, index):
        return tuple(tokens[: (index + 1) * self._limits.block_size])

    def _hits(self, tokens):
        hits = []
        for index in range((len(tokens) - 1) // self._limits.block_size):
            block = self._cached.get(self._key(tokens, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _take_for(self, running, num_tokens):
        return self._take(self._num_missing(running, num_tokens))

    def _take(self, num_blocks):
        taken = []
        for _ in range(num_blocks):
            block = self._empty.pop() if self._empty else self._evictable.pop(0)
            if block.key is not None:
                del self._cached[block.key]
                block.key = None
            block.num_references = 1
            taken.append(block)
        return taken

    def _compute(self, running, num_tokens):
        before = running.num_computed
        running.num_computed += num_tokens
        for index in range(
            before // self._limits.block_size, running.num_computed // self._limits.block_size
        ):
            block, key = running.blocks[index], self._key(running.tokens, index)
            if block.key is None and key not in self._cached:
                block.key = key
                self._cached[key] = block

    def _leave(self, running):
        self._running.remove(running)
        for block in reversed(running.blocks):
            block.num_references -= 1
            if block.num_references == 0:
                (self._evictable if block.key is not None else self._empty).append(block)

    def check_integrity(self):
        references = {}
        for running in self._running:
            assert len(running.blocks) * self._limits.block_size >= running.num_computed
            for block in running.blocks:
                references[id(block)] = references.get(id(block), 0) + 1
        free = self._empty + self._evictable
        assert len(references) + len(free) == self._limits.num_blocks
        assert not any(id(block) in references for block in free)
        assert all(block.num_references == 0 for block in free)

    # Events.

    def _ending(self, running):
        request = running.request
        return RequestFinished(
            seq=request.seq,
            revision=0,
            output_text="",
            output_token_ids=tuple(running.output),
            finish_reason="length",
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=self._first_cached[request.seq],
            started_at=0.0,
            finished_at=0.0,
        )

    def _too_large(self, seq):
        return RequestFailed(
            seq, 0, RequestErrorCode.REQUEST_TOO_LARGE, "It needs more KV than there is.", 0.0
        )
