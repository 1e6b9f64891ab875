"""The faster of the two matrix multiplies that torch has on a CPU.

For float32 on x86 `F.linear` calls MKL; oneDNN, which torch carries as well, multiplies the shapes
of a ViT 1.2 to 1.4 times as fast on AMD processors, and applies a GELU on the way out.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.nn.block import FeedForward

Module = TypeVar("Module", bound=nn.Module)
LinearOperator = Callable[[Tensor, Tensor, Tensor | None, str, list[float], str], Tensor]


def _operator() -> LinearOperator | None:
    """torch's oneDNN linear with a pointwise function on its output, if this build has it."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if not (x86 and torch.backends.mkldnn.is_available()):
        return None
    try:
        found: LinearOperator = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None
    return found


class OneDnnLinear:
    """x W^T + b by oneDNN, with or without GELU; inference in float32 on the CPU."""

    def __init__(self) -> None:
        self.operator = _operator()

    def applies(self, device: torch.device, dtype: torch.dtype) -> bool:
        return (
            self.operator is not None
            and device.type == "cpu"
            and dtype == torch.float32
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and bool(torch.backends.mkldnn.enabled)
        )

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None = None
    ) -> Tensor:
        """`gelu` is `nn.GELU`'s `approximate`, or None for no GELU."""
        assert self.operator is not None
        pointwise, how = ("none", "") if gelu is None else ("gelu", gelu)
        return self.operator(x, weight, bias, pointwise, [], how)


onednn_linear = OneDnnLinear()


def _linear_forward(self: nn.Linear, x: Tensor) -> Tensor:
    if onednn_linear.applies(x.device, x.dtype):
        return onednn_linear(x, self.weight, self.bias)
    return F.linear(x, self.weight, self.bias)


def _feed_forward_forward(self: FeedForward, x: Tensor) -> Tensor:
    watched = self.fc1._forward_hooks or self.activation._forward_hooks or self.training
    if watched or not onednn_linear.applies(x.device, x.dtype):
        return FeedForward.forward(self, x)
    assert isinstance(self.activation, nn.GELU)
    inner = onednn_linear(x, self.fc1.weight, self.fc1.bias, self.activation.approximate)
    y: Tensor = self.fc2(inner)  # (B, N, D)
    return y


def accelerate(encoder: Module) -> Module:
    """Let the encoder's linear maps use oneDNN wherever that applies; the encoder itself.

    Training, other devices and other dtypes run as before, and so does everything where this
    build of torch has no oneDNN. `restore` takes it back.
    """
    if onednn_linear.operator is None:
        return encoder
    for module in encoder.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear_forward, module)  # type: ignore[method-assign]
        elif type(module) is FeedForward and type(module.activation) is nn.GELU:
            module.forward = partial(_feed_forward_forward, module)  # type: ignore[method-assign]
    return encoder


def restore(encoder: Module) -> Module:
    """Undo `accelerate`: what a compiler or an exporter should see; the encoder itself."""
    for module in encoder.modules():
        vars(module).pop("forward", None)
    return encoder
