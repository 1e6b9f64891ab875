"""Plain torch, with the CPU's faster matrix multiply where torch has two."""

from __future__ import annotations

import torch
from torch import Tensor

from vitcli.core.encoder import EncoderOutput, VisionEncoder
from vitcli.engines.engine import Engine
from vitcli.engines.onednn import accelerate, onednn_linear


def prepare(encoder: VisionEncoder, images: Tensor) -> Engine:
    """The encoder itself, accelerated in place; its hooks keep firing."""
    accelerate(encoder)

    @torch.inference_mode()
    def run(batch: Tensor) -> EncoderOutput:
        output: EncoderOutput = encoder(batch)
        return output

    with torch.inference_mode():
        fast = onednn_linear.applies(images.device, images.dtype)
    note = "float32 linear maps by oneDNN" if fast else ""
    return Engine("eager", run, torch.__version__, note=note)
