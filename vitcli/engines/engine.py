"""One way to run an encoder, ready for its first images."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitcli.core.encoder import EncoderOutput, VisionEncoder
from vitcli.engines import ENGINES
from vitcli.engines.onednn import restore
from vitcli.errors import VitcliError

Run = Callable[[Tensor], EncoderOutput]


@dataclass(frozen=True)
class Engine:
    name: str
    run: Run
    """(B, C, height, width) -> EncoderOutput, without gradients."""
    version: str
    prepare_s: float = 0.0
    """What compiling or exporting took."""
    note: str = ""


def prepare_engine(name: str, encoder: VisionEncoder, images: Tensor) -> Engine:
    """An engine for images of this height, width, dtype and device, and any number of them.

    The encoder is in eval mode; its parameters must not change afterwards.

    Raises:
        VitcliError: an unknown engine, one that is not installed, or one that cannot run this.
    """
    if name not in ENGINES:
        raise VitcliError(f"--engine {name}: unknown", "one of " + ", ".join(ENGINES))
    module = {"eager": "eager", "compile": "compiled", "onnx": "onnx"}[name]
    prepare = importlib.import_module(f"vitcli.engines.{module}").prepare
    return cast(Engine, prepare(encoder, images))


def plain_copy(encoder: VisionEncoder) -> VisionEncoder:
    """The same encoder, sharing parameters, as a compiler or an exporter should see it."""
    shared = {id(parameter): parameter for parameter in encoder.parameters()}
    return restore(copy.deepcopy(encoder, shared))


def outputs(result: EncoderOutput) -> dict[str, Tensor]:
    """The tensors that an encoder gives, by name, without those it has not."""
    return {name: value for name, value in result._asdict().items() if value is not None}


@torch.inference_mode()
def largest_error(engine: Engine, encoder: VisionEncoder, images: Tensor) -> float:
    """Largest absolute difference of any output to the encoder's own, by torch's operators."""
    ours = outputs(engine.run(images))
    reference = outputs(plain_copy(encoder)(images))
    return max((ours[name] - value).abs().max().item() for name, value in reference.items())
