"""The results of `vitcli train-shapes` and `vitcli train`, the lines of a run, and its verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vitcli.results import FailedImage, Result
from vitcli.stats import above_chance, too_few, wilson


@dataclass(frozen=True)
class HistoryRow:
    """A logged step, or a validation after it; what was not measured is None."""

    step: int
    epoch: float
    loss: float | None = None
    accuracy: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    ema_first_share: float | None = None
    """Of a validated average, how much is still its first weights; None from a tenth down."""


def metrics_entry(line: bytes, step: int) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or None where it is not one of a run up to `step`."""
    try:
        entry = json.loads(line)
        row = HistoryRow(**entry)
        numbers = [value for value in entry.values() if value is not None]
        plain = all(type(value) in (int, float) for value in numbers)
        _ = [float(value) for value in numbers]  # no integer beyond all floats
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return entry if plain and is_count(row.step) and row.step <= step else None


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


@dataclass(frozen=True)
class ClassAccuracy:
    name: str
    images: int
    accuracy: float | None


@dataclass(frozen=True)
class AuditRow:
    """A parameter: whether it is meant to train, and what reached it."""

    name: str
    parameters: int
    trainable: bool
    gradient_norm: float | None
    """None where no gradient arrived."""


@dataclass(frozen=True)
class TrainSummary:
    """How a training run ended; validation is None if it diverged."""

    verdict: str
    """learned, stalled near chance, too few validation images to tell, or diverged."""
    val_accuracy: float | None
    val_loss: float | None
    chance: float
    """Accuracy of always naming the commonest class."""
    lower_bound: float | None
    """The accuracy's lower 99.9 % bound (Wilson's)."""
    bar: float
    """What that bound must exceed for `learned`: a tenth of the way from chance to one."""
    steps: int
    bad_step: int | None
    bad_layer: str | None
    images_per_s: float | None
    """Over the steps of this process's life; None if it made none."""
    parameters: int
    trainable: int
    classes: tuple[ClassAccuracy, ...]
    upper_bound: float | None = None
    """The accuracy's upper 99.9 % bound."""


@dataclass(frozen=True)
class TestScore:
    """The model that was validated, on images that decided nothing."""

    accuracy: float
    loss: float
    images: int
    lower_bound: float
    """The accuracy's lower and upper 99.9 % bounds."""
    upper_bound: float
    classes: tuple[ClassAccuracy, ...]


@dataclass(frozen=True)
class TrainResult(Result):
    """The answer of `vitcli train-shapes` and `vitcli train`."""

    rows_at: ClassVar[str] = "history"

    result: TrainSummary
    history: tuple[HistoryRow, ...]
    audit: tuple[AuditRow, ...]
    device: str
    processes: int
    config: dict[str, Any]
    test: TestScore | None = None
    """With --test alone."""
    unreadable: tuple[FailedImage, ...] = ()
    """The images that were left out."""


def step_facts(entry: Mapping[str, Any], images_per_s: float) -> str:
    """A step's line of metrics in few columns, for beside a bar."""
    return (
        f"loss {entry['loss']:.3f} acc {entry['accuracy']:.2f} lr {entry['lr']:.1e} "
        f"grad {entry['grad_norm']:.3g} {images_per_s:.0f} img/s"
    )


def validation_line(entry: Mapping[str, Any], steps: int) -> str:
    """A validation's line of metrics as text."""
    share = entry.get("ema_first_share")
    first = f"; {share:.0%} of the EMA is still its initial weights" if share else ""
    return (
        f"step {entry['step']}/{steps}: validation loss {entry['val_loss']:.4f}, "
        f"accuracy {entry['val_accuracy']:.4f}{first}"
    )


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

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's lower and upper 99.9 % bounds (Wilson's)."""
        return wilson(sum(self.correct), sum(self.counts), CONFIDENCE)


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


Verdict = Literal["learned", "stalled near chance", "too few validation images to tell", "diverged"]

CONFIDENCE = 0.998
"""Two-sided; the lower end alone holds with 99.9 %."""


def chance_accuracy(class_counts: Sequence[int]) -> float:
    """The best accuracy without looking: always the commonest class."""
    return max(class_counts) / sum(class_counts)


def judge(correct: int, class_counts: Sequence[int]) -> Verdict:
    """`learned` if the accuracy's interval is above the bar: chance plus MARGIN of the way to one.

    Else there may be too few images to tell.
    """
    total, chance = sum(class_counts), chance_accuracy(class_counts)
    low, high = wilson(correct, total, CONFIDENCE)
    if low > above_chance(chance):
        return "learned"
    if too_few(correct / total, high, chance):
        return "too few validation images to tell"
    return "stalled near chance"
