"""Makes a torch engine from options without loading torch before the call: for `EngineProcess`."""

from blend_core.engines.base import Engine
from blend_core.engines.torch.options import TorchEngineOptions


def make_torch_engine(options: TorchEngineOptions) -> Engine:
    """The engine, not opened yet. `functools.partial(make_torch_engine, options)` is picklable."""
    from blend_core.engines.torch.engine import TorchEngine

    return TorchEngine(options)
