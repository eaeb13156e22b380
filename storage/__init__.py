"""Postgres and S3: everything that is written down."""
