"""The torch engine with a fault in it: what a request that is marked by its seed does to the engine.

Imported by name in engine processes, in place of `make_torch_engine`.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence

from blend_core.engines.base import Engine, EngineEvent, EngineInfo, RequestsAdmitted, RequestSource
from blend_core.engines.torch.factory import make_torch_engine
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.engines.vllm.factory import make_vllm_engine
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.plan import Plan
from blend_core.request import Request

KILLS = 666_001
HANGS = 666_002
RAISES = 666_003


def make_faulty_engine(options: TorchEngineOptions) -> Engine:
    """The engine, not opened yet."""
    return FaultyEngine(make_torch_engine(options))


def make_faulty_vllm_engine(options: VllmEngineOptions) -> Engine:
    """The same around vLLM."""
    return FaultyEngine(make_vllm_engine(options))


class FaultyEngine:
    """A real engine that meets its fault in the step for which a marked request was admitted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open(self) -> EngineInfo:
        return self._engine.open()

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        marking = MarkingSource(source)
        for event in self._engine.run(marking):
            yield event
            if isinstance(event, RequestsAdmitted):
                for seq in event.seqs:
                    _meet(marking.seeds[seq])

    def close(self) -> None:
        self._engine.close()


def _meet(seed: int | None) -> None:
    match seed:
        case 666_001:
            os.kill(os.getpid(), signal.SIGKILL)
        case 666_002:
            time.sleep(600)
        case 666_003:
            raise RuntimeError("secret prompt")


class MarkingSource:
    """The same source; remembers the seeds of what it gave."""

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        self.seeds: dict[int, int | None] = {}

    def plan(self) -> Plan:
        return self._source.plan()

    def fetch(self, seqs: Sequence[int]) -> Sequence[Request]:
        requests = self._source.fetch(seqs)
        self.seeds.update({request.seq: request.sampling.seed for request in requests})
        return requests

    def revision(self) -> Plan | None:
        return self._source.revision()

    def withdrawn(self) -> Sequence[int]:
        return self._source.withdrawn()
