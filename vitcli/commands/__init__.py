"""A folder per question: options, what computes the answer, the answer, and how it is shown."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

COMMANDS = {
    "encode": "encode.command:encode",
    "embed": "embed.command:embed",
    "neighbors": "neighbors.command:neighbors",
    "probe": "probe.command:probe",
    "params": "params.command:params",
    "profile": "profile.command:profile",
    "export": "export.command:export",
    "attn-entropy": "attention.command:attn_entropy",
    "compare": "compare.command:compare",
    "verify": "compare.command:verify",
    "explore": "explore.command:explore",
    "grid": "explore.command:grid",
    "train": "train.command:train",
    "train-shapes": "train.command:train_shapes",
    "sweep": "sweep.command:sweep",
    "presets": "catalog.command:presets",
    "families": "catalog.command:families",
    "convert": "export.command:convert",
}
"""Every command by name, in the order of the help: MODULE:FUNCTION below this package."""

ALIASES = {"neighbours": "neighbors"}
"""Names that commands had before; they work and are not shown."""


def command_function(name: str) -> Callable[..., Any]:
    """The function whose parameters are the command's arguments and options."""
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return found
