"""What came of a write-back counts rows that a trigger dropped."""

from importlib import resources

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Runs the SQL file of this revision."""
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    file = resources.files("migrations.versions") / "r0007_comments.sql"
    connection.execute(file.read_text(encoding="utf-8"))
