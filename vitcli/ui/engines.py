"""The option that names an engine."""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli.engines import ENGINES
from vitcli.errors import VitcliError

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="What runs the encoder: plain torch, torch.compile, ONNX Runtime (extra onnx).",
    ),
]


def known_engine(name: str) -> str:
    """The name itself.

    Raises:
        VitcliError: no such engine.
    """
    if name not in ENGINES:
        raise VitcliError(f"--engine {name}: unknown", "one of " + ", ".join(ENGINES))
    return name
