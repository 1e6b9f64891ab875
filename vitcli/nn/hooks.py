"""Observe values inside an encoder by hooks that attach, reduce and detach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitcli.errors import VitcliError
from vitcli.nn.attention import (
    ChannelAttention,
    ExplicitAttention,
    FusedAttention,
    MultiHeadSelfAttention,
)
from vitcli.nn.encoder import VisionEncoder

Observer = Callable[[Tensor], None]


@contextmanager
def tapped(points: Iterable[tuple[nn.Module, Observer]]) -> Iterator[None]:
    """Call each observer with each output of its module; keep only what the observer keeps."""
    with ExitStack() as stack:
        for module, observe in points:

            def hook(_: nn.Module, __: Any, output: Tensor, observe: Observer = observe) -> None:
                observe(output.detach())

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def layer_points(encoder: VisionEncoder) -> list[tuple[str, nn.Module]]:
    """The input of the first block, every block, and the final norm where there is one."""
    blocks = [(f"block {i}", block) for i, block in enumerate(encoder.vit.blocks, start=1)]
    norm = encoder.vit.norm
    last = [] if isinstance(norm, nn.Identity) else [("norm", norm)]
    return [("input", encoder.front_end), *blocks, *last]


def attentions(encoder: VisionEncoder) -> list[MultiHeadSelfAttention]:
    """The attention of each block, in order."""
    return [m for m in encoder.vit.modules() if isinstance(m, MultiHeadSelfAttention)]


class HeadByHead(nn.Module):
    """Explicit attention one head after another, so that only (B, 1, N, N) exists at a time."""

    def __init__(self, attend: ExplicitAttention) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, H, N, d) each -> (B, H, N, d); mask (.., N, N), boolean or additive."""
        heads = q.shape[1]
        per_head = mask is not None and mask.ndim > 2 and mask.shape[-3] == heads > 1
        out = torch.empty_like(q)
        for head in range(heads):
            one = slice(head, head + 1)
            own = mask[..., one, :, :] if mask is not None and per_head else mask
            out[:, one] = self.attend(q[:, one], k[:, one], v[:, one], own)
        return out


@contextmanager
def explicit_attention(
    encoder: VisionEncoder, *, head_by_head: bool = False
) -> Iterator[list[nn.Module]]:
    """Attend by the explicit path inside the context.

    Yields the module of each block whose output is the (B, H, N, N) probabilities, to be tapped;
    with `head_by_head` it is called H times per forward with (B, 1, N, N), the first head first.

    Raises:
        VitcliError: an encoder that attends over channels.
    """
    modules = attentions(encoder)
    before = [module.attend for module in modules]
    if any(isinstance(attend, ChannelAttention) for attend in before):
        raise VitcliError(
            "attention: the blocks attend over channels, so no token has weights on others",
            "use an encoder with attention.over: tokens",
        )
    try:
        explicit: list[nn.Module] = []
        for module in modules:
            rate = module.attend.dropout if isinstance(module.attend, FusedAttention) else 0.0
            attend = ExplicitAttention(rate)
            attend.train(module.training)
            module.attend = HeadByHead(attend) if head_by_head else attend
            explicit.append(attend.probabilities)
        yield explicit
    finally:
        for module, attend_before in zip(modules, before, strict=True):
            module.attend = attend_before
