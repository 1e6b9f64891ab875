"""What a run says as it goes, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitcli.commands.train.result import AuditRow


@dataclass(frozen=True)
class StepReport:
    """What a step, or a validation after it, has to say."""

    step: int
    steps: int
    entry: dict[str, Any]
    """As in metrics.jsonl."""
    images_per_s: float


@dataclass(frozen=True)
class Validation:
    loss: float
    correct: tuple[int, ...]
    """Right answers for each class."""
    counts: tuple[int, ...]
    """Images of each class."""

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / sum(self.counts)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    steps: int
    validation: Validation | None
    """None if the run diverged."""
    bad_step: int | None
    bad_layer: str | None
    images_per_s: float | None
    """Of the steps made now; None if there were none, as in a run that was over already."""
    audit: tuple[AuditRow, ...]
