"""Which component the time of a step belongs to.

Ranges are opened by hooks from outside the encoder; torch's profiler records them beside the
operators. Everything outside a component's range is `OTHER`: residual sums, concatenation of
tokens, head split and merge, and what Python adds.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profiler

from vitcli.commands.params import analysis as params
from vitcli.commands.params.analysis import OTHER, ComponentCost
from vitcli.commands.profile.result import ComponentTime, OperatorTime
from vitcli.engines.engine import synchronize
from vitcli.engines.reference import LibraryEncoder
from vitcli.files import atomic_write
from vitcli.nn.encoder import Block, VisionEncoder
from vitcli.nn.positions import NoPosition

MARK = "component: "
BACKWARD = "autograd::engine::evaluate_function: "

Event = Any
"""A `torch.autograd.profiler_util.FunctionEvent`."""


def component_modules(encoder: VisionEncoder) -> list[tuple[str, nn.Module]]:
    """Every module that is one component's work, named as `vitcli params` names it.

    None of them contains another one.
    """
    front = encoder.front_end
    points: list[tuple[str, nn.Module]] = [
        (params.PATCH_EMBEDDING, front.projection),
        (params.PATCH_EMBEDDING, front.patch_norm),
        (params.LN_PRE, front.norm),
    ]
    for block in encoder.vit.blocks:
        assert isinstance(block, Block)
        attention = block.attention
        points += [
            (params.NORMS, block.norm1),
            (params.QKV, attention.qkv),
            (params.QK_NORM, attention.q_norm),
            (params.QK_NORM, attention.k_norm),
            (params.ATTENTION_PRODUCTS, attention.attend),
            (params.NORMS, attention.norm),
            (params.OUTPUT_PROJECTION, attention.proj),
            (params.LAYER_SCALE, block.scale1),
            (params.NORMS, block.norm2),
            (params.FFN, block.feed_forward),
            (params.LAYER_SCALE, block.scale2),
        ]
    points += [
        (params.FINAL_NORM, encoder.vit.norm),
        (params.POOLING, encoder.pooling),
        (params.POOLING, encoder.pool_norm),
        (params.HEAD, encoder.head),
    ]
    return [(name, module) for name, module in points if not isinstance(module, nn.Identity)]


@contextmanager
def component_ranges(encoder: VisionEncoder) -> Iterator[None]:
    """A profiler range around every call of every component, while the context lasts."""
    with ExitStack() as stack:
        for name, module in component_modules(encoder):
            _hook(stack, name, module)
        for position in encoder.front_end.position.modules():
            # Their methods are called, not their forward.
            for method in ("add", "bias", "rotation", "block_biases"):
                if isinstance(position, NoPosition):
                    inside = _in_range(params.POSITIONS, getattr(position, method))
                    setattr(position, method, inside)
                    stack.callback(delattr, position, method)
        yield


def _hook(stack: ExitStack, name: str, module: nn.Module) -> None:
    opened: list[record_function] = []

    def enter(_: nn.Module, __: Any) -> None:
        opened.append(record_function(MARK + name))
        opened[-1].__enter__()

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        opened.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a range, and a rotation or a generator that it returns too."""

    def wrapped(*args: Any) -> Any:
        with record_function(MARK + name):
            result = function(*args)
        if isinstance(result, Iterator):
            return _each_in_range(name, result)
        turns = callable(result) and not isinstance(result, Tensor)
        return _in_range(name, result) if turns else result

    return wrapped


def _each_in_range(name: str, values: Iterator[Any]) -> Iterator[Any]:
    """The same values, each made inside a range."""
    end = object()
    while True:
        with record_function(MARK + name):
            value = next(values, end)
        if value is end:
            return
        yield value


@contextmanager
def whole_step() -> Iterator[None]:
    """The range that holds all others: its own time is `OTHER`."""
    with record_function(MARK + OTHER):
        yield


def component_times(events: Iterable[Event], on_device: bool = False) -> dict[str, float]:
    """Seconds of each component over all recorded steps, each instant counted once.

    A range's own time is its length less the ranges nested directly in it, so that operators
    nested in operators never count twice. A step of the backward pass belongs to the component
    whose forward operator made it; autograd links the two by sequence number.

    Args:
        on_device: count the accelerator's kernels in place of the CPU's wall time.
    """
    events = list(events)
    owners = _owners(events)
    component = {
        id(event): name for event in events if (name := _component(event, owners)) is not None
    }
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if id(event) not in component:
            continue
        length = event.device_time_total if on_device else event.time_range.elapsed_us()
        seconds[component[id(event)]] += length * 1e-6
        outer = next((component[id(e)] for e in _around(event) if id(e) in component), None)
        if outer is not None:
            seconds[outer] -= length * 1e-6
    return dict(seconds)


def _component(event: Event, owners: Mapping[int, str]) -> str | None:
    if event.name.startswith(MARK):
        name: str = event.name.removeprefix(MARK)
        return name
    if event.name.startswith(BACKWARD):
        return owners.get(event.sequence_nr, OTHER)
    return None


def _around(event: Event) -> Iterator[Event]:
    """The events that enclose it, the nearest first."""
    while (event := event.cpu_parent) is not None:
        yield event


def _owners(events: Iterable[Event]) -> dict[int, str]:
    """For each sequence number, the component of the forward operator that took it.

    Operators that record nothing for autograd carry the number of the next one that does, so the
    last to carry a number is the one that took it.
    """
    owners: dict[int, str] = {}
    for event in sorted(events, key=lambda e: e.time_range.start):
        names = [event.name, *(outer.name for outer in _around(event))]
        backward = any(name.startswith(BACKWARD) for name in names)
        if event.sequence_nr < 0 or backward or event.name.startswith(MARK):
            continue
        mark = next((name for name in names if name.startswith(MARK)), None)
        if mark is not None:
            owners[event.sequence_nr] = mark.removeprefix(MARK)
    return owners


def record(
    step: Callable[[], object], encoder: VisionEncoder, device: torch.device, steps: int
) -> Any:
    """torch's profiler after `steps` steps, each in a range of its own."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints warnings about missing GPUs
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    ranges = nullcontext() if isinstance(encoder, LibraryEncoder) else component_ranges(encoder)
    with ranges, torch_profiler(activities=activities) as recording:
        for _ in range(steps):
            with whole_step():
                step()
        synchronize(device)
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
        for name in (*params.COMPONENTS, OTHER)
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
    """The recording as a gzipped Chrome trace, which Perfetto and chrome://tracing open."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(plain))
        with (
            atomic_write(path) as file,
            gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed,
            plain.open("rb") as source,
        ):
            shutil.copyfileobj(source, packed)
