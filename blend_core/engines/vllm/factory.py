"""Makes a vLLM engine from options without loading vLLM before the call: for `EngineProcess`."""

from blend_core.engines.base import Engine
from blend_core.engines.vllm.options import VllmEngineOptions


def make_vllm_engine(options: VllmEngineOptions) -> Engine:
    """The engine, not opened yet. `functools.partial(make_vllm_engine, options)` is picklable."""
    from blend_core.engines.vllm.engine import VllmEngine

    return VllmEngine(options)
