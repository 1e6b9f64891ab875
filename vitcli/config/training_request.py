"""Which run a training command is asked for, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vitcli.config.load import Setting, load_config
from vitcli.config.request import ModelRequest, check_device, check_table_rule
from vitcli.config.schema import ModelConfig
from vitcli.config.training import ImagesRun, ShapesRun
from vitcli.config.yaml import Document, read_yaml
from vitcli.errors import VitcliError

HEADS = ("heads",)
Run = TypeVar("Run", ShapesRun, ImagesRun)


@dataclass(frozen=True)
class TrainRequest:
    """A run as the command line names it.

    `model` is the preset, file and weights to start from; `settings` are all that was set.
    """

    model: ModelRequest = field(default_factory=ModelRequest)
    settings: tuple[Setting, ...] = ()
    device: str = "auto"
    out: Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        check_device(self.device)

    @property
    def resumed_config(self) -> Path | None:
        """The config of the run to go on with, if the command names no other start."""
        named = self.model.preset or self.model.config_file or self.model.weights
        if not self.resume or self.out is None or named:
            return None
        file = self.out / "config.yaml"
        return file if file.exists() else None

    def run_config(
        self, schema: type[Run], recipe: Mapping[str, Any], source: ModelConfig | None = None
    ) -> Run:
        """The run's config: a run to resume, or the recipe, under preset, file and settings.

        `source` is the config that belongs to the weights to start from.

        Raises:
            VitcliError: as `load_config`; settings of adapters without a head to adapt.
        """
        if self.resumed_config:
            start = read_yaml(self.resumed_config)
        elif source:
            model = source.model_dump(mode="python")
            rest = {key: value for key, value in recipe.items() if key in ("data", "train")}
            start = Document(f"the config of {self.model.weights}", {**rest, **model})
        else:
            start = Document("the default recipe", dict(recipe))
        preset = None if source else self.model.preset
        config = load_config(schema, preset, self.model.config_file, self.settings, start)
        check_table_rule(self.settings, config.encoder)
        lone = [s for s in self.settings if s.path[:2] == ("train", "lora") and s.path[2:] != HEADS]
        if lone and not config.train.lora.heads:
            raise VitcliError(f"{lone[0].source}: there is no adapter", "--lora LAYER:HEAD")
        return config
