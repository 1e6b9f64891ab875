"""One way to run an encoder, ready for its first images."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitcli.engines import ENGINES
from vitcli.engines.graph import plain_copy
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, VisionEncoder


@dataclass(frozen=True)
class Engine:
    name: str
    run_layers: Callable[[Tensor], tuple[EncoderOutput, list[Tensor]]]
    """Images (B, C, height, width) to the encoder's answer and, where the engine was prepared for
    it, the (B, P+N, D) tokens at each of `layer_points`; without gradients."""
    version: str
    prepare_s: float = 0.0
    """What compiling or exporting took."""
    note: str = ""

    def run(self, images: Tensor) -> EncoderOutput:
        return self.run_layers(images)[0]


def prepare_engine(
    name: str,
    encoder: VisionEncoder,
    images: Tensor,
    *,
    layers: bool = False,
    batches: Collection[int] = (1,),
) -> Engine:
    """An engine for images of this height, width, dtype and device, in batches of any size.

    The encoder is in eval mode, and its parameters must not change afterwards.

    Args:
        images: an example, of any batch size.
        layers: give every layer's tokens too.
        batches: sizes to be ready for; others may compile once more when they come.

    Raises:
        VitcliError: an unknown engine, one that is not installed, or one that cannot run this.
    """
    if name not in ENGINES:
        raise VitcliError(f"--engine {name}: unknown", "one of " + ", ".join(ENGINES))
    module = {"eager": "eager", "compile": "compiled", "onnx": "onnx_runtime"}[name]
    prepare = importlib.import_module(f"vitcli.engines.{module}").prepare
    return cast(Engine, prepare(encoder, images, layers, batches))


@torch.no_grad()
def largest_error(engine: Engine, encoder: VisionEncoder, images: Tensor) -> float:
    """Largest difference of any output to the encoder's own by plain torch.

    Absolute where the output's largest value is below 1, relative to that value above.
    """
    reference: EncoderOutput = plain_copy(encoder)(images)
    pairs = zip(engine.run(images), reference, strict=True)
    return max(
        ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()
        for ours, theirs in pairs
        if ours is not None and theirs is not None
    )


class Runner:
    """Runs images through one engine, which gives every layer's tokens too."""

    def __init__(self, name: str, encoder: VisionEncoder) -> None:
        self.name = name
        self.encoder = encoder
        self._engines: dict[tuple[int, ...], Engine] = {}

    def __call__(self, images: Tensor) -> tuple[EncoderOutput, list[Tensor]]:
        """(B, C, height, width) to the encoder's answer and the tokens at `layer_points`.

        Raises:
            VitcliError: an engine that is not installed or cannot run this encoder.
        """
        size = tuple(images.shape[1:])
        if size not in self._engines:
            self._engines[size] = prepare_engine(
                self.name, self.encoder, images, layers=True, batches=(images.shape[0],)
            )
        return self._engines[size].run_layers(images)
