"""The encoder as compilers and exporters take it: one tensor in, a flat tuple of tensors out."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitcli.engines.onednn import restore
from vitcli.nn.encoder import EncoderOutput, VisionEncoder
from vitcli.nn.hooks import layer_points


def plain_copy(encoder: VisionEncoder) -> VisionEncoder:
    """The same encoder, sharing parameters, without what `accelerate` put in place."""
    shared = {id(parameter): parameter for parameter in encoder.parameters()}
    return restore(copy.deepcopy(encoder, shared)).eval()


class Graph(nn.Module):
    """What an encoder answers, without what it has not, then (on request) every layer's tokens.

    `names` says what each output is: a field of EncoderOutput, or `layer_0`, `layer_1` and so on
    in the order of `layer_points`.
    """

    def __init__(self, encoder: VisionEncoder, images: Tensor, layers: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self._seen: list[Tensor] = []
        with torch.no_grad():
            answer: EncoderOutput = encoder(images)
        self.fields = [name for name, value in answer._asdict().items() if value is not None]
        points = layer_points(encoder) if layers else []
        for _, module in points:
            module.register_forward_hook(self._see)
        self.names = [*self.fields, *(f"layer_{i}" for i in range(len(points)))]

    def _see(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._seen.append(output)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        self._seen = []
        answer = self.encoder(images)
        present = [value for value in answer if value is not None]
        outputs = (*present, *self._seen)
        self._seen = []
        return outputs

    def read(self, outputs: Sequence[Tensor]) -> tuple[EncoderOutput, list[Tensor]]:
        """The encoder's answer and the layers' tokens, from the graph's outputs."""
        empty = dict.fromkeys(EncoderOutput._fields)
        present = dict(zip(self.fields, outputs, strict=False))
        return EncoderOutput(**(empty | present)), list(outputs[len(self.fields) :])  # type: ignore[arg-type]
