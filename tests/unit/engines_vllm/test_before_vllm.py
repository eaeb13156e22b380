"""What the processes of an engine load before vLLM."""

import subprocess
import sys

LOADED_FIRST = (
    "blend_core.engines.process_child",
    "blend_core.engines.vllm.factory",
    "blend_core.engines.vllm.engine",
    "blend_core.engines.vllm.control",
    "blend_core.engines.vllm.remote_control",
)


def test_no_numba_is_loaded_before_vllm():
    """vLLM for CPUs cannot start beside it."""
    code = f"import sys, {', '.join(LOADED_FIRST)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numba", "llvmlite"} & set(done.stdout.split())
