"""Alembic's entry: runs the revisions on the connection that the caller opened and locked."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
