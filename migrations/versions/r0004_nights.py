"""Logical dates, nightly jobs, what earlier nights have read, and results written back."""

from importlib import resources

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Runs the SQL files of this revision, in order."""
    # The raw psycopg connection: it sends a file of many statements as it is, `%` and colons included.
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    folder = resources.files("migrations.versions")
    for part in ("tables", "views", "comments"):
        connection.execute((folder / f"r0004_{part}.sql").read_text(encoding="utf-8"))
