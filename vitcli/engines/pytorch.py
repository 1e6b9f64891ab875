"""torch's own ways to run an encoder: eager, with oneDNN's kernels, compiled.

For float32 on x86 `F.linear` calls MKL; oneDNN, which torch carries as well, multiplies the shapes
of a ViT 1.2 to 2 times as fast on AMD processors, and applies a GELU on the way out. In bfloat16
both multiply by oneDNN, and the GELU on the way out is what is gained.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.engines.engine import Engine, Graph, Layers, shared_copy
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, FeedForward, VisionEncoder, hooked, layer_points

Module = TypeVar("Module", bound=nn.Module)
LinearOperator = Callable[[Tensor, Tensor, Tensor | None, str, list[float], str], Tensor]


def prepare_eager(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """The encoder itself, as it is."""
    return Engine("eager", _modules(encoder, layers, nullcontext), torch.__version__)


def prepare_onednn(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """The encoder itself, with oneDNN's kernels while it runs."""
    if not onednn_runs(images.device, images.dtype):
        raise VitcliError(
            "--engine onednn: torch has no oneDNN kernels for linear maps in this dtype here",
            "--engine eager",
        )
    note = "linear maps by torch's oneDNN kernels"
    run = _modules(encoder, layers, lambda: onednn_kernels(encoder))
    return Engine("onednn", run, torch.__version__, note=note)


def _modules(
    encoder: VisionEncoder, layers: bool, kernels: Callable[[], object]
) -> Callable[[Tensor], Layers]:
    points = [module for _, module in layer_points(encoder)] if layers else []

    @torch.inference_mode()
    def run(images: Tensor) -> Layers:
        seen: list[Tensor] = []
        with kernels(), hooked((module, seen.append) for module in points):  # type: ignore[attr-defined]
            output: EncoderOutput = encoder(images)
        return output, seen

    return run


def prepare_compile(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """Compiled for one image and for any larger batch, as far as `batches` need them.

    torch keeps compiled graphs on disk for the next process, here by the vector instructions that
    they use. oneDNN's linear maps are compiled with their weights as constants; other weights are
    not frozen, since torch cannot keep a graph with packed ones.
    """
    from torch._inductor import config as inductor  # slow to import

    start = time.perf_counter()
    _separate_graphs()
    graph = Graph(shared_copy(encoder), images, layers)
    frozen = onednn_runs(images.device, images.dtype) and images.dtype == torch.float32
    if frozen:
        _use_onednn(graph.encoder)
        projection = graph.encoder.front_end.projection
        if type(projection) is nn.Conv2d:
            projection.__class__ = _OneDnnPatches
    compiled = torch.compile(graph, fullgraph=True)

    @torch.no_grad()
    def run(images: Tensor) -> Layers:
        if images.shape[0] > 1:
            torch._dynamo.mark_dynamic(images, 0)
        # as an option of torch.compile it comes too late: tracing asks for it as well
        with inductor.patch(freezing=frozen):
            return graph.read(compiled(images))

    try:
        for size in sorted({min(batch, 2) for batch in batches}):
            run(images[:1].expand(size, -1, -1, -1).contiguous())
    except Exception as error:  # whatever the compiler chain raises: its causes are the machine's
        raise not_compiled("--engine compile", error, "--engine eager") from error
    seconds = time.perf_counter() - start
    return Engine("compile", run, torch.__version__, seconds, "torch.compile")


def not_compiled(option: str, error: Exception, instead: str) -> VitcliError:
    """What torch.compile raised, as an error of the option that asked for it."""
    cause = getattr(error, "inner_exception", error)  # torch's own only says which backend
    return VitcliError(
        f"{option}: {type(cause).__name__}: {cause}".splitlines()[0],
        f"{instead} (torch.compile needs a C++ compiler on the CPU)",
        exit_code=1,
    )


def _separate_graphs() -> None:
    """Keep graphs for these vector instructions apart: torch would take others for the same."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    instructions = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    if Path(cache_dir()).name != instructions:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir()) / instructions)


def _operator() -> LinearOperator | None:
    """torch's oneDNN linear with a pointwise function on its output, if this build has it."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if not (x86 and torch.backends.mkldnn.is_available()):
        return None
    try:
        found: LinearOperator = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None
    return found


ONEDNN = _operator()


def onednn_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's linear maps are there for inference in this dtype on this device."""
    return (
        ONEDNN is not None
        and device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and (
            dtype == torch.float32
            or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
        )
    )


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gelu: str | None = None
) -> Tensor:
    """x W^T + b by oneDNN; `gelu` is `nn.GELU`'s `approximate`, or None for no GELU."""
    assert ONEDNN is not None
    pointwise, how = ("none", "") if gelu is None else ("gelu", gelu)
    return ONEDNN(x, weight, bias, pointwise, [], how)


def _applies(x: Tensor) -> bool:
    """The operator has no gradient, and autocast must see `F.linear`."""
    return (
        onednn_runs(x.device, x.dtype)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


class _OneDnnLinear(nn.Linear):
    """A Linear while oneDNN runs it."""

    def forward(self, x: Tensor) -> Tensor:
        if _applies(x):
            return onednn_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class _OneDnnFeedForward(FeedForward):
    """A FeedForward while oneDNN runs it: fc1 and its GELU are one operator."""

    def forward(self, x: Tensor) -> Tensor:
        watched = self.fc1._forward_hooks or self.activation._forward_hooks or self.training
        if watched or not _applies(x):
            return super().forward(x)
        assert isinstance(self.activation, nn.GELU)
        inner = onednn_linear(x, self.fc1.weight, self.fc1.bias, self.activation.approximate)
        y: Tensor = self.fc2(inner)  # (B, N, D)
        return y


class _OneDnnPatches(nn.Conv2d):
    """A patch projection as a linear map: frozen convolutions have packed weights."""

    def forward(self, images: Tensor) -> Tensor:
        (p, q), (batch, channels, height, width) = self.kernel_size, images.shape
        rows, columns = height // p, width // q
        whole = images[..., : rows * p, : columns * q]  # as a convolution leaves out the rest
        patches = whole.reshape(batch, channels, rows, p, columns, q).permute(0, 2, 4, 1, 3, 5)
        flat = patches.reshape(batch, rows * columns, channels * p * q)  # (B, N, C p q)
        tokens = onednn_linear(flat, self.weight.flatten(1), self.bias)  # (B, N, D)
        return tokens.transpose(1, 2).reshape(batch, -1, rows, columns)


def _use_onednn(encoder: nn.Module) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Give linear maps the class that oneDNN runs; each changed module and the class it had."""
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    for module in encoder.modules():
        kind = type(module)
        if kind is nn.Linear:
            module.__class__ = _OneDnnLinear
        elif kind is FeedForward and type(module.activation) is nn.GELU:
            module.__class__ = _OneDnnFeedForward
        else:
            continue
        changed.append((module, kind))
    return changed


@contextmanager
def onednn_kernels(encoder: nn.Module) -> Iterator[None]:
    """Linear maps by oneDNN inside the context; outside it the modules are what they were.

    The modules themselves are called, so hooks fire. Training, other dtypes and devices run as
    before.
    """
    changed = _use_onednn(encoder)
    try:
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
