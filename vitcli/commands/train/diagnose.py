"""Where a run that blew up first went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def _watched(model: nn.Module, bad: list[str]) -> Iterator[None]:
    """Notes the modules whose output is not finite, in the order they finish."""
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: object, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not all(is_finite(p) for p in parts if isinstance(p, Tensor)):
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


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


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
            if not is_finite(p)
        ]
        return wrong[0] if wrong else f"{bad[0]} (output)"
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not is_finite(gradient)]
    if broken:
        return f"{broken[-1]} (gradient)"
    if not gradients:
        return None
    # Every entry is finite and only their sum of squares is not: name the largest.
    largest = max(gradients, key=lambda name: float(gradients[name].abs().max()))
    return f"{largest} (largest gradient)"
