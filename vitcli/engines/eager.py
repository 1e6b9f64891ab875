"""Plain torch, with the CPU's faster matrix multiply where torch has two."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from vitcli.engines.engine import Engine
from vitcli.engines.onednn import accelerate, onednn_linear
from vitcli.nn.encoder import EncoderOutput, VisionEncoder
from vitcli.nn.hooks import layer_points, tapped


def prepare(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """The encoder itself, accelerated in place; its hooks keep firing."""
    accelerate(encoder)
    points = [module for _, module in layer_points(encoder)] if layers else []

    @torch.inference_mode()
    def run(images: Tensor) -> tuple[EncoderOutput, list[Tensor]]:
        seen: list[Tensor] = []
        with tapped((module, seen.append) for module in points):
            output: EncoderOutput = encoder(images)
        return output, seen

    with torch.inference_mode():
        fast = onednn_linear.applies(images.device, images.dtype)
    note = "float32 linear maps by oneDNN" if fast else ""
    return Engine("eager", run, torch.__version__, note=note)
