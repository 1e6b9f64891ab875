"""From a request to a model that runs: config, weights, device, dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vitcli.build import build_encoder
from vitcli.checkpoints.load import Plan, load_weights, plan_weights
from vitcli.config.load import for_input_size, load_config
from vitcli.config.request import NAME_A_PRESET, ModelRequest, check_device, check_table_rule
from vitcli.config.schema import ModelConfig, PreprocessConfig
from vitcli.engines.engine import Runner
from vitcli.engines.onednn import accelerate
from vitcli.errors import VitcliError
from vitcli.nn.adapters import add_adapter_state
from vitcli.nn.encoder import VisionEncoder
from vitcli.results import LoadReport


@dataclass(frozen=True)
class Model:
    """An encoder in eval mode on its device, and the preprocessing its input needs."""

    config: ModelConfig
    encoder: VisionEncoder
    known_preprocessing: PreprocessConfig | None
    """None where neither the weights' source nor the user tells how pixels are prepared."""
    weights: str
    """Where the weights come from: `fresh (seed 0)` or the source as given."""
    fresh: bool
    device: torch.device
    dtype: torch.dtype
    asked_size: tuple[int, int] | None = None
    """`--image-size`, (height, width) in pixels."""
    runner: Runner | None = None
    """Another engine than eager; None runs `encoder` itself."""
    report: LoadReport | None = None
    """How the checkpoint was read; None for fresh weights."""

    @property
    def preprocessing(self) -> PreprocessConfig:
        """How pixels are prepared. Raises VitcliError where nothing tells it."""
        if self.known_preprocessing is None:
            raise VitcliError(
                f"{self.weights}: nothing there tells how images are prepared",
                f"preprocessor_config.json beside the weights, {NAME_A_PRESET}, or "
                "--set preprocess.KEY=VALUE",
            )
        return self.known_preprocessing

    def check_reads_images(self) -> None:
        """Raises VitcliError for an encoder of other input than decoded images, which are RGB."""
        channels = self.config.encoder.channels
        if channels != 3:
            raise VitcliError(
                f"{self.name} reads {channels} channels, and images have 3",
                "--set encoder.channels=3",
            )

    @property
    def input_size(self) -> tuple[int, int]:
        """(height, width) of what the encoder reads; its native size where it follows the image."""
        known = self.known_preprocessing and self.known_preprocessing.output_size
        return self.asked_size or known or self.config.encoder.image_size

    @property
    def engine(self) -> str:
        """What runs the encoder, one of `vitcli.engines.ENGINES`."""
        return self.runner.name if self.runner else "eager"

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.encoder.parameters())


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA, else MPS, else the CPU.

    Raises:
        VitcliError: no such device here.
    """
    check_device(name)
    here = {
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    if name == "auto":
        return torch.device(next(kind for kind, count in here.items() if count))
    kind, _, index = name.partition(":")
    if int(index or 0) >= here[kind]:
        there = ", ".join(kind for kind, count in here.items() if count)
        raise VitcliError(f"--device {name}: not available here", f"auto, {there}")
    return torch.device(name)


def torch_dtype(request: ModelRequest) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def load_model(request: ModelRequest) -> Model:
    """Build the encoder, fill it from its source or from the seed, move it to its device.

    Raises:
        VitcliError: a bad config, source, device or dtype.
    """
    device, dtype = pick_device(request.device), torch_dtype(request)
    size, report = request.image_size, None
    preprocess: PreprocessConfig | None
    if request.weights is None:
        config = request.fresh_config()
        encoder = build_encoder(config.encoder, request.seed)
        preprocess = config.preprocess
    else:
        loaded = load_weights(
            request.weights,
            preset=_preset(request),
            overrides=request.settings,
            dtype=dtype,
        )
        config, encoder, report = loaded.config, loaded.encoder, loaded.report
        config = for_input_size(config, size) if size else config
        preprocess = config.preprocess if report.preprocess_by else None
    if report:
        report = _finished(report, config, preprocess)
    check_table_rule(request.settings, config.encoder)
    weights = request.weights or f"fresh (seed {request.seed})"
    if request.adapter:
        add_adapters(encoder, request.adapter)
        weights += f" + {request.adapter}"
    encoder = accelerate(encoder.to(device, dtype).eval())
    return Model(
        config=config,
        encoder=encoder,
        runner=None if request.engine == "eager" else Runner(request.engine, encoder),
        known_preprocessing=preprocess,
        weights=weights,
        fresh=request.weights is None,
        asked_size=size,
        device=device,
        dtype=dtype,
        report=report,
    )


def add_adapters(encoder: VisionEncoder, path: str) -> None:
    """Add a run's adapter.safetensors into the encoder's weights.

    Raises:
        VitcliError: it cannot be read, or is of another encoder.
    """
    try:
        add_adapter_state(encoder, load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise VitcliError(
            f"--adapter {path}: {error}", "the adapter.safetensors of a run on these weights"
        ) from error


def plan_model(request: ModelRequest) -> tuple[Plan, LoadReport]:
    """The config and the report of a request with weights, without reading a tensor's values.

    Raises:
        VitcliError: as `load_model`.
    """
    assert request.weights is not None
    plan = plan_weights(request.weights, preset=_preset(request), overrides=request.settings)
    return plan, plan.report(torch_dtype(request))


def _preset(request: ModelRequest) -> ModelConfig | None:
    """What the user names for help with weights that do not tell everything."""
    named = request.preset or request.config_file
    return load_config(ModelConfig, request.preset, request.config_file) if named else None


def _finished(
    report: LoadReport, config: ModelConfig, preprocess: PreprocessConfig | None
) -> LoadReport:
    """The report with the preprocessing, and what happens to the position table at its size."""
    encoder = config.encoder
    resized: tuple[str, ...] = ()
    size = preprocess.output_size if preprocess else None
    if size and encoder.position in ("learned", "sincos2d"):
        before, after = encoder.grid, encoder.grid_at(size)
        if before != after:
            grids = f"{before[0]}x{before[1]} to {after[0]}x{after[1]}"
            resized = (f"position table {grids} by {encoder.position_table.resize}",)
    plain = preprocess.model_dump(mode="json") if preprocess else None
    return replace(report, preprocess=plain, tensors_resized=resized)
