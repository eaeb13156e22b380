"""Schema revisions, oldest first by number."""
