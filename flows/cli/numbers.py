"""Largest numbers that options of several commands take."""

MAX_SEED = (1 << 32) - 1
"""Largest seed of a random generator."""

MAX_TOKENS = (1 << 31) - 1
"""Largest `max_tokens` that a request may state, too."""
