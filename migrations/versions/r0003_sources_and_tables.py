"""Sources of a job as rows, and the exported table."""

from importlib import resources

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Runs the SQL files of this revision, in order."""
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    folder = resources.files("migrations.versions")
    for part in ("job_source", "outputs"):
        connection.execute((folder / f"r0003_{part}.sql").read_text(encoding="utf-8"))
