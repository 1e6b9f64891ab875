"""The exported graph, run by ONNX Runtime or OpenVINO; its operator set is `engines.OPSET`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from vitcli.engines import OPSET
from vitcli.engines.engine import Engine, Graph, Layers, onednn_limits, shared_copy
from vitcli.errors import VitcliError, install_extra
from vitcli.nn.encoder import VisionEncoder

Session = Callable[[Tensor], list[Tensor]]


def prepare_onnx(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """Exported to a file that lives as long as it is read, and loaded."""
    (runtime,) = require("onnxruntime")
    note = "ONNX Runtime, exported graph"
    return _prepare("onnx", runtime, open_session, encoder, images, layers, note)


def prepare_int8(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """The same with linear maps in 8-bit integers.

    Weights have a scale per output channel, activations one per call.
    """
    (runtime,) = require("onnxruntime")
    note = "linear maps in 8-bit integers"
    return _prepare("int8", runtime, open_session, encoder, images, layers, note, _quantize)


def prepare_openvino(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """The same graph in OpenVINO, which computes in the dtype of `images`."""
    (openvino,) = require("openvino", extra="openvino")
    if limits := onednn_limits():  # its own copy of oneDNN then mixes instructions, and crashes
        name = next(iter(limits))
        raise VitcliError(f"--engine openvino: cannot run under {name}", f"unset {name}")
    if images.dtype == torch.bfloat16:
        if "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise VitcliError(
                "--engine openvino: this processor has no bfloat16 units", "--dtype float32"
            )
        encoder = copy.deepcopy(encoder).float()  # OpenVINO rounds to the same values again
    note = "OpenVINO, exported graph"
    return _prepare("openvino", openvino, _open_openvino, encoder, images, layers, note)


def _quantize(path: Path) -> None:
    """Quantize the linear maps of a written graph, in place."""
    (quantization,) = require("onnxruntime.quantization")
    with _quiet():
        quantization.quantize_dynamic(
            path,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            # without VNNI the processor's sums of two products saturate at 8 bits
            reduce_range=not getattr(torch.cpu, "_is_vnni_supported", lambda: False)(),
            use_external_data_format=path.with_name(f"{path.name}.data").exists(),
        )


def _prepare(
    name: str,
    library: ModuleType,
    open_graph: Callable[[Path, Sequence[str], Tensor], Session],
    encoder: VisionEncoder,
    images: Tensor,
    layers: bool,
    note: str,
    change: Callable[[Path], None] = lambda path: None,
) -> Engine:
    start = time.perf_counter()
    example = images.to(next(encoder.parameters()).dtype)
    graph = build_graph(encoder, example, layers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        write_onnx(graph, example, path)
        change(path)
        held = sum(file.stat().st_size for file in Path(folder).iterdir())
        session = open_graph(path, graph.names, images)
    del graph.encoder  # its weights are the session's now

    def run(images: Tensor) -> Layers:
        return graph.read(session(images))

    return Engine(name, run, library.__version__, time.perf_counter() - start, note, held)


def open_session(path: Path, names: Sequence[str], images: Tensor) -> Session:
    """Images to the named outputs on the same device, with as many threads as torch uses."""
    (runtime,) = require("onnxruntime")
    device = images.device.type
    provider = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}.get(device)
    if provider not in runtime.get_available_providers():
        raise VitcliError(
            f"--engine onnx: this onnxruntime cannot run on {device}",
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


def _open_openvino(path: Path, names: Sequence[str], images: Tensor) -> Session:
    """The outputs in the order of the graph, which is that of `names`, as `open_session`."""
    (openvino,) = require("openvino", extra="openvino")
    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if images.dtype == torch.bfloat16 else "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",  # one call at a time, with all threads
        "ENABLE_CPU_PINNING": False,  # two processes would be held to the same cores
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)

    def run(images: Tensor) -> list[Tensor]:
        arrays = compiled([images.detach().float().contiguous().numpy()]).to_tuple()
        return [torch.from_numpy(array).to(images.dtype) for array in arrays]

    return run


INPUT = "images"
LARGEST_SINGLE_FILE = 2**31 - 2**24
"""A protobuf file ends at 2 GiB: above this, weights go to a file beside it."""


def require(*modules: str, extra: str = "onnx") -> list[ModuleType]:
    """The modules of an extra.

    Raises:
        VitcliError: one of them is not installed.
    """
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise VitcliError(
            f"{extra}: needs {error.name}, which is not installed", install_extra(extra)
        ) from error


def build_graph(encoder: VisionEncoder, images: Tensor, layers: bool = False) -> Graph:
    """What `write_onnx` writes; `images` is an example of the input."""
    return Graph(shared_copy(encoder), images, layers)


def write_onnx(
    graph: Graph,
    images: Tensor,
    path: Path,
    opset: int = OPSET,
    check: Callable[[Path], None] = lambda written: None,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a graph whose batch is free and whose height and width are those of `images`.

    `check` sees the whole file before it takes the place of an older one; where it raises, the
    older one stays. `metadata` is kept in the model's `metadata_props`.

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
            f"--opset {OPSET}" if opset != OPSET else "--engine compile",
            exit_code=1,
        ) from error
    assert program is not None
    program.model.metadata_props.update(metadata or {})
    size = sum(p.numel() * p.element_size() for p in graph.parameters())
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        program.save(Path(folder) / path.name, external_data=size > LARGEST_SINGLE_FILE)
        check(Path(folder) / path.name)
        files = sorted(Path(folder).iterdir(), reverse=True)  # the data before what refers to it
        for file in files:
            os.replace(file, path.parent / file.name)  # noqa: PTH105 (one call for both platforms)
    return sorted(path.parent / file.name for file in files)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the running commentary of exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
