"""Shards of a plan leased to the ranks of a run; which request shards count; suspects."""

from importlib import resources

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Runs the SQL files of this revision, in order."""
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    folder = resources.files("migrations.versions")
    for part in ("tables", "guards", "request_index", "suspects"):
        connection.execute((folder / f"r0006_{part}.sql").read_text(encoding="utf-8"))
