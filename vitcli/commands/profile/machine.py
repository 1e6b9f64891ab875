"""What this machine is, and how fast it multiplies matrices."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.commands.profile.result import Machine
from vitcli.engines.onednn import onednn_linear
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


def synchronise(device: torch.device) -> None:
    """Wait until the accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of one call, accelerator included."""
    synchronise(device)
    start = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - start


def gemm_shapes(encoder: VisionEncoder) -> list[tuple[int, int]]:
    """(in, out) of each matrix product with weights in one block."""
    return [
        (module.weight.shape[1], module.weight.shape[0])
        for module in encoder.vit.blocks[0].modules()
        if isinstance(module, nn.Linear | QueryValueBiasLinear)
    ]


@torch.inference_mode()
def gemm_gflops(
    shapes: Sequence[tuple[int, int]], rows: int, device: torch.device, dtype: torch.dtype
) -> float:
    """The rate at which this machine multiplies (rows, in) by (in, out), over all shapes.

    On a CPU with two libraries for it (MKL and oneDNN) the faster one counts, shape by shape.
    """
    kernels: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [F.linear]
    if onednn_linear.applies(device, dtype):
        kernels.append(onednn_linear)
    operations = seconds = 0.0
    for width, out in shapes:
        x, weight = (torch.randn(n, width, device=device, dtype=dtype) for n in (rows, out))
        bias = torch.zeros(out, device=device, dtype=dtype)
        operations += 2 * rows * width * out
        seconds += min(_median_time(partial(kernel, x, weight, bias), device) for kernel in kernels)
    return operations / seconds / 1e9


def _median_time(step: Callable[[], object], device: torch.device) -> float:
    """Median of 3 to 15 calls, after one that is not counted, within about half a second."""
    step()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 15 and sum(times) < 0.5):
        times.append(timed(step, device))
    return statistics.median(times)
