"""What a run says as it goes, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vitcli.commands.train.result import AuditRow
from vitcli.measures import all_finite, wilson


class Progress(Protocol):
    """What shows a run as it goes, as `ui.console.progress` does."""

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """`done` of `total` steps are done."""
        ...

    def line(self, text: str) -> None:
        """Something to know."""
        ...


class Silent:
    """Shows nothing."""

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        pass

    def line(self, text: str) -> None:
        pass


def step_facts(entry: Mapping[str, Any], images_per_s: float) -> str:
    """A step's line of metrics in few columns, for beside a bar."""
    return (
        f"loss {entry['loss']:.3f} acc {entry['accuracy']:.2f} lr {entry['lr']:.1e} "
        f"grad {entry['grad_norm']:.3g} {images_per_s:.0f} img/s"
    )


def validation_line(entry: Mapping[str, Any], steps: int) -> str:
    """A validation's line of metrics as text."""
    share = entry.get("ema_first_share")
    first = f"; the average still holds {share:.0%} of its first weights" if share else ""
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


@contextmanager
def _watched(model: nn.Module, bad: list[str]) -> Iterator[None]:
    """Notes the modules whose output is not finite, in the order they finish."""
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: object, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not all(all_finite(p) for p in parts if isinstance(p, Tensor)):
                bad.append(name)

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if name:
            watch(name, module)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def first_bad_layer(model: nn.Module, images: Tensor) -> str | None:
    """The first module, in the order of the forward pass, that gives NaN or infinity.

    If its parameters are the cause, they are named instead; if the forward pass is sound, the
    parameter nearest the loss whose gradient is not finite, or the one with the largest gradient
    where only the norm overflows; None without gradients.
    """
    bad: list[str] = []
    with _watched(model, bad):
        model(images)
    if bad:
        wrong = [
            name
            for name, p in model.get_submodule(bad[0]).named_parameters(prefix=bad[0])
            if not all_finite(p)
        ]
        return wrong[0] if wrong else f"{bad[0]} (output)"
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not all_finite(gradient)]
    if broken:
        return f"{broken[-1]} (gradient)"
    if not gradients:
        return None
    # Every entry is finite and only their sum of squares is not: name the largest.
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return f"{largest} (largest gradient)"


Verdict = Literal["learned", "stalled near chance", "too few validation images to tell", "diverged"]

CONFIDENCE = 0.998
"""Two-sided; the lower end alone holds with 99.9 %."""
MARGIN = 0.1
"""The part of the way from chance to a perfect score that counts as having learned."""


def chance_accuracy(class_counts: Sequence[int]) -> float:
    """The best accuracy without looking: always the commonest class."""
    return max(class_counts) / sum(class_counts)


def judge(correct: int, class_counts: Sequence[int]) -> Verdict:
    """`learned` if the accuracy's interval is above the bar: chance plus MARGIN of the way to one.

    Where the accuracy is above the bar and its interval is not, there are too few images to tell
    if the interval also reaches what is clearly learned, twice the margin.
    """
    total, chance = sum(class_counts), chance_accuracy(class_counts)
    bar, clear = (chance + times * MARGIN * (1 - chance) for times in (1, 2))
    low, high = wilson(correct, total, CONFIDENCE)
    if low > bar:
        return "learned"
    if correct / total > bar and high > clear:
        return "too few validation images to tell"
    return "stalled near chance"
