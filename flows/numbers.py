"""Largest numbers that options of commands and bodies of requests take; loads nothing, since help does it."""

MAX_SEED = (1 << 32) - 1
"""Largest seed of a random generator."""

MAX_TOKENS = (1 << 31) - 1
"""Largest number of tokens that a request may ask for."""

MAX_TENSOR_PARALLEL = 64
"""Most devices that a model is spread over by tensor parallelism."""
