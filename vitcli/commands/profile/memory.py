"""Memory that a step takes, and memory that there is."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from vitcli.config.schema import EncoderConfig

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

    CUDA: all device memory in use at the peak. Elsewhere the growth during the call: of the
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

    Inside the feed-forward part the residual, its normalised copy and the inner activation live
    at once.
    """
    pixels = config.channels * image_size[0] * image_size[1]
    inner = config.mlp_hidden * (2 if config.mlp == "gated" else 1)
    return itemsize * (pixels + tokens * (2 * config.hidden + inner))
