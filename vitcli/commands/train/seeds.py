"""Seeds that follow from the run's seed and a place in it, so that no generator need be saved."""

from __future__ import annotations

import hashlib

import torch


def derived_seed(seed: int, *place: str | int) -> int:
    """A 63-bit seed for a named place, for example `derived_seed(0, "order", epoch)`."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_cpu(seed: int) -> None:
    """Seed torch's CPU generator alone; `torch.manual_seed` takes a millisecond for the others."""
    torch.default_generator.manual_seed(seed)


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from."""
    seed_cpu(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
