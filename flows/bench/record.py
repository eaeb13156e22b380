"""How many results per second reach Postgres through the recorder."""

from storage.database import Database
from storage.objects import ObjectStore


def run_record_bench(db: Database, objects: ObjectStore, num_rows: int) -> float:
    """Records `num_rows` results of a throwaway job, removes it again, and returns rows per second."""
