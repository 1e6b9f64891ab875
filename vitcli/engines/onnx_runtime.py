"""ONNX Runtime on the exported graph."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitcli.engines.engine import Engine
from vitcli.engines.export import INPUT, build_graph, require, write_onnx
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, VisionEncoder

Session = Callable[[Tensor], list[Tensor]]


def prepare(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """Exported to a file that lives as long as it is read, and loaded.

    Raises:
        VitcliError: the extra `onnx` is missing, another dtype than float32 or float16, or an
            encoder that cannot be exported.
    """
    (onnxruntime,) = require("onnxruntime")
    if images.dtype not in (torch.float32, torch.float16):
        raise VitcliError(
            f"--engine onnx runs float32 and float16, not {str(images.dtype)[6:]}",
            "--dtype float32",
        )
    start = time.perf_counter()
    graph = build_graph(encoder, images, layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        write_onnx(graph, images, path)
        session = open_session(path, graph.names, images.device)

    def run(images: Tensor) -> tuple[EncoderOutput, list[Tensor]]:
        return graph.read(session(images))

    seconds = time.perf_counter() - start
    return Engine("onnx", run, onnxruntime.__version__, seconds, "ONNX Runtime, exported graph")


def open_session(path: Path, names: Sequence[str], device: torch.device) -> Session:
    """Images to the named outputs, with as many threads as torch uses.

    Raises:
        VitcliError: the device has no execution provider here.
    """
    (runtime,) = require("onnxruntime")
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}.get(device.type)
    if provider not in runtime.get_available_providers():
        raise VitcliError(
            f"--engine onnx: this onnxruntime cannot run on {device.type}",
            "--device cpu, or install onnxruntime-gpu",
        )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    session = runtime.InferenceSession(str(path), options, providers=[provider])

    def run(images: Tensor) -> list[Tensor]:
        arrays = session.run(list(names), {INPUT: images.detach().cpu().numpy()})
        return [torch.from_numpy(array).to(images.device) for array in arrays]

    return run
