"""What `vitcli train-shapes` and `vitcli train` answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vitcli.results import FailedImage, Result


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
