"""What an engine runs next: suspects of a death, group by group, then everything else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blend_core.engines.base import RequestFailed
from blend_core.errors import RequestErrorCode
from flows.stages.context import JobContext
from flows.stages.shared_plan import SharedPlan
from storage.recorder import Recorder
from storage.suspects import Suspect, pending_suspects


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that run together, apart from all others.

    Attributes:
        seqs: `(num_requests,)` int64, ascending.
        is_suspect: whether they were in flight when an engine died.
    """

    seqs: npt.NDArray[np.int64]
    is_suspect: bool


def next_part(context: JobContext, plan: SharedPlan, rank: int) -> Part | None:
    """What a rank is to run next of the requests that it holds, None when it holds none.

    Groups of suspects come first, the one that was made first before the others: so the half that did not die
    gives its answers, and is cleared, before the other half is looked into. Those that engines died of alone
    come last: until then the others have shown whether engines live without them.
    """
    held = plan.requests_of(rank)
    if not held:
        return None
    suspects = _suspects(context, plan, rank)
    in_groups = [suspect for suspect in suspects if suspect.num_deaths_alone == 0]
    named = {suspect.seq for suspect in suspects}
    rest = [seq for seq in held if seq not in named]
    if rest and not in_groups:
        return Part(np.sort(np.array(rest, dtype=np.int64)), is_suspect=False)
    group_number = (in_groups or suspects)[0].group_number
    group = [suspect.seq for suspect in suspects if suspect.group_number == group_number]
    return Part(np.array(group, dtype=np.int64), is_suspect=True)


def set_culprits_aside(
    context: JobContext, plan: SharedPlan, recorder: Recorder, rank: int, now_s: float
) -> list[int]:
    """Gives those requests of a rank an error row that killed engines while they ran alone; returns them.

    Args:
        context: the run.
        plan: who holds what.
        recorder: writes the rows.
        rank: the rank.
        now_s: seconds since the epoch.

    Raises:
        StaleRunError: the run no longer owns its job.
        StorageError: the rows cannot be recorded.
    """
    if not plan.requests_of(rank):
        return []
    culprits = [suspect for suspect in _suspects(context, plan, rank) if suspect.is_culprit]
    for culprit in culprits:
        plan.ended(rank, _failure(culprit, now_s))
    if culprits:
        recorder.flush()
    return [culprit.seq for culprit in culprits]


def _suspects(context: JobContext, plan: SharedPlan, rank: int) -> list[Suspect]:
    suspects = pending_suspects(context.wiring.database, context.job_id)
    return [suspect for suspect in suspects if plan.holds(rank, suspect.seq)]


def _failure(culprit: Suspect, now_s: float) -> RequestFailed:
    return RequestFailed(
        culprit.seq,
        0,
        RequestErrorCode.ENGINE_DIED,
        f"The engine died {culprit.num_deaths_alone} times while it ran this request alone; "
        "`blend report` tells of what. Change the request or leave it out.",
        now_s,
    )
