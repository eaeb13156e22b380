"""Engines: what executes a plan and streams events."""
