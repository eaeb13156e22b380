"""`blend bench simulate`: any workload under every policy."""

from collections.abc import Callable
from pathlib import Path

from blend_core.errors import ConfigurationError
from blend_core.studies.study import WorkloadRun, run_workload, study_limits
from blend_core.studies.workload_file import read_workload
from flows.bench.study_tasks import StudyTarget


def run_simulate_bench(
    path: Path, seed: int, tell: Callable[[str], None], target: StudyTarget
) -> WorkloadRun:
    """Simulates the workload of a Parquet file with the limits of the studies.

    Raises:
        ConfigurationError: the file is no workload, or a request of it needs more KV than there is.
    """
    model, device = target.model, target.device
    limits = study_limits(model, device)
    workload = read_workload(path)
    # The last token of an answer is never read.
    num_kv_tokens = workload.requests.num_prompt_tokens + workload.num_output_tokens - 1
    largest = int(num_kv_tokens.argmax())
    if num_kv_tokens[largest] > limits.num_blocks * limits.block_size:
        raise ConfigurationError(
            f"{path.name}: row {largest + 1} needs {num_kv_tokens[largest]:,} tokens of KV and there "
            f"are {limits.num_blocks * limits.block_size:,}; leave out what nothing can run."
        )
    return run_workload(workload, model, device, seed, told=tell)
