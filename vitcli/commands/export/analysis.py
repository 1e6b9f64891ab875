"""Write an encoder as an ONNX graph checked against eager, or as vitcli's own checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from vitcli.checkpoints.weights import WEIGHTS_FILE, save_snapshot
from vitcli.commands.profile.measure import random_images
from vitcli.engines import OPSET, OPSETS
from vitcli.engines.engine import Engine, largest_error
from vitcli.engines.onnx_graph import build_graph, open_session, require, write_onnx
from vitcli.errors import VitcliError
from vitcli.files import check_output, sha256
from vitcli.loading import as_model
from vitcli.model import Model, model_info
from vitcli.results import LoadReport, ModelInfo, Result
from vitcli.stats import largest


@dataclass(frozen=True)
class ExportedFile:
    path: str
    bytes: int


@dataclass(frozen=True)
class ExportedTensor:
    name: str
    shape: tuple[int | str, ...]
    """Sizes; a name for an axis of any size."""


@dataclass(frozen=True)
class ExportResult(Result):
    """The result of `vitcli export`: the graph that was written and checked."""

    rows_at: ClassVar[str] = "files"

    model: ModelInfo
    files: tuple[ExportedFile, ...]
    opset: int
    inputs: tuple[ExportedTensor, ...]
    outputs: tuple[ExportedTensor, ...]
    max_error: float
    """Largest difference to eager, relative to an output's largest value where that is above 1."""
    tolerance: float
    checked_batches: tuple[int, ...]
    versions: dict[str, str]
    classes: tuple[str, ...] = ()
    """What the outputs mean: a JSON list under `classes` in the graph's metadata."""


@dataclass(frozen=True)
class ConvertResult(Result):
    """The result of `vitcli convert`."""

    view_prefix: ClassVar[str] = "convert_"

    folder: str
    parameters: int
    bytes: int
    sha256: str
    """Of model.safetensors."""
    checkpoint: LoadReport


TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 2)


def export(
    model: Model | str | os.PathLike[str], path: str | os.PathLike[str], *, opset: int = OPSET
) -> ExportResult:
    """Write an encoder as an ONNX graph at its input size, for any batch size.

    The graph is compared with plain torch before PATH is replaced. The names of a classifier's
    outputs are in its metadata, as a JSON list under `classes`.

    Args:
        model: a `Model` in float32 on the CPU, or what `vitcli.load` takes.
        path: an .onnx file; weights above 2 GiB go to PATH.data beside it.
        opset: ONNX operator set, one of `vitcli.engines.OPSETS`.

    Raises:
        VitcliError: a path that cannot be written, another dtype or opset, a missing extra
            `onnx`, an encoder that cannot be exported, or outputs that differ by more than
            TOLERANCE or are not finite.
    """
    path = Path(path)
    check_output(path, ".onnx")
    if opset not in OPSETS:
        raise VitcliError(
            f"--opset {opset}: cannot be written (got {opset}, expected {OPSETS[0]} to "
            f"{OPSETS[-1]})",
            f"--opset {OPSET}",
        )
    model = as_model(model)
    if model.dtype != torch.float32 or model.device.type != "cpu":
        raise VitcliError(
            f"export: a graph is written in float32 on the CPU (got {model.dtype_name} on "
            f"{model.device})",
            "--dtype float32 --device cpu",
        )
    onnx, runtime = require("onnx", "onnxruntime")
    images = random_images(model, max(CHECKED_BATCHES))
    graph = build_graph(model.encoder, images)
    errors: list[float] = []

    def check(written: Path) -> None:
        session = open_session(written, graph.names, images)
        engine = Engine("onnx", lambda images: graph.read(session(images)), runtime.__version__)
        errors.extend(largest_error(engine, model.encoder, images[:n]) for n in CHECKED_BATCHES)
        if not largest(errors) <= TOLERANCE:
            raise VitcliError(
                f"{path}: the graph differs from torch (largest difference {largest(errors):.1e}, "
                f"expected at most {TOLERANCE:.0e}); nothing was written",
                f"--opset {OPSET}" if opset != OPSET else "check the weights with `vitcli encode`",
                exit_code=1,
            )

    names = model.config.classes or ()
    metadata = {"classes": json.dumps(names)} if names else {}
    files = write_onnx(graph, images, path, opset, check, metadata)
    written = onnx.load(str(path), load_external_data=False)
    return ExportResult(
        model=model_info(model),
        files=tuple(ExportedFile(str(file), file.stat().st_size) for file in files),
        opset=next(item.version for item in written.opset_import if item.domain in ("", "ai.onnx")),
        inputs=tuple(map(_tensor, written.graph.input)),
        outputs=tuple(map(_tensor, written.graph.output)),
        max_error=largest(errors),
        tolerance=TOLERANCE,
        checked_batches=CHECKED_BATCHES,
        classes=tuple(names),
        versions={
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": runtime.__version__,
        },
    )


def _tensor(value: object) -> ExportedTensor:
    """An `onnx.ValueInfoProto` by name and shape."""
    dims = value.type.tensor_type.shape.dim  # type: ignore[attr-defined]
    shape = tuple(dim.dim_param or dim.dim_value for dim in dims)
    return ExportedTensor(value.name, shape)  # type: ignore[attr-defined]


def convert(model: Model | str | os.PathLike[str], folder: str | os.PathLike[str]) -> ConvertResult:
    """Write a loaded checkpoint as `folder`, which loads back bit for bit.

    Args:
        model: a `Model` loaded from a checkpoint, or a checkpoint as `vitcli.load` takes it.
        folder: the directory to write, whole when it appears.

    Raises:
        VitcliError: random weights, unknown preprocessing, or a folder that cannot be written.
    """
    model, folder = as_model(model), Path(folder)
    if model.report is None:
        raise VitcliError(
            f"{model.name}: weights are random (expected a checkpoint)",
            "name a checkpoint: vitcli convert SOURCE OUT",
        )
    config = model.config.model_copy(update={"preprocess": model.preprocessing})
    save_snapshot(folder, config, model.encoder)
    file = folder / WEIGHTS_FILE
    return ConvertResult(
        folder=str(folder),
        parameters=model.parameters,
        bytes=file.stat().st_size,
        sha256=sha256(file),
        checkpoint=model.report,
    )
