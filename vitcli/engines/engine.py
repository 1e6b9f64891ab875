"""An engine ready to run an encoder: chosen, prepared for a size, checked against plain torch."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from vitcli.config.request import REFERENCE
from vitcli.config.yaml import read_json
from vitcli.engines import AUTO, ENGINES, check_engine
from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.nn.encoder import EncoderOutput, Observer, VisionEncoder, hooked, layer_points
from vitcli.stats import largest, largest_difference

Layers = tuple[EncoderOutput, list[Tensor]]
"""An encoder's output, and the (B, P+N, D) tokens at each of `layer_points`."""


@dataclass(frozen=True)
class Engine:
    """One way to run an encoder, ready for its first images."""

    name: str
    run_layers: Callable[[Tensor], Layers]
    """Images (B, C, height, width) to the encoder's output and, where the engine was prepared for
    them, every layer's tokens; without gradients."""
    version: str
    prepare_s: float = 0.0
    """Seconds of compiling or exporting, the first call of a compiled graph included."""
    note: str = ""
    weight_bytes: int = 0
    """Bytes of weights that it holds itself beside the encoder's; it then keeps its buffers too."""

    def run(self, images: Tensor) -> EncoderOutput:
        return self.run_layers(images)[0]


def prepare_engine(
    name: str,
    encoder: VisionEncoder,
    images: Tensor,
    *,
    layers: bool = False,
    batches: Collection[int] = (1,),
) -> Engine:
    """An engine for images of this height, width, dtype and device, in batches of any size.

    The encoder is in eval mode, and its parameters must not change afterwards.

    Args:
        images: an example, of any batch size.
        layers: give every layer's tokens too.
        batches: sizes to be ready for; others may compile once more when they come.

    Raises:
        VitcliError: an unknown engine, one that is not installed, or one that cannot run this.
    """
    check_engine(name, str(images.dtype).removeprefix("torch."), images.device.type)
    module = importlib.import_module(f"vitcli.engines.{ENGINES[name].module}")
    return cast(Engine, getattr(module, f"prepare_{name}")(encoder, images, layers, batches))


def default_engine(device: torch.device, dtype: torch.dtype) -> str:
    """The faster of those that need no preparation and give torch's own numbers to rounding."""
    from vitcli.engines.pytorch import onednn_runs

    return "onednn" if onednn_runs(device, dtype) else "eager"


def faster_way(device: torch.device, dtype: torch.dtype) -> str:
    """A much faster device or type of this machine, in one line; empty where there is none.

    By what the processor says of itself: AMX and AVX512-BF16 multiply bfloat16 in hardware.
    """
    if dtype not in (torch.float32, torch.float64):
        return ""
    measure = "`vitcli profile --dtype float32 --dtype bfloat16` measures speed and fidelity"
    if device.type == "cuda":
        return f"this GPU runs bfloat16 faster than {str(dtype)[6:]}: --dtype bfloat16; {measure}"
    if torch.cuda.is_available():
        return "this machine has a CUDA device: --device cuda is faster"
    checks = {"AMX": "_is_amx_tile_supported", "AVX512-BF16": "_is_avx512_bf16_supported"}
    for name, check in checks.items():
        if device.type == "cpu" and getattr(torch.cpu, check, lambda: False)():
            return f"this processor has bfloat16 units ({name}): --dtype bfloat16; {measure}"
    return ""


@torch.no_grad()
def largest_error(engine: Engine, encoder: VisionEncoder, images: Tensor) -> float:
    """Largest difference of any output to the encoder's own by plain torch.

    Absolute where the output's largest value is below 1, relative to that value above; NaN where
    either is not finite.
    """
    reference: EncoderOutput = encoder(images)
    return largest(
        [
            largest_difference(ours, theirs) / max(1.0, float(theirs.abs().max()))
            for ours, theirs in zip(engine.run(images), reference, strict=True)
            if ours is not None and theirs is not None
        ]
    )


def shared_copy(encoder: VisionEncoder) -> VisionEncoder:
    """The same encoder in eval mode, sharing its parameters, for an engine to change."""
    shared = {id(parameter): parameter for parameter in encoder.parameters()}
    return copy.deepcopy(encoder, shared).eval()


class Graph(nn.Module):
    """An encoder as compilers and exporters take it: one tensor in, a flat tuple of tensors out.

    What the encoder gives comes first, then (on request) every layer's tokens. `names` says what
    each output is: a field of EncoderOutput, or `layer_0`, `layer_1` and so on in the order of
    `layer_points`.
    """

    def __init__(self, encoder: VisionEncoder, images: Tensor, layers: bool = False) -> None:
        super().__init__()
        self.encoder = encoder
        self._seen: list[Tensor] = []
        with torch.no_grad():
            answer: EncoderOutput = encoder(images)
        self.fields = [name for name, value in answer._asdict().items() if value is not None]
        points = layer_points(encoder) if layers else []
        for _, module in points:
            module.register_forward_hook(self._see)
        self.names = [*self.fields, *(f"layer_{i}" for i in range(len(points)))]

    def _see(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._seen.append(output)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        self._seen = []
        answer = self.encoder(images)
        present = [value for value in answer if value is not None]
        outputs = (*present, *self._seen)
        self._seen = []
        return outputs

    def read(self, outputs: Sequence[Tensor]) -> Layers:
        """The encoder's output and the layers' tokens, from the graph's outputs."""
        empty = dict.fromkeys(EncoderOutput._fields)
        present = dict(zip(self.fields, outputs, strict=False))
        return EncoderOutput(**(empty | present)), list(outputs[len(self.fields) :])  # type: ignore[arg-type]


class Runner:
    """Runs a model's encoder by one engine, prepared for each size of image when it comes.

    `name` is an engine of ENGINES, AUTO, or None for the default. With AUTO the first images
    decide; `choice` then says how, in words.
    """

    def __init__(self, name: str | None, encoder: VisionEncoder) -> None:
        parameter = next(encoder.parameters())
        self.encoder = encoder
        self.name = name or default_engine(parameter.device, parameter.dtype)
        self.choice = ""
        self._engines: dict[tuple[int, ...], Engine] = {}

    def __call__(self, images: Tensor, observe: Observer | None = None) -> EncoderOutput:
        """(B, C, height, width) to the encoder's output, without gradients.

        `observe` is called with the tokens at each of `layer_points`, in order.

        Raises:
            VitcliError: an engine that is not installed or cannot run this encoder.
        """
        self.choose(images)
        layers = observe is not None
        points = layer_points(self.encoder) if layers else []
        observers = [(module, observe) for _, module in points if observe]
        if ENGINES[self.name].hooks or self.name == REFERENCE:  # no layer is kept
            with torch.inference_mode(), self.kernels(), hooked(observers):
                answer: EncoderOutput = self.encoder(images)
            return answer
        key = (*images.shape[1:], int(layers))
        if key not in self._engines:
            self._engines[key] = prepare_engine(
                self.name, self.encoder, images, layers=layers, batches=(images.shape[0],)
            )
        output, kept = self._engines[key].run_layers(images)
        for (_, see), tokens in zip(observers, kept, strict=False):
            see(tokens)
        return output

    def choose(self, images: Tensor) -> None:
        """Choose what AUTO is by images of the shape to come; a named engine stays."""
        if self.name == AUTO:
            self.name, self.choice = fastest(self.encoder, images)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Inside the context the encoder itself, called as a module, runs with these kernels.

        Engines whose modules are not called leave it plain torch.
        """
        from vitcli.engines.pytorch import onednn_kernels

        with onednn_kernels(self.encoder) if self.name == "onednn" else nullcontext():
            yield


def synchronize(device: torch.device) -> None:
    """Wait until the accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(step: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of one call, accelerator included."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


TRIAL_RUNS = 3


def fastest(encoder: VisionEncoder, images: Tensor) -> tuple[str, str]:
    """The engine that runs these images fastest here, and the choice in words.

    The median of three steps of each engine decides, taken in turn. It is remembered per machine,
    version of torch, vector instructions, engines installed, encoder, shape, dtype and number of
    threads.
    """
    memory = _cache_folder() / "engines.json"
    key = _trial_key(encoder, images)
    remembered = _read_choices(memory)
    if remembered.get(key) in ENGINES:
        return remembered[key], f"--engine auto: {remembered[key]}, as measured here before"
    engines: dict[str, Engine] = {}
    for name, kind in ENGINES.items():
        if not (kind.own_encoder and kind.exact):
            continue
        with suppress(VitcliError):  # not installed, or not for this dtype or device
            engines[name] = prepare_engine(
                name, encoder, images, layers=True, batches=(len(images),)
            )
            engines[name].run(images)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(TRIAL_RUNS):
        for name, engine in engines.items():
            times[name].append(timed(partial(engine.run, images), images.device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(medians, key=lambda name: medians[name])
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(memory) as file:
            file.write(json.dumps(_read_choices(memory) | {key: best}, indent=1).encode())
    shown = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in medians.items())
    each = f"{shown} per step of {len(images)}"
    return best, f"--engine auto: {best} ({each}), remembered in {memory}"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vitcli"


def _read_choices(memory: Path) -> dict[str, str]:
    try:
        return read_json(memory, dict[str, str])
    except VitcliError:  # not there yet, or damaged: measured again
        return {}


def onednn_limits() -> dict[str, str]:
    """What limits oneDNN's vector instructions, by variable: its name now, and its earlier one."""
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return {name: os.environ[name] for name in names if name in os.environ}


def _trial_key(encoder: VisionEncoder, images: Tensor) -> str:
    """Everything that decides which engine is fastest; values of weights do not."""
    parts = [
        platform.platform(),
        platform.processor(),
        platform.node(),
        str(torch.get_num_threads()),
        torch.__version__,
        *(name for name in ("onnxruntime", "openvino") if importlib.util.find_spec(name)),
        torch.backends.cpu.get_cpu_capability(),
        *map("=".join, onednn_limits().items()),
        str(images.device),
        str(images.dtype),
        str(tuple(images.shape)),
        str(encoder),
        *(f"{name} {tuple(p.shape)}" for name, p in encoder.named_parameters()),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
