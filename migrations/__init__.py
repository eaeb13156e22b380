"""Alembic migrations, shipped in the package so that a wheel can upgrade a database."""
