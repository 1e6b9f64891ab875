"""The result of `vitcli profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

from vitcli.config.attention_variants import AttendKind
from vitcli.config.request import DTYPES
from vitcli.engines import check_engine
from vitcli.errors import VitcliError, check_choice
from vitcli.results import ModelInfo, Result


@dataclass(frozen=True)
class Machine:
    """The machine and the software that were measured."""

    system: str
    processor: str
    device: str
    """cpu, or the accelerator's name."""
    cores: int
    threads: int
    dtype: str
    cpu_capability: str
    """The vector instructions that torch uses on the CPU."""
    python: str
    torch: str
    engines: dict[str, str]
    """Version of each engine that ran."""


@dataclass(frozen=True)
class WallTime:
    """Wall time of one step, or ratios of wall times."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class ComponentTime:
    """One component in the profiled steps: its own time, without what is nested in it."""

    name: str
    self_s: float
    """Seconds per step."""
    share: float
    """Of the time of all components; these sum to 1."""
    flop_share: float
    """Of the operations of all components; these sum to 1."""


@dataclass(frozen=True)
class OperatorTime:
    """One operator in torch's profiler, all its calls in one step."""

    name: str
    calls: float
    self_s: float
    share: float


@dataclass(frozen=True)
class ProfileRun:
    """One engine at one batch size. With an `error` its measurements are None."""

    batch: int
    engine: str
    attention: str
    """fused or explicit; library where another library runs the encoder alone."""
    error: str | None = None
    warmup_s: float | None = None
    """The first step, not among the timed ones."""
    timed_runs: int = 0
    wall_s: WallTime | None = None
    images_per_s: float | None = None
    peak_bytes: int | None = None
    """CUDA: device memory in use at its peak. CPU: growth of the resident set over one step, or
    over the first two of an engine that keeps its buffers (onnx, int8, openvino); None where it is
    below what the system resolves. MPS: growth of the driver's memory."""
    gflops: float | None = None
    """1e9 floating-point operations per second, two per multiply-accumulate; a backward pass
    counts twice a forward pass."""
    gemm_gflops: float | None = None
    """The fastest rate of torch's matrix multiplications on the encoder's shapes in this dtype,
    measured in the same run; at least the rate of the encoder itself. None for inexact engines."""
    gemm_fraction: float | None = None
    """gflops / gemm_gflops."""
    components: tuple[ComponentTime, ...] = ()
    """For engines that call the encoder's modules; the other engines fuse across components."""
    ops: tuple[OperatorTime, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class EngineInfo:
    """Preparation of an engine, and its difference to eager."""

    engine: str
    prepare_s: float
    """Seconds to compile or export; not part of a step."""
    note: str
    max_error: float | None
    """Largest difference of its tokens to the eager engine's, None for eager itself."""


@dataclass(frozen=True)
class Comparison:
    """Speed of an engine relative to the first one, with steps timed alternately."""

    batch: int
    engine: str
    baseline: str
    speed_ratio: WallTime
    """Time of the baseline over time of the engine, pair by pair: above 1 is faster."""
    dtype: str = "float32"
    baseline_dtype: str = "float32"


@dataclass(frozen=True)
class Fidelity:
    """Difference of the output in another dtype, or of an inexact engine, to plain torch's."""

    engine: str
    dtype: str
    images: int
    cosine_min: float
    """Smallest cosine to float32, over all tokens of all images; NaN where one is not finite."""
    pooled_cosine_min: float | None
    """The same of the pooled vectors; None without pooling."""
    relative_difference: float
    """Largest difference of a token's value, over float32's largest absolute value."""


@dataclass(frozen=True)
class Fit:
    """The largest batch whose step fits in the given memory."""

    engine: str
    dtype: str
    memory_bytes: int
    weight_bytes: int
    """Of the encoder, and of the engine where it holds its own (onnx, int8, openvino)."""
    image_bytes: int
    """What each further image adds at the peak, by the peaks measured."""
    batch: int
    """0 where not even one image fits."""


@dataclass(frozen=True)
class ProfileResult(Result):
    """The result of `vitcli profile`."""

    rows_at: ClassVar[str] = "runs"

    model: ModelInfo
    image_size: tuple[int, int]
    tokens: int
    step: str
    macs_per_image: int
    """Multiply-accumulates of a forward pass."""
    runs: tuple[ProfileRun, ...]
    engines: tuple[EngineInfo, ...]
    comparisons: tuple[Comparison, ...]
    machine: Machine
    verdict: str
    """Sentences: which components dominate, and what changes with batch and resolution."""
    fidelity: tuple[Fidelity, ...] = ()
    """Of each dtype but float32, where several were asked for, and of inexact engines."""
    fits: tuple[Fit, ...] = ()
    """With `--memory`."""


@dataclass(frozen=True)
class ProfileSettings:
    batches: tuple[int, ...] = (1, 8, 64)
    engines: tuple[str, ...] = ()
    """Without any, the default engine of the device and dtype; eager for a backward pass."""
    dtypes: tuple[str, ...] = ()
    """Without any, the model's own."""
    memory_bytes: int | None = None
    """Find the largest batch that fits in this memory."""
    attention: str | None = None
    """fused or explicit; None: as in the config."""
    runs: int | None = None
    backward: bool = False
    """A step is a forward and a backward pass in training mode, in place of inference."""
    ops: int = 12
    trace: Path | None = None
    """Where the Chrome trace of one step, of the first engine at the first batch, goes."""

    def check(self) -> None:
        """Refuse settings that are not possible.

        Raises:
            VitcliError: an unknown name, a value given twice, engines that cannot train or trace.
        """
        for option, values in (
            ("--batch", self.batches),
            ("--engine", self.engines),
            ("--dtype", self.dtypes),
        ):
            for value in values:
                if list(values).count(value) > 1:
                    raise VitcliError(f"{option} {value}: is given twice", "give each value once")
        for dtype in self.dtypes:
            check_choice("--dtype", dtype, DTYPES)
        for name in self.engines:
            check_engine(name)
            if self.backward:
                check_engine(name, gradients="--backward")
            if self.trace and self.engines == (name,):
                check_engine(name, profiled="--trace")
        check_choice("--attention", self.attention, get_args(AttendKind))
