"""An engine for images of any size: prepared when a size is first seen."""

from __future__ import annotations

from torch import Tensor

from vitcli.engines.engine import Engine, prepare_engine
from vitcli.nn.encoder import EncoderOutput, VisionEncoder


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
