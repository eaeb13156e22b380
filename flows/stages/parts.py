"""What an engine runs next: suspects of a death, group by group, then everything else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blend_core.engines.base import RequestFailed
from blend_core.errors import RequestErrorCode
from flows.stages.context import JobContext
from storage.recorder import Recorder
from storage.results import pending_seqs
from storage.suspects import Suspect, pending_suspects

MAX_DEATHS_ALONE = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that run together, apart from all others.

    Attributes:
        seqs: `(num_requests,)` int64, ascending.
        is_suspect: whether they were in flight when an engine died.
    """

    seqs: npt.NDArray[np.int64]
    is_suspect: bool


def next_part(context: JobContext) -> Part | None:
    """The requests without a result that are to run next, None when none is left.

    Groups of suspects come first, the one that was made first before the others: so the half that did not die
    gives its answers, and is cleared, before the other half is looked into.
    """
    database = context.wiring.database
    pending = pending_seqs(database, context.job_id)
    if len(pending) == 0:
        return None
    suspects = pending_suspects(database, context.job_id)
    if not suspects:
        return Part(pending, is_suspect=False)
    group = [suspect.seq for suspect in suspects if suspect.group_number == suspects[0].group_number]
    return Part(np.array(group, dtype=np.int64), is_suspect=True)


def set_culprits_aside(context: JobContext, now_s: float) -> list[int]:
    """Gives those requests an error row that killed engines while they ran alone; returns them.

    Args:
        context: the run.
        now_s: seconds since the epoch.

    Raises:
        StaleRunError: the run no longer owns its job.
        StorageError: the rows cannot be recorded.
    """
    wiring = context.wiring
    culprits = [
        suspect
        for suspect in pending_suspects(wiring.database, context.job_id)
        if suspect.num_deaths_alone >= MAX_DEATHS_ALONE
    ]
    if culprits:
        with Recorder(wiring.database, wiring.objects, context.run) as recorder:
            for culprit in culprits:
                recorder.failed(_failure(culprit, now_s))
    return [culprit.seq for culprit in culprits]


def _failure(culprit: Suspect, now_s: float) -> RequestFailed:
    return RequestFailed(
        culprit.seq,
        0,
        RequestErrorCode.ENGINE_DIED,
        f"The engine died {culprit.num_deaths_alone} times while it ran this request alone; "
        "`blend report` tells of what. Change the request or leave it out.",
        now_s,
    )
