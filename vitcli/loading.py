"""A model from a preset, a YAML config, somebody's checkpoint or another library."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vitcli.build import build_encoder
from vitcli.checkpoints.adapters import (
    LowRank,
    add_adapter_state,
    add_to_encoder,
    are_of_encoder,
    read_peft,
)
from vitcli.checkpoints.families.hf_processors import from_transformers
from vitcli.checkpoints.families.open_clip import from_open_clip
from vitcli.checkpoints.families.timm import from_timm
from vitcli.checkpoints.readers import is_hub_id
from vitcli.checkpoints.weights import Plan, load_weights, plan_weights
from vitcli.config.request import (
    REFERENCE,
    ModelRequest,
    check_device,
    check_settings,
    is_architecture,
    load_config,
    preset_names,
    resized_to,
    split_library,
)
from vitcli.config.schema import ModelConfig, PreprocessConfig
from vitcli.config.settings import named_settings, nearest
from vitcli.config.yaml import Document
from vitcli.engines import AUTO, check_engine
from vitcli.engines.backbone import Backbone
from vitcli.engines.reference import LibraryConfig, LibraryEncoder, fresh_reference, open_reference
from vitcli.errors import VitcliError
from vitcli.model import Model
from vitcli.nn.encoder import VisionEncoder
from vitcli.results import LoadReport


def load(
    name_or_source: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    config: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    set: Mapping[str, Any] | None = None,
    seed: int = 0,
    image_size: int | tuple[int, int] | None = None,
    device: str = "auto",
    dtype: str = "float32",
    which: str | None = None,
    prefix: str | None = None,
    engine: str | None = None,
) -> Model:
    """A model from a preset, a YAML config or somebody's checkpoint.

    Args:
        name_or_source: a preset's exact name (`vitcli.presets()`), a `.yaml` config, or a
            checkpoint: a file, a directory or a hub id. Where a path exists, it is the path.
            `timm:resnet50` is an architecture of timm, run by timm; `timm:`, `transformers:` or
            `open_clip:` before a checkpoint runs it by that library.
        preset: a preset by name; with a checkpoint it fills in what the checkpoint lacks.
        config: a YAML config file.
        weights: a checkpoint, as in `name_or_source`. Without any, weights are random.
        adapter: a training run's adapter.safetensors, added into the weights.
        set: dotted config keys to values, as `--set` takes them.
        seed: of random weights.
        image_size: (height, width) in pixels, or the side of a square.
        device: auto, cpu, cuda, cuda:1 or mps; auto is CUDA, else MPS, else the CPU.
        dtype: float32, bfloat16, float16 or float64.
        which: "ema" or "raw", where a checkpoint has an averaged copy of its weights; None is the
            average.
        prefix: what precedes the vision tower's tensor names, if it is not found automatically.
        engine: one of `vitcli.engines.ENGINES` or auto; None is the fastest that needs no
            preparation. "reference" runs a checkpoint by its own library (extra `reference`).

    Raises:
        VitcliError: a bad config, source, device or dtype, or a name that can be read two ways;
            its `hint` says what to do.
    """
    if name_or_source is not None:
        text = os.fspath(name_or_source)
        kind = kind_of(text)
        taken = {"preset": preset, "config": config, "weights": weights}
        if taken[kind] is not None:
            raise VitcliError(
                f"vitcli.load: {kind} is given twice (got {text} and {kind}={taken[kind]})",
                "give it once",
            )
        taken[kind] = text
        preset, config, weights = (taken[key] for key in ("preset", "config", "weights"))  # type: ignore[assignment]
    return load_model(
        ModelRequest(
            preset=preset,
            config_file=None if config is None else Path(config),
            settings=named_settings(set),
            weights=None if weights is None else os.fspath(weights),
            adapter=None if adapter is None else os.fspath(adapter),
            seed=seed,
            image_size=(image_size, image_size) if isinstance(image_size, int) else image_size,
            device=device,
            dtype=dtype,
            which=which,
            prefix=prefix,
            engine=engine,
        ),
        by_library=True,
    )


def as_model(model: Model | str | os.PathLike[str], by_library: bool = False) -> Model:
    """A model, or what `load` makes of its name.

    Raises:
        VitcliError: without `by_library`, an encoder that its own library runs; as `load`.
    """
    loaded = model if isinstance(model, Model) else load(model)
    if not by_library:
        loaded.check_own("answer to this")
    return loaded


def kind_of(text: str) -> str:
    """Which argument of `load` a name or source is: preset, config or weights."""
    if split_library(text)[0]:
        return "preset" if is_architecture(text) else "weights"
    path = Path(text).expanduser()
    if text in preset_names():
        if path.exists():
            raise VitcliError(
                f"{text}: is both a preset and a path in this folder",
                f"write preset={text!r} or weights='./{text}'",
            )
        return "preset"
    if path.suffix.lower() in (".yaml", ".yml"):
        return "config"
    if path.exists() or is_hub_id(text) or path.suffix or path.is_absolute():
        return "weights"
    raise VitcliError(
        f"{text}: is not a preset, a file, a directory or a hub id",
        nearest(text, preset_names(), "run `vitcli presets` for the list"),
    )


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
        raise VitcliError(
            f"--device {name}: is not available (expected auto, {there})", "--device auto"
        )
    return torch.device(name)


def torch_dtype(request: ModelRequest) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def load_model(request: ModelRequest, by_library: bool = False) -> Model:
    """Build the encoder, fill it from its source or from the seed, move it to its device.

    Args:
        by_library: whoever asks can do with an encoder that its own library runs.

    Raises:
        VitcliError: a bad config, source, device or dtype.
    """
    device, dtype = pick_device(request.device), torch_dtype(request)
    if request.by_library:
        if not by_library:
            raise _not_by_library(request)
        return _load_by_library(request, device, dtype)
    if request.engine not in (None, AUTO):
        check_engine(request.engine, request.dtype, device.type)
    size, report = request.image_size, None
    preprocess: PreprocessConfig | None
    peft = read_peft(request.adapter) if request.adapter else None
    of_encoder = peft is None or are_of_encoder(peft)
    if request.weights is None:
        if not of_encoder:
            raise VitcliError(
                f"--adapter {request.adapter}: --weights is missing", "add --weights SOURCE"
            )
        config = request.fresh_config()
        encoder = build_encoder(config.encoder, request.seed)
        preprocess = config.preprocess
    else:
        adapters = None if of_encoder else peft
        loaded = load_weights(request.weights, dtype=dtype, adapters=adapters, **_how(request))
        config, encoder, report = loaded.config, loaded.encoder, loaded.report
        preprocess = config.preprocess if report.preprocess_by else None
    check_settings(request.settings, config)
    weights = request.weights or f"random (seed {request.seed})"
    if request.adapter:
        if of_encoder:
            add_adapters(encoder, request.adapter, peft)
        weights += f" + {request.adapter}"
    encoder = encoder.to(device, dtype).eval()
    return Model(
        config=config,
        encoder=encoder,
        asked_engine=request.engine,
        known_preprocessing=preprocess,
        weights=weights,
        fresh=request.weights is None,
        asked_size=size,
        device=device,
        dtype=dtype,
        report=report,
        request=request,
    )


def _load_by_library(request: ModelRequest, device: torch.device, dtype: torch.dtype) -> Model:
    """An encoder that its own library runs, unchanged.

    Raises:
        VitcliError: what the library cannot load, or its preprocessing cannot be followed.
    """
    source, size = request.weights, request.image_size
    if source is None:
        assert request.preset is not None
        backbone = fresh_reference(
            request.preset, seed=request.seed, device=device, dtype=dtype, image_size=size
        )
    else:
        backbone = open_reference(source, device=device, dtype=dtype, image_size=size)
    preprocess = _library_preprocess(backbone, request)
    known = preprocess and preprocess.output_size
    native = size or known or backbone.input_size or (224, 224)
    encoder = LibraryEncoder(backbone, native).eval()
    name = f"{backbone.library}:{backbone.name}"
    report = None
    if source is not None:
        pooled = () if encoder.gives_pooled else ("its pooled vector is the mean of the patches",)
        report = LoadReport(
            source=source,
            family=backbone.name,
            library=f"{backbone.library} {backbone.version}",
            files=(),
            tensors_used=len(backbone.module.state_dict()),
            tensors_dropped=(),
            stored_dtypes=(),
            dtype=request.dtype,
            settled=(),
            preprocess_by=backbone.library if preprocess else None,
            preprocess=None if preprocess is None else preprocess.model_dump(mode="json"),
            notes=(f"run by {backbone.library}, unchanged", *pooled),
        )
    return Model(
        config=cast(ModelConfig, LibraryConfig(name, encoder.shape)),
        encoder=encoder,
        asked_engine=REFERENCE,
        known_preprocessing=preprocess,
        weights=source or f"random (seed {request.seed})",
        fresh=source is None,
        asked_size=size,
        device=device,
        dtype=dtype,
        report=report,
        request=request,
    )


def _library_preprocess(backbone: Backbone, request: ModelRequest) -> PreprocessConfig | None:
    """The library's own preprocessing, the user's settings over it, at the size asked for.

    Raises:
        VitcliError: settings of the library that cannot be followed, where the user gives none.
    """
    settings, found = backbone.prepared_by, None
    try:
        if settings and backbone.library == "timm":
            found = from_timm(settings, source="timm's pretrained_cfg")
        elif settings and backbone.library == "open_clip":
            found = from_open_clip(settings)
        elif settings:
            found = from_transformers(settings).config
    except VitcliError:
        if not request.settings:
            raise
    if request.settings:
        start = found or PreprocessConfig.for_output(backbone.input_size or (224, 224))
        document = Document(backbone.name, {"preprocess": start.model_dump(mode="json")})
        found = load_config(ModelConfig, None, None, request.settings, document).preprocess
    return resized_to(found, request.image_size) if found and request.image_size else found


def add_adapters(
    encoder: VisionEncoder, path: str, peft: Mapping[str, LowRank] | None = None
) -> None:
    """Add a run's adapters into the encoder's weights; `peft` is what its PEFT file holds.

    Raises:
        VitcliError: it cannot be read, or is of another encoder.
    """
    try:
        if peft is not None:
            add_to_encoder(encoder, peft)
        else:
            add_adapter_state(encoder, load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise VitcliError(
            f"--adapter {path}: {error}", "name the adapter.safetensors of a run on these weights"
        ) from error


def _not_by_library(request: ModelRequest) -> VitcliError:
    named = request.weights or request.preset or ""
    option = "--preset" if is_architecture(named) else "--weights"
    engine = "" if split_library(named)[0] else f" --engine {REFERENCE}"
    return VitcliError(
        f"{named}: is run by its own library, which this command does not support (expected "
        "encode, embed, neighbors, probe, compare, profile, params or attn-entropy)",
        f"vitcli encode {option} {shlex.quote(named)}{engine}",
    )


def plan_model(request: ModelRequest) -> tuple[Plan, LoadReport]:
    """The config and the report of a request with weights, without reading a tensor's values.

    Raises:
        VitcliError: as `load_model`.
    """
    assert request.weights is not None
    if request.by_library:
        raise _not_by_library(request)
    plan = plan_weights(request.weights, **_how(request))
    return plan, plan.report(torch_dtype(request))


def _how(request: ModelRequest) -> dict[str, Any]:
    """What `plan_weights` takes; a preset or config completes a checkpoint's settings."""
    preset, file = request.preset, request.config_file
    return {
        "preset": load_config(ModelConfig, preset, file) if preset or file else None,
        "overrides": request.settings,
        "image_size": request.image_size,
        "which": request.which,
        "prefix": request.prefix,
    }
