"""The encoder as an ONNX file: one image input of any batch, named outputs."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from vitcli.engines import OPSET
from vitcli.engines.graph import Graph, plain_copy
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder

INPUT = "images"
LARGEST_SINGLE_FILE = 2**31 - 2**24
"""A protobuf file ends at 2 GiB: above this, weights go to a file beside it."""


def require(*modules: str) -> list[ModuleType]:
    """The modules of the extra `onnx`.

    Raises:
        VitcliError: one of them is not installed.
    """
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise VitcliError(
            f"ONNX needs {error.name}, which is not installed", 'pip install "vitcli[onnx]"'
        ) from error


def build_graph(encoder: VisionEncoder, images: Tensor, layers: bool = False) -> Graph:
    """What `write_onnx` writes; `images` is an example of the input."""
    return Graph(plain_copy(encoder), images, layers)


def write_onnx(graph: Graph, images: Tensor, path: Path, opset: int = OPSET) -> list[Path]:
    """Write a graph whose batch is free and whose height and width are those of `images`.

    Returns the files written: `path`, and `path` + `.data` with the weights where all together
    would pass protobuf's 2 GiB. Files take their places when they are whole.

    Raises:
        VitcliError: the extra `onnx` is missing, or torch cannot export this encoder.
    """
    require("onnx", "onnxscript")
    pair = images[:1].expand(2, -1, -1, -1).contiguous()  # a batch of 1 would be taken as fixed
    try:
        with _quiet():
            program = torch.onnx.export(
                graph,
                (pair,),
                input_names=[INPUT],
                output_names=graph.names,
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:  # the exporter raises its own and torch's many errors
        reason = str(error).strip().splitlines()
        raise VitcliError(
            f"cannot export: {type(error).__name__}: {reason[0] if reason else ''}",
            "another --opset, or --engine compile",
            exit_code=1,
        ) from error
    assert program is not None
    size = sum(p.numel() * p.element_size() for p in graph.parameters())
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=size > LARGEST_SINGLE_FILE)
        files = sorted(Path(folder).iterdir(), reverse=True)  # the data before what refers to it
        for file in files:
            os.replace(file, path.parent / file.name)  # noqa: PTH105 (one call for both platforms)
    return sorted(path.parent / file.name for file in files)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's running commentary."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
