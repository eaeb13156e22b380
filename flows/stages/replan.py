"""Planning anew in mid-run: the first requests' lengths are the samples that the next revision rests on."""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from blend_core.errors import BlendError
from blend_core.plan import Plan
from flows.stages.context import JobContext
from flows.stages.plan import plan_revision
from flows.stopping import thread_end_s
from storage.output_lengths import load_length_priors
from storage.request_shards import RequestShards
from storage.results import output_lengths, pending_seqs

logger = logging.getLogger(__name__)

# The longest samples are also the last: waiting for every one of them keeps the estimates without bias. A few
# stragglers must not hold the revision back for ever, though.
STRAGGLER_SHARE = 0.1
ENDED_SHARE_BEFORE_LEAVING_STRAGGLERS = 0.25


class Replanner:
    """Makes revision 1 of a plan beside the running engine, as a context manager.

    It is due once, when every lead request of revision 0 has ended; or when all but a tenth have and a
    quarter of the plan has ended, too. A plan without lead requests and a later revision are never planned
    anew. A revision that cannot be made is a note in the log: the engine goes on with the plan it has.
    """

    __slots__ = (
        "_context",
        "_num_lead",
        "_num_open",
        "_num_requests",
        "_open_lead",
        "_plan",
        "_revised",
        "_shards",
        "_thread",
    )

    def __init__(self, context: JobContext, shards: RequestShards, plan: Plan, pending: Plan) -> None:
        """Takes the whole plan in force and the part of it that is still to run."""
        self._context = context
        self._shards = shards
        self._plan = plan
        self._num_requests = len(plan)
        self._num_lead = int(plan.lead.sum())
        self._num_open = len(pending)
        self._open_lead = set(pending.seq[pending.lead].tolist())
        self._thread: threading.Thread | None = None
        self._revised: Plan | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.join(thread_end_s(error))

    def ended(self, seq: int) -> None:
        """A request of the plan ended, well or not."""
        self._num_open -= 1
        self._open_lead.discard(seq)

    @property
    def is_due(self) -> bool:
        """Whether to call `start` now. Cheap."""
        if self._thread is not None or self._plan.revision > 0 or self._num_lead == 0 or self._num_open == 0:
            return False
        if not self._open_lead:
            return True
        num_ended = self._num_requests - self._num_open
        return (
            len(self._open_lead) <= STRAGGLER_SHARE * self._num_lead
            and num_ended >= ENDED_SHARE_BEFORE_LEAVING_STRAGGLERS * self._num_requests
        )

    def start(self, commit: Callable[[], None]) -> None:
        """Starts planning in a thread of its own.

        The thread calls `commit` first, which returns when every result told so far is in the database,
        however long that is away.
        """
        self._thread = threading.Thread(
            target=self._make_revision, args=(commit,), name=f"replan-{self._context.job_id}", daemon=True
        )
        self._thread.start()

    def take(self) -> Plan | None:
        """The new revision, once, when it is ready."""
        revised = self._revised
        # The thread puts it there once: looked at first, so that what comes in this moment is not lost.
        if revised is not None:
            self._revised = None
        return revised

    def _make_revision(self, commit: Callable[[], None]) -> None:
        context, database = self._context, self._context.wiring.database
        try:
            commit()
            samples = output_lengths(database, context.job_id, self._plan.seq[self._plan.lead].tolist())
            pending = pending_seqs(database, context.job_id)
            if samples and len(pending):
                named = np.union1d(pending, np.fromiter(samples, dtype=np.int64, count=len(samples)))
                requests = self._shards.load_arrays(named)
                self._revised = plan_revision(
                    context,
                    requests,
                    load_length_priors(database, context.job_id, context.spec.model, requests.seq),
                    samples=samples,
                    revision=self._plan.revision + 1,
                )
                context.progress.note(
                    f"Planned the rest again with the lengths of {len(samples)} answers as samples."
                )
        except Exception as error:
            # Not only BlendError: an improvement that fails must not end a run that goes well without it.
            logger.warning(
                "Job %s runs on with plan revision %d; the next one failed: %s",
                context.job_id,
                self._plan.revision,
                error,
                exc_info=not isinstance(error, BlendError),
            )
