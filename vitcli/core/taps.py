"""Observe values inside an encoder: hooks on, reduce, hooks off. The core knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from vitcli.core.attention import ExplicitAttention, FusedAttention, MultiHeadSelfAttention
from vitcli.core.encoder import VisionEncoder

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


@contextmanager
def explicit_attention(encoder: VisionEncoder) -> Iterator[list[nn.Module]]:
    """Attend by the explicit path inside the context.

    Yields the module of each block whose output is the (B, H, N, N) probabilities, to be tapped.
    """
    modules = attentions(encoder)
    before = [module.attend for module in modules]
    try:
        explicit: list[nn.Module] = []
        for module in modules:
            rate = module.attend.dropout if isinstance(module.attend, FusedAttention) else 0.0
            attend = ExplicitAttention(rate)
            attend.train(module.training)
            module.attend = attend
            explicit.append(attend.probabilities)
        yield explicit
    finally:
        for module, attend_before in zip(modules, before, strict=True):
            module.attend = attend_before
