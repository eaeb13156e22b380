"""Signs of life for the ranks of a run, so that their shards stay theirs."""

import logging

from blend_core.errors import StorageError
from flows.heartbeat import Heartbeat
from flows.stages.dealing import LEASE_S
from flows.stages.shared_plan import SharedPlan
from storage.database import Database
from storage.ownership import Run
from storage.shards import extend_leases

HEARTBEAT_INTERVAL_S = 15.0

logger = logging.getLogger(__name__)


def lease_heartbeat(db: Database, run: Run, shared: SharedPlan) -> Heartbeat:
    """Extends the leases of all ranks that are not given up, while the block lasts."""

    def extend() -> None:
        try:
            extend_leases(db, run, shared.live_ranks, lease_s=LEASE_S)
        except StorageError as error:
            # A run that is stale learns so from its own lease, and a database comes back.
            logger.warning("The leases of shards could not be extended: %s", error)

    return Heartbeat(f"shards-{run.run_id}", HEARTBEAT_INTERVAL_S, extend)
