"""Plans: an Arrow file in the object store, one summary row in the database."""

from dataclasses import asdict, fields

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from blend_core.errors import StaleRunError, StorageError
from blend_core.plan import Plan, PlanSummary
from storage.database import Database
from storage.ids import new_id
from storage.object_errors import needed_to_go_on
from storage.objects import ObjectStore, split_uri
from storage.ownership import Run, hold_job
from storage.schema import plan as plan_table


def save_plan(db: Database, objects: ObjectStore, job_id: str, plan: Plan, *, run: Run | None = None) -> str:
    """Stores a revision and returns its URI.

    Raises:
        StaleRunError: the run no longer owns the job.
        StorageError: the job has a plan of this revision already. Revisions are only added.
    """
    # A name of its own: a plan that is refused below must not have replaced the one that is there.
    key = f"jobs/{job_id}/plans/{plan.revision:05}-{new_id('plan')}.arrow"
    entry = objects.put(key, plan.to_arrow())
    statement = (
        insert(plan_table)
        .values(
            job_id=job_id,
            revision=plan.revision,
            run_id=None if run is None else run.run_id,
            policy=plan.policy,
            plan_uri=entry.uri,
            **asdict(plan.summary),
        )
        .on_conflict_do_nothing()
        .returning(plan_table.c.revision)
    )
    try:
        with db.connect() as connection:
            if run is not None:
                hold_job(connection, run)
            is_new = connection.execute(statement).one_or_none() is not None
    except StaleRunError:
        objects.delete([key])
        raise
    if not is_new:
        objects.delete([key])
        raise StorageError(
            f"Job {job_id} has a plan of revision {plan.revision} already; plan with the next one.",
            job_id=job_id,
            revision=plan.revision,
        )
    return entry.uri


def load_plan(db: Database, objects: ObjectStore, job_id: str, *, revision: int | None = None) -> Plan:
    """Reads a revision, the newest by default.

    Raises:
        StorageError: there is no such plan, or its object is gone.
        PlanError: what is stored is damaged.
    """
    statement = (
        sa.select(plan_table.c.plan_uri)
        .where(plan_table.c.job_id == job_id)
        .order_by(plan_table.c.revision.desc())
        .limit(1)
    )
    if revision is not None:
        statement = statement.where(plan_table.c.revision == revision)
    with db.connect() as connection:
        uri = connection.execute(statement).scalar_one_or_none()
    if uri is None:
        which = "no plan" if revision is None else f"no plan of revision {revision}"
        raise StorageError(f"Job {job_id} has {which}; run the job.", job_id=job_id)
    with needed_to_go_on():
        content = objects.get(split_uri(uri)[1])
    return Plan.from_arrow(content)


def load_plan_summary(db: Database, job_id: str, *, revision: int | None = None) -> PlanSummary | None:
    """What a revision promises, the newest by default; None where there is no such plan."""
    columns = [plan_table.c[field.name] for field in fields(PlanSummary)]
    statement = (
        sa.select(*columns)
        .where(plan_table.c.job_id == job_id)
        .order_by(plan_table.c.revision.desc())
        .limit(1)
    )
    if revision is not None:
        statement = statement.where(plan_table.c.revision == revision)
    with db.connect() as connection:
        row = connection.execute(statement).one_or_none()
    return None if row is None else PlanSummary(*row)


def next_revision(db: Database, job_id: str) -> int:
    """0 for a job without a plan, else the newest revision plus 1."""
    newest = sa.select(sa.func.max(plan_table.c.revision)).where(plan_table.c.job_id == job_id)
    with db.connect() as connection:
        revision = connection.execute(newest).scalar_one()
    return 0 if revision is None else int(revision) + 1
