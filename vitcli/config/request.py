"""Which model a command is asked about, before anything heavy is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitcli.config.load import Setting, for_input_size, load_config
from vitcli.config.schema import EncoderConfig, ModelConfig
from vitcli.config.variants import POSITIONS
from vitcli.errors import VitcliError

NAME_A_PRESET = "--preset NAME (NAME=SOURCE where encoders are compared)"
"""The way out of weights that do not tell everything; commands on several encoders pair the two."""
COPIES = ("ema", "raw")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_device(name: str) -> None:
    """Refuse what is no device anywhere; `vitcli.model.pick_device` knows what is here."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", name):
        raise VitcliError(f"--device {name}: unknown", "auto, cpu, cuda, cuda:1 or mps")


def check_table_rule(settings: Sequence[Setting], encoder: EncoderConfig) -> None:
    """Refuse a rule for resizing the position table where there is none.

    Raises:
        VitcliError: with the option that asks for it.
    """
    for setting in settings:
        if setting.path == ("encoder", "position_table", "resize") and not (
            POSITIONS[encoder.position].resizes
        ):
            raise VitcliError(
                f"{setting.source}: there is no position table, the positions are "
                f"{encoder.position}",
                "leave it out",
            )


def layer_index(layer: int, depth: int, named: str = "--layer") -> int:
    """A layer as everything here counts them, 0 to `depth`.

    0 is the input of the first block, i the output of block i, -1 the last, as in transformers'
    `hidden_states`.

    Raises:
        VitcliError: the encoder does not have it; `named` is how the error calls the setting.
    """
    if not -depth - 1 <= layer <= depth:
        raise VitcliError(
            f"{named} {layer}: this encoder does not have this layer (got {layer}, expected 0 to "
            f"{depth}, or -1 for the last)",
            f"{named} {depth}",
        )
    return layer % (depth + 1)


@dataclass(frozen=True)
class ModelRequest:
    """One encoder as the command line names it.

    `weights` is a file, a directory or a hub id; without it the weights are fresh, drawn from
    `seed`. `image_size` is (height, width) in pixels.

    Raises:
        VitcliError: an unknown device or dtype, a seed out of range.
    """

    preset: str | None = None
    config_file: Path | None = None
    settings: tuple[Setting, ...] = ()
    weights: str | None = None
    adapter: str | None = None
    """A file of low-rank adapters, added into the weights."""
    which: str | None = None
    """`ema` or `raw`, where the checkpoint has an averaged copy of its weights."""
    prefix: str | None = None
    """What stands before the vision tower's tensor names, where it is not found by itself."""
    seed: int = 0
    image_size: tuple[int, int] | None = None
    device: str = "auto"
    dtype: str = "float32"
    engine: str | None = None
    """One of `vitcli.engines.ENGINES`, auto, or None for the fastest without preparation."""

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.dtype not in DTYPES:
            raise VitcliError(f"--dtype {self.dtype}: unknown", "one of " + ", ".join(DTYPES))
        if self.which not in (None, *COPIES):
            raise VitcliError(f"--which {self.which}: unknown", "--which " + "|".join(COPIES))
        for option, value in (("--which", self.which), ("--prefix", self.prefix)):
            if value is not None and self.weights is None:
                raise VitcliError(f"{option} {value}: is about a checkpoint", "--weights SOURCE")
        if not 0 <= self.seed < 2**63:
            raise VitcliError(f"--seed {self.seed}: out of range", "a number from 0 to 2^63 - 1")

    def fresh_config(self) -> ModelConfig:
        """The config of a model without weights; `image_size` is what it reads, not its table's."""
        config = load_config(ModelConfig, self.preset, self.config_file, self.settings)
        return for_input_size(config, self.image_size) if self.image_size else config
