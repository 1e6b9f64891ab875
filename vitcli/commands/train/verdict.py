"""Whether a run learned: validation accuracy against chance, with its sampling error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["learned", "stalled near chance", "diverged"]

Z = 3.09
"""One-sided 99.9 % of the normal distribution."""
MARGIN = 0.1
"""The part of the way from chance to a perfect score that counts as having learned."""


def chance_accuracy(class_counts: Sequence[int]) -> float:
    """The best accuracy without looking: always the commonest class."""
    return max(class_counts) / sum(class_counts)


def lower_bound(correct: int, total: int, z: float = Z) -> float:
    """Lower end of Wilson's interval for a binomial proportion (Wilson 1927)."""
    p, z2 = correct / total, z * z
    centre = p + z2 / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    return max((centre - spread) / (1 + z2 / total), 0.0)


def judge(correct: int, class_counts: Sequence[int]) -> Verdict:
    """`learned` if the accuracy's lower bound is above chance by a tenth of the way to one."""
    chance = chance_accuracy(class_counts)
    bar = chance + MARGIN * (1 - chance)
    above = lower_bound(correct, sum(class_counts)) > bar
    return "learned" if above else "stalled near chance"
