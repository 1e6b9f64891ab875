"""Random references, our outputs beside theirs, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitcli.nn.encoder import VisionEncoder, hooked, layer_points

EXACT = 1e-12
"""Families whose reference computes everything in float64."""
FLOAT32_PARTS = 1e-6
"""Families whose reference computes RoPE, RMSNorm or the table's resize in float32."""


@dataclass
class Outputs:
    """What both sides give for one batch; None where one of them has no such thing."""

    blocks: list[Tensor] = field(default_factory=list)
    """The input of the first block, then the output of each."""
    before_norm: Tensor | None = None
    tokens: Tensor | None = None
    pooled: Tensor | None = None
    output: Tensor | None = None
    deepstack: Tensor | None = None


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter drawn anew, in float64 and eval mode: constants hide bugs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(value * 0.3)
    return model.double().eval()


def images(height: int, width: int, seed: int = 1, batch: int = 2) -> Tensor:
    """Small values, so that the eps of the first norm is seen."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64)
    return noise * 0.05


@torch.no_grad()
def ours(encoder: VisionEncoder, pixels: Tensor) -> Outputs:
    blocks: list[Tensor] = []
    points = [p for p in layer_points(encoder) if p[0] != "norm"]
    with hooked([(module, blocks.append) for _, module in points]):
        out = encoder(pixels)
    return Outputs(blocks, *(out[i] for i in (1, 0, 2, 3, 4)))


def differences(theirs: Outputs, mine: Outputs) -> dict[str, float]:
    """The largest difference of each output, relative to the largest value of the reference."""
    found = {}
    for name in ("before_norm", "tokens", "pooled", "output", "deepstack"):
        reference, value = getattr(theirs, name), getattr(mine, name)
        if reference is not None:
            assert value is not None, f"we have no {name}"
            found[name] = _relative(reference, value)
    for index, reference in enumerate(theirs.blocks):
        found[f"block {index}"] = _relative(reference, mine.blocks[index])
    return found


def _relative(reference: Tensor, value: Tensor) -> float:
    assert reference.shape == value.shape, (tuple(reference.shape), tuple(value.shape))
    return float((reference - value).abs().max() / reference.abs().max())


def assert_close(theirs: Outputs, mine: Outputs, tolerance: float) -> None:
    apart: Mapping[str, float] = differences(theirs, mine)
    assert apart, "nothing was compared"
    assert max(apart.values()) <= tolerance, apart
