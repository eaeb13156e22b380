"""Plans: Arrow in the object store, one summary row in the database."""

from blend_core.plan import Plan
from storage.database import Database
from storage.objects import ObjectStore


def save_plan(
    db: Database, objects: ObjectStore, job_id: str, plan: Plan, *, run_id: str | None = None
) -> str:
    """Stores a revision and returns its URI. The same revision of the same job again: `StorageError`."""


def load_plan(db: Database, objects: ObjectStore, job_id: str, *, revision: int | None = None) -> Plan:
    """Reads a revision, the newest by default; `StorageError` where there is none."""


def next_revision(db: Database, job_id: str) -> int:
    """0 for a job without a plan, else the newest revision plus 1."""
