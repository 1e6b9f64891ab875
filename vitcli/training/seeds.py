"""Seeds that follow from the run's seed and a place in it, so that no generator need be saved."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, *place: str | int) -> int:
    """A 63-bit seed for a named place, for example `derived_seed(0, "order", epoch)`."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
