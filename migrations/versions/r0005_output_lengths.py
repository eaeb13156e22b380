"""Lengths of answers, remembered by prompt template from night to night."""

from importlib import resources

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Runs the SQL files of this revision, in order."""
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    folder = resources.files("migrations.versions")
    for part in ("tables", "views"):
        connection.execute((folder / f"r0005_{part}.sql").read_text(encoding="utf-8"))
