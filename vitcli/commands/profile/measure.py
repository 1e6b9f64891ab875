"""Measurement of one batch size after another, on a machine that is described by its own speed."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.commands.params.analysis import ComponentCost, component_costs
from vitcli.commands.profile.components import component_table, operator_table, record, write_trace
from vitcli.commands.profile.memory import (
    available_memory,
    is_out_of_memory,
    least_memory,
    peak_alone,
    peak_memory,
    return_freed_memory,
)
from vitcli.commands.profile.result import (
    Comparison,
    Machine,
    ProfileRun,
    ProfileSettings,
    WallTime,
)
from vitcli.engines import ENGINES
from vitcli.engines.backbone import macs_per_image
from vitcli.engines.engine import Engine, prepare_engine, timed
from vitcli.engines.pytorch import ONEDNN, onednn_linear
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.model import Model
from vitcli.nn.attention import FusedAttention, QueryValueBiasLinear
from vitcli.nn.encoder import EncoderOutput, VisionEncoder, attentions
from vitcli.results import Progress

FEWEST_RUNS, MOST_RUNS, ENOUGH_S = 5, 30, 15.0
"""Without a number of runs: at least 5, at most 30, and no new one after 15 s of them."""
RECORDED_S, MOST_RECORDED = 2.0, 10
"""Steps under the profiler: as many as fit in 2 s, one to ten."""
GIB = 2**30


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


def random_images(model: Model, batch: int) -> Tensor:
    """Standard normal pixels, (B, C, height, width), the same on every run."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, model.config.encoder.channels, *model.input_size)
    return torch.randn(shape, generator=generator).to(model.device, model.dtype)


def training_step(encoder: VisionEncoder, images: Tensor) -> None:
    """Forward, a loss on all outputs of the encoder, backward; gradients are dropped."""
    output: EncoderOutput = encoder(images)
    answers = (output.tokens, output.pooled, output.output)
    losses = [answer.float().square().mean() for answer in answers if answer is not None]
    torch.stack(losses).sum().backward()
    encoder.zero_grad(set_to_none=True)


def spread(values: Sequence[float]) -> WallTime:
    """Median, 10th and 90th percentile (linear between neighbors)."""
    if not values or any(not (math.isfinite(value) and value > 0) for value in values):
        raise VitcliError(
            "profile: a measured time is not positive and finite",
            "run it again with a larger --batch",
            exit_code=1,
        )
    if len(values) == 1:
        return WallTime(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return WallTime(statistics.median(values), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Way:
    """One engine in one dtype."""

    engine: Engine
    model: Model
    """In that dtype; the parameters are its own where the dtype is not that of the first model."""

    @property
    def key(self) -> tuple[str, str]:
        return self.engine.name, self.model.dtype_name


def lone_step(
    engine: str, encoder: VisionEncoder, images: Tensor, backward: bool
) -> Callable[[], object]:
    """A step prepared from nothing, for a process of its own."""
    if backward:
        return lambda: training_step(encoder, images)
    ready = prepare_engine(engine, encoder, images, batches=(len(images),))
    return lambda: ready.run(images)


Key = tuple[str, str]


class Session:
    """The runs of one call of `vitcli profile`."""

    def __init__(
        self, model: Model, settings: ProfileSettings, ways: Sequence[Way], progress: Progress
    ) -> None:
        self.model = model
        self.settings = settings
        self.ways = {way.key: way for way in ways}
        self.costs: tuple[ComponentCost, ...] = ()
        if isinstance(model.encoder, LibraryEncoder):
            self.macs = macs_per_image(model.encoder.backbone, model.input_size)
        else:
            self.costs = component_costs(model.config.encoder, model.input_size)
            self.macs = sum(cost.total.macs for cost in self.costs)
        rows, columns = model.config.encoder.grid_at(model.input_size)
        self.tokens = model.encoder.prefix_tokens + rows * columns
        self.comparisons: list[Comparison] = []
        self.beside_plain: list[Comparison] = []
        """Each with the first engine of its dtype that needs no preparation."""
        self._peaks: dict[int, int] = {}
        self._trace = settings.trace
        self._progress = progress
        self._planned = settings.runs or FEWEST_RUNS
        passes = self._planned + 3  # warm-up, memory, profiler
        self._todo = sum(settings.batches) * len(ways) * passes
        self._done = 0
        for way in ways:
            way.model.encoder.train(settings.backward)

    def answer(self, batch: int) -> list[ProfileRun]:
        """A row for each engine and dtype; out of memory is a row that says so."""
        kind = "library"
        if not self.model.by_library:
            fused = isinstance(attentions(self.model.encoder)[0].attend, FusedAttention)
            kind = "fused" if fused else "explicit"
        blank = [ProfileRun(batch, name, kind, dtype=dtype) for name, dtype in self.ways]
        refusal = self._too_large(batch)
        if refusal:
            return [replace(run, error=refusal) for run in blank]
        try:
            return self._measured(blank, random_images(self.model, batch))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return [replace(run, error="out of memory") for run in blank]
        finally:
            return_freed_memory()

    def _measured(self, blank: Sequence[ProfileRun], images: Tensor) -> list[ProfileRun]:
        steps = {key: self._step(way, images) for key, way in self.ways.items()}
        runs = {
            (run.engine, run.dtype): self._warmed(run, steps[run.engine, run.dtype], images)
            for run in blank
        }
        alive = [key for key, run in runs.items() if run.error is None]
        yards: dict[str, Yardstick] = {}
        if not self.model.by_library:  # the shapes of its products are not known
            shapes, rows = gemm_shapes(self.model.encoder), len(images) * self.tokens
            yards = {
                dtype: Yardstick(shapes, rows, self.model.device, getattr(torch, dtype))
                for dtype in dict.fromkeys(dtype for _, dtype in alive)
            }
        times = self._times(len(images), {key: steps[key] for key in alive}, [*yards.values()])
        for key in alive:
            yard = yards.get(key[1])
            run = self._figures(runs[key], times[key], None if yard is None else yard.gflops)
            runs[key] = self._recorded(run, steps[key])
            plain = [k for k in alive if k[1] == key[1] and ENGINES[k[0]].hooks]
            for base, kept in ((alive[:1], self.comparisons), (plain[:1], self.beside_plain)):
                for name, dtype in base if key not in base else ():
                    pairs = zip(times[name, dtype], times[key], strict=True)
                    ratio = spread([theirs / ours for theirs, ours in pairs])
                    kept.append(Comparison(run.batch, key[0], name, ratio, key[1], dtype))
        return list(runs.values())

    def _step(self, way: Way, images: Tensor) -> Callable[[], object]:
        cast = images.to(way.model.dtype)
        if self.settings.backward:
            return lambda: training_step(way.model.encoder, cast)
        return lambda: way.engine.run(cast)

    def _warmed(self, run: ProfileRun, step: Callable[[], object], images: Tensor) -> ProfileRun:
        """The first step, and the memory of one."""
        device = self.model.device
        try:
            first = timed(step, device)
            if device.type == "cpu" and ENGINES[run.engine].any_batch:
                model = self.ways[run.engine, run.dtype].model
                cast = images.to(model.dtype)
                keeps = self.ways[run.engine, run.dtype].engine.weight_bytes > 0
                step_of = (run.engine, model.encoder, cast, self.settings.backward)
                peak = peak_alone(lone_step, *step_of, keeps=keeps)
            else:  # a compiled graph would be compiled once more
                peak = peak_memory(step, device)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return replace(run, error="out of memory")
        self._count(2 * run.batch)
        if peak is not None:
            self._peaks[run.batch] = max(peak, self._peaks.get(run.batch, 0))
        return replace(run, warmup_s=first, peak_bytes=peak)

    def _times(
        self, batch: int, steps: dict[Key, Callable[[], object]], yards: Sequence[Yardstick]
    ) -> dict[Key, list[float]]:
        """Wall seconds of each way's steps, taken in turn with trials of the yardsticks."""
        times: dict[Key, list[float]] = {name: [] for name in steps}
        done, spent = 0, 0.0
        while steps and self._wants_more(done, spent / len(steps)):
            for name, step in steps.items():
                times[name].append(timed(step, self.model.device))
                spent += times[name][-1]
                if done < self._planned:
                    self._count(batch)
            for yard in yards:
                yard.trial()
            done += 1
        for yard in yards:
            for _ in range(done, FEWEST_RUNS):
                yard.trial()
        return times

    def _wants_more(self, done: int, seconds: float) -> bool:
        if self.settings.runs is not None:
            return done < self.settings.runs
        return done < FEWEST_RUNS or (done < MOST_RUNS and seconds < ENOUGH_S)

    def _figures(self, run: ProfileRun, times: Sequence[float], gemm: float | None) -> ProfileRun:
        wall = spread(times)
        passes = 3 if self.settings.backward else 1  # the backward pass is two of the forward
        gflops = 2 * self.macs * run.batch * passes / wall.median / 1e9
        if not ENGINES[run.engine].exact:
            gemm = None  # no yardstick for products of another type
        return replace(
            run,
            timed_runs=len(times),
            wall_s=wall,
            images_per_s=run.batch / wall.median,
            gflops=gflops,
            gemm_gflops=None if gemm is None else max(gemm, gflops),
            gemm_fraction=None if gemm is None else gflops / max(gemm, gflops),
        )

    def _recorded(self, run: ProfileRun, step: Callable[[], object]) -> ProfileRun:
        """The components and operators of a run, from steps under the profiler."""
        assert run.wall_s is not None
        if not ENGINES[run.engine].profiled:
            self._count(run.batch)
            return run
        steps = max(1, min(MOST_RECORDED, int(RECORDED_S / run.wall_s.median)))
        device = self.model.device
        encoder = self.ways[run.engine, run.dtype].model.encoder
        recording = record(step, encoder, device, steps)
        if self._trace:
            write_trace(record(step, encoder, device, 1), self._trace)
            self._trace = None
        self._count(run.batch)
        inside = ENGINES[run.engine].hooks
        return replace(
            run,
            components=component_table(recording, self.costs, device, steps) if inside else (),
            ops=operator_table(recording, self.settings.ops, device, steps),
        )

    def _too_large(self, batch: int) -> str | None:
        """Why a batch is not tried: Linux would end the process where it runs out of memory."""
        free = available_memory(self.model.device)
        if free is None:
            return None
        needed = 0
        if not self.model.by_library:
            encoder, itemsize = self.model.config.encoder, self.model.dtype.itemsize
            needed = batch * least_memory(encoder, self.tokens, self.model.input_size, itemsize)
        smaller = [known for known in self._peaks if known <= batch]
        if smaller:  # grows in proportion at most
            known = max(smaller)
            needed = max(needed, self._peaks[known] * batch // known)
        if needed <= free:
            return None
        return f"out of memory: needs about {needed / GIB:.3g} GiB, {free / GIB:.3g} GiB are free"

    def _count(self, images: int) -> None:
        self._done += images
        self._progress(self._done, self._todo)
