"""This machine: its description, memory, and speed of matrix products."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.commands.profile.result import Machine
from vitcli.config.schema import EncoderConfig
from vitcli.config.variants import MLPS
from vitcli.engines.engine import timed
from vitcli.engines.pytorch import ONEDNN, onednn_linear
from vitcli.nn.attention import QueryValueBiasLinear
from vitcli.nn.encoder import VisionEncoder


def describe_machine(device: torch.device, dtype: torch.dtype, engines: dict[str, str]) -> Machine:
    """This machine as every result names it."""
    on_cuda = device.type == "cuda"
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        device=torch.cuda.get_device_name(device) if on_cuda else device.type,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        python=platform.python_version(),
        torch=torch.__version__,
        engines=engines,
    )


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def gemm_shapes(encoder: VisionEncoder) -> list[tuple[int, int]]:
    """(in, out) of each matrix product with weights in one block."""
    return [
        (module.weight.shape[1], module.weight.shape[0])
        for module in encoder.vit.blocks[0].modules()
        if isinstance(module, nn.Linear | QueryValueBiasLinear)
    ]


class Yardstick:
    """The rate at which this machine multiplies (rows, in) by (in, out), over all shapes.

    Shape by shape the fastest call of the fastest kernel counts: torch's own choice, a product
    without bias, and on a CPU oneDNN's, which torch has beside MKL. Trials are taken in turn with
    what is measured by it, so that a machine that is busy for a while slows neither alone.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.shapes, self.rows, self.device = shapes, rows, device
        self.best = [math.inf] * len(shapes)
        kernels: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
            F.linear,
            lambda x, weight, bias: x @ weight.T,
        ]
        if ONEDNN is not None and device.type == "cpu" and dtype != torch.float64:
            kernels.append(onednn_linear)
        widest = max(width for width, _ in shapes)
        values = torch.randn(rows * widest, device=device, dtype=dtype)  # shared by the shapes
        self._calls: list[list[Callable[[], Tensor]]] = []
        for width, out in shapes:
            x = values[: rows * width].view(rows, width)
            weight = torch.randn(out, width, device=device, dtype=dtype)
            bias = torch.zeros(out, device=device, dtype=dtype)
            calls: list[Callable[[], Tensor]] = []
            for kernel in kernels:
                with suppress(RuntimeError):  # a kernel that does not take this dtype
                    kernel(x, weight, bias)
                    calls.append(partial(kernel, x, weight, bias))
            self._calls.append(calls)

    @torch.inference_mode()
    def trial(self) -> None:
        """Each kernel of each shape once more."""
        for index, calls in enumerate(self._calls):
            seconds = [timed(call, self.device) for call in calls]
            self.best[index] = min(self.best[index], *seconds)

    @property
    def gflops(self) -> float:
        operations = sum(2 * self.rows * width * out for width, out in self.shapes)
        return operations / sum(self.best) / 1e9


def peak_alone(
    make_step: Callable[..., Callable[[], object]], *arguments: Any, keeps: bool = False
) -> int | None:
    """Bytes at the peak of a step in a process of its own, where nothing ran before but one step.

    `make_step(*arguments)` is called there and gives the step; both travel by pickle. Of what
    `keeps` its buffers for the next step it is the peak of the first two steps, since later ones
    take nothing new. None where the process fails or the system resolves no growth.
    """
    payload = pickle.dumps((torch.get_num_threads(), keeps, make_step, arguments))
    code = "from vitcli.commands.profile.machine import write_peak; write_peak()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], input=payload, capture_output=True, env=environment
    )
    text = done.stdout.decode().strip()
    return int(text) if done.returncode == 0 and text.isdecimal() else None


def write_peak() -> None:
    """The process that `peak_alone` starts: reads its pickle from stdin, writes the bytes."""
    threads, keeps, make_step, arguments = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    step = make_step(*arguments)
    if not keeps:
        step()  # kernels and their caches are made once
    peak = peak_memory((lambda: (step(), step())) if keeps else step, torch.device("cpu"))
    sys.stdout.write(str(peak or ""))


STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
OUT_OF_MEMORY = ("out of memory", "allocate memory", "failed to allocate", "bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, ONNX Runtime or Python say that an allocation failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def peak_memory(step: Callable[[], object], device: torch.device) -> int | None:
    """Bytes at the peak of one call, after the call.

    CUDA: all device memory in use at the peak. On others the growth during the call: of the
    resident set (CPU) or of the driver's memory (MPS); None where the system resolves none.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        torch.mps.empty_cache()
        before = torch.mps.driver_allocated_memory()
        step()
        growth = torch.mps.driver_allocated_memory() - before
    else:
        gc.collect()  # an exporter leaves cycles
        return_freed_memory()
        before = _reset_peak()
        step()
        growth = _peak() - before
    return growth if growth > 0 else None


def return_freed_memory() -> None:
    """Give memory that the C library keeps for later back to the system, where it can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _reset_peak() -> int:
    """Forget the peak of the resident set where the system allows it; the size now, in bytes."""
    try:
        CLEAR_REFS.write_text("5", encoding="ascii")
        return _status_bytes("VmRSS")
    except OSError:
        return _peak()


def _peak() -> int:
    """The largest resident set so far, in bytes."""
    if STATUS.is_file():
        return _status_bytes("VmHWM")
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _status_bytes(key: str) -> int:
    line = next(s for s in STATUS.read_text(encoding="ascii").splitlines() if s.startswith(key))
    return int(line.split()[1]) * 1024


def available_memory(device: torch.device) -> int | None:
    """Bytes that a step may still take, None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.is_file():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return min([free, *_group_limits()])


def _group_limits() -> list[int]:
    """What the control group of a container leaves, if it limits memory."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except OSError:
        return []
    return [] if limit == "max" else [int(limit) - used]


def least_memory(
    config: EncoderConfig, tokens: int, image_size: tuple[int, int], itemsize: int
) -> int:
    """Bytes that one image takes at the very least: its pixels, and a block's widest moment.

    Inside the feed-forward part the residual, its normalized copy and the inner activation live
    at once.
    """
    pixels = config.channels * image_size[0] * image_size[1]
    inner = config.mlp_hidden * MLPS[config.mlp].maps_in
    return itemsize * (pixels + tokens * (2 * config.hidden + inner))
