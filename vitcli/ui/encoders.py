"""Options of the commands that set several encoders side by side."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from vitcli.config.load import preset_names
from vitcli.config.request import ModelRequest
from vitcli.errors import VitcliError
from vitcli.ui.options import SharedModelOptions, model_option, registers_setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcesOptions:
    """The options that name several encoders: each preset, config and source is one of its own."""

    preset: Annotated[
        list[str] | None,
        model_option("--preset", metavar="NAME", help="A known encoder. Repeatable."),
    ] = None
    config: Annotated[
        list[Path] | None,
        model_option("--config", metavar="FILE", help="A YAML config. Repeatable."),
    ] = None
    weights: Annotated[
        list[str] | None,
        model_option(
            "--weights",
            metavar="[PRESET=]SOURCE",
            help="Checkpoint file, directory or hub owner/name; a bare state dict may need its "
            "preset before it. Repeatable.",
        ),
    ] = None
    registers: Annotated[
        str | None,
        model_option(
            "--registers", metavar="N[,M...]", help="Each encoder with each number of registers."
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodersOptions(SharedModelOptions, SourcesOptions):
    """Several encoders; the last base's options come first in the help."""

    def to_requests(self) -> list[ModelRequest]:
        """Presets, then configs, then sources, each in the order given."""
        counts = parse_counts(self.registers)
        if self.weights and counts:
            raise VitcliError(
                "--registers: a checkpoint has the registers it was trained with",
                "compare fresh encoders by --preset or --config",
            )
        fresh: list[dict[str, Any]] = [
            *({"preset": name} for name in self.preset or []),
            *({"config_file": file} for file in self.config or []),
        ]
        if not fresh and not self.weights:
            fresh = [{}]
        variants: Sequence[tuple[Any, ...]] = (
            [(registers_setting(count),) for count in counts] if counts else [()]
        )
        return [
            *(
                self.request(**which, settings=settings)
                for which, settings in itertools.product(fresh, variants)
            ),
            *(self.request(**split_source(text)) for text in self.weights or []),
        ]


def parse_counts(text: str | None) -> list[int]:
    """`0,4` as numbers, each once.

    Raises:
        VitcliError: not whole numbers.
    """
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise VitcliError(f"--registers {text}: expected whole numbers", "for example 0,4")
    return list(dict.fromkeys(int(part) for part in parts))


def split_source(text: str) -> dict[str, str]:
    """`SOURCE` or `PRESET=SOURCE` as the fields of a request."""
    preset, equals, source = text.partition("=")
    if equals and preset in preset_names():
        return {"preset": preset, "weights": source}
    return {"weights": text}
