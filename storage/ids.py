"""Ids that sort by the time they were made."""

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


def new_id(kind: str) -> str:
    """`<kind>_` and 20 characters: 10 of the time in milliseconds, 10 random. Sorts by time of creation."""
    number = (time.time_ns() // 1_000_000) << 50 | secrets.randbits(50)
    return f"{kind}_" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(95, -1, -5))
