"""Ingest: lines and rows of the sources become requests with token ids, or error rows; the job goes on."""
