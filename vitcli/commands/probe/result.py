"""What `vitcli probe` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import Result


@dataclass(frozen=True)
class ProbeScore:
    """How many of the images that a classifier had not seen it got right."""

    method: str
    correct: int
    tested: int
    accuracy: float
    low: float
    """Wilson's 95 % interval of the accuracy."""
    high: float
    converged: bool = True


@dataclass(frozen=True)
class ProbeResult(Result):
    """The answer of `vitcli probe DIR`."""

    rows_at: ClassVar[str] = "scores"

    folder: str
    model: str
    weights: str
    width: int
    images: int
    classes: tuple[str, ...]
    protocol: str
    """Which images were tested and what was learned from."""
    largest_share: float
    """Accuracy of always naming the largest class among those tested."""
    failed: int
    """Images without a vector."""
    unlabelled: int
    """Images in no class's folder, or alone in their class."""
    scores: tuple[ProbeScore, ...]
