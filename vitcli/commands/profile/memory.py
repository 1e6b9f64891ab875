"""The memory that a step takes at its peak, what there is, and what a step must need at least."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitcli.config.schema import EncoderConfig
from vitcli.config.variants import MLPS


def peak_alone(
    make_step: Callable[..., Callable[[], object]], *arguments: Any, keeps: bool = False
) -> int | None:
    """Bytes at the peak of a step in a process of its own, where nothing ran before but one step.

    `make_step(*arguments)` is called there and gives the step; both travel by pickle. Of what
    `keeps` its buffers for the next step it is the peak of the first two steps, since later ones
    take nothing new. None where the process fails or the system resolves no growth.
    """
    payload = pickle.dumps((torch.get_num_threads(), keeps, make_step, arguments))
    code = "from vitcli.commands.profile.memory import write_peak; write_peak()"
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
