"""How many results per second reach Postgres through the recorder."""

import time

import sqlalchemy as sa

from blend_core.engines.base import RequestFinished
from blend_core.errors import StorageError
from storage.database import Database
from storage.jobs import create_job
from storage.objects import ObjectStore
from storage.recorder import Recorder
from storage.runs import start_run
from storage.schema import batch_job, result

_TEXT = "A likely answer of a few sentences, as long as most answers of a nightly job are. " * 6


def run_record_bench(db: Database, objects: ObjectStore, num_rows: int) -> float:
    """Records `num_rows` answers of about 500 characters and returns rows per second, the last commit
    included.

    They belong to a throwaway job, which is removed again.

    Raises:
        StorageError: the database refused, or lacks a result.
    """
    job_id = create_job(db, name="bench record", model="none", spec={})
    try:
        run = start_run(db, job_id, engine="none", policy="none", details={}, lease_s=3600)
        token_ids = tuple(range(120))
        now_s = time.time()
        start_s = time.perf_counter()
        with Recorder(db, objects, run) as recorder:
            for seq in range(num_rows):
                recorder.finished(
                    RequestFinished(seq, 0, f"{seq} {_TEXT}", token_ids, "stop", 500, 400, now_s, now_s)
                )
        duration_s = time.perf_counter() - start_s
        with db.connect() as connection:
            stored = sa.select(sa.func.count()).select_from(result).where(result.c.job_id == job_id)
            num_stored = connection.execute(stored).scalar_one()
        if num_stored != num_rows:
            raise StorageError(
                f"The recorder stored {num_stored} of {num_rows} results; please report it.",
                job_id=job_id,
            )
    finally:
        with db.connect() as connection:
            connection.execute(sa.delete(result).where(result.c.job_id == job_id))
            connection.execute(sa.delete(batch_job).where(batch_job.c.job_id == job_id))
    return num_rows / duration_s
