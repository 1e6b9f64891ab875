"""Write an encoder as an ONNX graph checked against eager, or as vitcli's own checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vitcli.checkpoints.load import digest
from vitcli.checkpoints.save import WEIGHTS_FILE, save_snapshot
from vitcli.commands.encode.analysis import model_info
from vitcli.commands.export.result import ConvertResult, ExportedFile, ExportedTensor, ExportResult
from vitcli.commands.profile.session import random_images
from vitcli.engines import OPSET
from vitcli.engines.engine import Engine, largest_error
from vitcli.engines.onnx_runtime import build_graph, open_session, require, write_onnx
from vitcli.errors import VitcliError
from vitcli.model import Model
from vitcli.nn.encoder import EncoderOutput

TOLERANCE = 1e-4
CHECKED_BATCHES = (1, 2)


def export(model: Model, path: Path, opset: int = OPSET) -> ExportResult:
    """Export at the model's input size with a free batch, then run the file beside eager.

    Raises:
        VitcliError: a path or dtype that cannot be, the extra `onnx` missing, an encoder that
            cannot be exported, or outputs that differ by more than TOLERANCE (the file stays, so
            that it can be looked into).
    """
    check_export_file(path)
    if model.dtype != torch.float32 or model.device.type != "cpu":
        raise VitcliError(
            "a graph is written and checked in float32 on the CPU", "--dtype float32 --device cpu"
        )
    onnx, runtime = require("onnx", "onnxruntime")
    images = random_images(model, max(CHECKED_BATCHES))
    graph = build_graph(model.encoder, images)
    files = write_onnx(graph, images, path, opset)
    session = open_session(path, graph.names, model.device)

    def run(images: Tensor) -> tuple[EncoderOutput, list[Tensor]]:
        return graph.read(session(images))

    engine = Engine("onnx", run, runtime.__version__)
    error = max(largest_error(engine, model.encoder, images[:n]) for n in CHECKED_BATCHES)
    if not error <= TOLERANCE:
        raise VitcliError(
            f"{path}: outputs differ from eager by {error:.1e}, more than {TOLERANCE:.0e}",
            "another --opset; the file was kept",
            exit_code=1,
        )
    written = onnx.load(str(path), load_external_data=False)
    return ExportResult(
        model=model_info(model),
        files=tuple(ExportedFile(str(file), file.stat().st_size) for file in files),
        opset=next(item.version for item in written.opset_import if item.domain in ("", "ai.onnx")),
        inputs=tuple(map(_tensor, written.graph.input)),
        outputs=tuple(map(_tensor, written.graph.output)),
        max_error=error,
        tolerance=TOLERANCE,
        checked_batches=CHECKED_BATCHES,
        versions={
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": runtime.__version__,
        },
    )


def check_export_file(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Raises:
        VitcliError: another suffix than .onnx, or no such folder.
    """
    if path.suffix != ".onnx":
        raise VitcliError(f"{path}: a graph is an .onnx file", f"{path.with_suffix('.onnx').name}")
    if not path.parent.is_dir():
        raise VitcliError(f"{path}: there is no folder {path.parent}", "make it first")


def _tensor(value: object) -> ExportedTensor:
    """An `onnx.ValueInfoProto` by name and shape."""
    dims = value.type.tensor_type.shape.dim  # type: ignore[attr-defined]
    shape = tuple(dim.dim_param or dim.dim_value for dim in dims)
    return ExportedTensor(value.name, shape)  # type: ignore[attr-defined]


def convert(model: Model, folder: Path) -> ConvertResult:
    """Write a loaded checkpoint as `folder`, which loads back bit for bit.

    Raises:
        VitcliError: no checkpoint, no known preprocessing, or a place that cannot be written.
    """
    if model.report is None:
        raise VitcliError("these weights are fresh: there is no checkpoint to convert")
    config = model.config.model_copy(update={"preprocess": model.preprocessing})
    save_snapshot(folder, config, model.encoder)
    file = folder / WEIGHTS_FILE
    return ConvertResult(
        folder=str(folder),
        parameters=model.parameters,
        bytes=file.stat().st_size,
        sha256=digest([file]),
        checkpoint=model.report,
    )
