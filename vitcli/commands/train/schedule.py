"""The learning rate at each step."""

from __future__ import annotations

import math


def warmup_steps(warmup: float | int, total: int) -> int:
    """Steps of warm-up: a fraction of `total` below 1, else a number of steps, at most `total`."""
    return min(round(warmup * total) if warmup < 1 else int(warmup), total)


def learning_rate(
    step: int, total: int, peak: float, warmup: int = 0, schedule: str = "cosine", end: float = 0.0
) -> float:
    """The rate of update `step`, 0 .. total - 1.

    Update k of the warm-up has peak (k + 1) / warmup, so none is wasted at zero. Then
    end + (peak - end) (1 + cos(pi t)) / 2 with t = (step - warmup) / (total - warmup), which would
    reach `end` at step `total` (Loshchilov and Hutter 2017, equation 5, without restarts).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    t = (step - warmup) / (total - warmup)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * t))
