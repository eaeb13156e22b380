"""What an engine process and its parent say to one another. Every message is pickled whole."""

from dataclasses import dataclass

from blend_core.engines.base import EngineEvent, EngineInfo
from blend_core.plan import Plan
from blend_core.request import Request


@dataclass(frozen=True, slots=True)
class StartRun:
    """Parent: run the source."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Child: the engine is open."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Happened:
    """Child: an event of the run."""

    event: EngineEvent


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Child: the run is through; every event was sent before."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Child: `open` or the run raised this."""

    error: Exception


@dataclass(frozen=True, slots=True)
class AskPlan:
    """Child: the source's first plan, please."""


@dataclass(frozen=True, slots=True)
class AskRequests:
    """Child: these requests, please."""

    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AskChanges:
    """Child: what changed since the last answer, please."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Parent: a later plan, requests cancelled or expired, and requests asked back unless they started."""

    revision: Plan | None
    withdrawn: tuple[int, ...]
    recalled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """Parent: the source raised; the parent keeps the error and raises it when the run has failed."""


Ask = AskPlan | AskRequests | AskChanges
Answer = Plan | tuple[Request, ...] | Changes | SourceFailed
