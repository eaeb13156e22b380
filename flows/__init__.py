"""Prefect flows, ingest, settings, wiring and the command line."""
