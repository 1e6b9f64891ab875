"""vitcli: questions about Vision Transformer encoders, from Python and from the command line.

`load` gives a `Model`; every other function answers one question, as the command of its name
does, with a result that prints as tables, plots with `figure()` and is data by `to_dict()`.
Names are imported when first used, so that `import vitcli` loads no torch.
"""

from __future__ import annotations

import sys

# `python -m vitcli` puts the current folder first: a typing.py in there would be imported below.
# While -m looks for the program, and only then, argv[0] is "-m".
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and "-m" in sys.orig_argv
    and sys.orig_argv[sys.orig_argv.index("-m") + 1] == "vitcli"
):
    del sys.path[0]

import importlib
from typing import TYPE_CHECKING, Any

from vitcli.errors import VitcliError

if TYPE_CHECKING:
    from vitcli.commands.attention.analysis import attn_entropy
    from vitcli.commands.catalog.analysis import families, presets
    from vitcli.commands.compare.analysis import compare
    from vitcli.commands.compare.verify import verify
    from vitcli.commands.embed.analysis import embed
    from vitcli.commands.encode.analysis import encode
    from vitcli.commands.explore.analysis import explore
    from vitcli.commands.explore.grid import grid
    from vitcli.commands.export.analysis import convert, export
    from vitcli.commands.neighbors.analysis import neighbors
    from vitcli.commands.params.analysis import params
    from vitcli.commands.probe.analysis import probe
    from vitcli.commands.profile.analysis import profile
    from vitcli.commands.sweep.analysis import sweep
    from vitcli.commands.train.analysis import train, train_shapes
    from vitcli.images.synthetic import shapes
    from vitcli.loading import load
    from vitcli.model import Features, Model
    from vitcli.results import Result

__version__ = "0.1.0"

FUNCTIONS = {
    "load": "loading:load",
    "Model": "model:Model",
    "Features": "model:Features",
    "Result": "results:Result",
    "encode": "commands.encode.analysis:encode",
    "embed": "commands.embed.analysis:embed",
    "neighbors": "commands.neighbors.analysis:neighbors",
    "probe": "commands.probe.analysis:probe",
    "params": "commands.params.analysis:params",
    "profile": "commands.profile.analysis:profile",
    "attn_entropy": "commands.attention.analysis:attn_entropy",
    "compare": "commands.compare.analysis:compare",
    "verify": "commands.compare.verify:verify",
    "explore": "commands.explore.analysis:explore",
    "grid": "commands.explore.grid:grid",
    "train": "commands.train.analysis:train",
    "train_shapes": "commands.train.analysis:train_shapes",
    "sweep": "commands.sweep.analysis:sweep",
    "export": "commands.export.analysis:export",
    "convert": "commands.export.analysis:convert",
    "shapes": "images.synthetic:shapes",
    "presets": "commands.catalog.analysis:presets",
    "families": "commands.catalog.analysis:families",
}
"""Every public name and where it is, MODULE:NAME below this package."""

__all__ = [  # noqa: RUF022 (as in FUNCTIONS)
    "VitcliError",
    "__version__",
    "load",
    "Model",
    "Features",
    "Result",
    "encode",
    "embed",
    "neighbors",
    "probe",
    "params",
    "profile",
    "attn_entropy",
    "compare",
    "verify",
    "explore",
    "grid",
    "train",
    "train_shapes",
    "sweep",
    "export",
    "convert",
    "shapes",
    "presets",
    "families",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module 'vitcli' has no attribute {name!r}")
    module, _, attribute = FUNCTIONS[name].partition(":")
    found = getattr(importlib.import_module(f"vitcli.{module}"), attribute)
    globals()[name] = found
    return found
