"""vLLM's worker for CPUs around a fault of its own: the class that is named to vLLM as `worker_cls` there.

The token of a step that does not end a request's prompt is thrown away, and vLLM winds the generator of a
request with a seed back over the draw. Generators of CPUs cannot be wound back, and vLLM 0.32 dies of trying.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class SeededCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Lets the generator of a request whose token is thrown away draw nothing, so that none is wound back."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples as vLLM does; the batch has its generators back afterwards."""
        runner = self.model_runner
        # What the sampler draws from and what would be wound back: one object, by rows of the batch.
        generators = runner.input_batch.generators
        if not generators:
            return super().sample_tokens(grammar_output)
        is_discarded = runner.discard_request_mask.np
        held_back = {row: generators.pop(row) for row in list(generators) if is_discarded[row]}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(held_back)
