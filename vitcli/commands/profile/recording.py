"""One pass under torch's profiler: component times, operator times, a trace."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profiler

from vitcli.commands.params.analysis import ComponentCost
from vitcli.commands.params.components import COMPONENTS, OTHER
from vitcli.commands.profile.components import MARK, component_ranges, component_times, whole_step
from vitcli.commands.profile.machine import synchronise
from vitcli.commands.profile.result import ComponentTime, OperatorTime
from vitcli.files import atomic_write
from vitcli.nn.encoder import VisionEncoder


def record(
    step: Callable[[], object], encoder: VisionEncoder, device: torch.device, steps: int
) -> Any:
    """torch's profiler after `steps` steps, each in a range of its own."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it talks on stderr about missing GPUs
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with component_ranges(encoder), torch_profiler(activities=activities) as recording:
        for _ in range(steps):
            with whole_step():
                step()
        synchronise(device)
    return recording


def component_table(
    recording: Any, costs: tuple[ComponentCost, ...], device: torch.device, steps: int
) -> tuple[ComponentTime, ...]:
    """Time and operations of each component that took any; both shares sum to 1."""
    seconds = component_times(recording.events(), on_device=device.type == "cuda")
    total = sum(seconds.values())
    macs = {cost.name: cost.total.macs for cost in costs}
    all_macs = sum(macs.values())
    return tuple(
        ComponentTime(
            name,
            self_s=seconds.get(name, 0.0) / steps,
            share=seconds.get(name, 0.0) / total,
            flop_share=macs.get(name, 0) / all_macs,
        )
        for name in (*COMPONENTS, OTHER)
        if name in seconds or macs.get(name)
    )


def operator_table(
    recording: Any, most: int, device: torch.device, steps: int
) -> tuple[OperatorTime, ...]:
    """The operators with the most time of their own, at most `most` of them."""
    field = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    times = {
        average.key: (average.count, getattr(average, field) * 1e-6)
        for average in recording.key_averages()
        if not average.key.startswith(MARK)
    }
    total = sum(seconds for _, seconds in times.values())
    ranked = sorted(times.items(), key=lambda item: -item[1][1])[:most]
    return tuple(
        OperatorTime(name, calls / steps, seconds / steps, seconds / total if total else 0.0)
        for name, (calls, seconds) in ranked
    )


def write_trace(recording: Any, path: Path) -> None:
    """The recording as a gzipped Chrome trace, which Perfetto and chrome://tracing open.

    Raises:
        VitcliError: the file cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(plain))
        with (
            atomic_write(path) as file,
            gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed,
            plain.open("rb") as source,
        ):
            shutil.copyfileobj(source, packed)
