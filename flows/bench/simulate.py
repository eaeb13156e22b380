"""`blend bench simulate`: any workload under every policy."""

from collections.abc import Callable
from pathlib import Path

from blend_core.studies.study import WorkloadRun, run_workload
from blend_core.studies.workload_file import read_workload
from flows.bench.study_tasks import study_model


def run_simulate_bench(path: Path, seed: int, tell: Callable[[str], None]) -> WorkloadRun:
    """Simulates the workload of a Parquet file in the setting of the studies.

    Raises:
        ConfigurationError: the file is no workload.
    """
    model, device = study_model()
    return run_workload(read_workload(path), model, device, seed, told=tell)
