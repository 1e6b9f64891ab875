"""A model: loading, preprocessing, features and attention."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitcli.build import build_encoder
from vitcli.checkpoints.adapters import LowRank, add_to_encoder, are_of_encoder, read_peft
from vitcli.checkpoints.families.hf_processors import from_transformers
from vitcli.checkpoints.families.open_clip import from_open_clip
from vitcli.checkpoints.families.timm import from_timm
from vitcli.checkpoints.load import Plan, load_weights, plan_weights
from vitcli.checkpoints.readers import is_hub_id
from vitcli.config.load import (
    NAME_A_PRESET,
    REFERENCE,
    ModelRequest,
    Setting,
    check_device,
    check_table_rule,
    is_architecture,
    layer_index,
    load_config,
    nearest,
    preset_names,
    resized_to,
    split_library,
)
from vitcli.config.schema import ModelConfig, PreprocessConfig
from vitcli.config.yaml import Document
from vitcli.engines import AUTO, check_engine
from vitcli.engines.backbone import Backbone
from vitcli.engines.engine import Runner, faster_way
from vitcli.engines.library import LibraryConfig, LibraryEncoder
from vitcli.engines.reference import fresh_reference, open_reference
from vitcli.errors import VitcliError
from vitcli.images.decode import DecodedImage, decode, from_pillow, is_quick
from vitcli.images.preprocess import preprocess
from vitcli.nn.adapters import add_adapter_state
from vitcli.nn.encoder import (
    EncoderOutput,
    VisionEncoder,
    attentions,
    explicit_attention,
    hooked,
    layer_points,
)
from vitcli.results import LoadReport, ModelInfo

Picture = str | os.PathLike[str] | Image.Image | np.ndarray
"""One image: a file's path, a Pillow image, or an array (H, W, 3) of 8-bit RGB."""
Pictures = Picture | Iterable[Picture]
"""One image or several."""
Color = tuple[int, int, int]
AT_ONCE = 16
"""Images in one forward pass; more make a CPU no faster and the activations larger."""


def picture_list(images: Pictures) -> list[Picture]:
    """One image or several as a list: a string is one path, never its characters."""
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, np.ndarray):
        return list(images) if images.ndim == 4 else [images]
    return list(images) if isinstance(images, Iterable) else [images]


def read_picture(picture: Picture, background: Color = (255, 255, 255)) -> DecodedImage:
    """Upright RGB pixels of one image; transparency is composited on `background`.

    A file whose header promises no quick decoding is decoded in a process of its own, within
    `images.TIMEOUT_S` seconds and `images.MEMORY_BYTES`.

    Raises:
        VitcliError: another kind of object, or an array of another shape or type.
        ImageError: a file that cannot be read.
    """
    if isinstance(picture, str | os.PathLike):
        if is_quick(picture):
            return decode(picture, background=background)
        from vitcli.images.pool import decode_within  # few files need it

        return decode_within(picture, background=background)
    if isinstance(picture, Image.Image):
        return from_pillow(picture, background=background)
    if isinstance(picture, np.ndarray):
        if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
            raise VitcliError(
                f"image array: cannot be read (got {picture.shape} {picture.dtype}, expected "
                "(H, W, 3) uint8)",
                "convert it to 8-bit RGB, or give the tensor that model.transform makes",
            )
        return from_pillow(Image.fromarray(np.ascontiguousarray(picture)))
    raise VitcliError(
        f"image: cannot be read (got {type(picture).__name__}, expected a path, a Pillow image or "
        "an array (H, W, 3))",
        "give one of these, or a list of them",
    )


class _Layers(dict[int, "Features"]):
    """Layers by number; a negative number counts from the last, as in a list."""

    depth: int = 0

    def __missing__(self, layer: int) -> Features:
        if -self.depth - 1 <= layer < 0 and layer + self.depth + 1 in self:
            return self[layer + self.depth + 1]
        raise KeyError(layer)


@dataclass(frozen=True)
class Features:
    """Vectors of the tokens of B images, on the model's device.

    At the end of the encoder the tokens are those after the final norm. In `layers` they are as
    the blocks pass them on: 0 is the input of the first block, i the output of block i, -1 the
    last, as transformers' `hidden_states`; `pooled`, `output` and `layers` are empty there.
    """

    patches: Tensor
    """(B, h, w, D), h rows and w columns of patches."""
    cls: Tensor | None = None
    """(B, D); None where the encoder has no CLS token."""
    registers: Tensor | None = None
    """(B, R, D); None where the encoder has no registers."""
    dist: Tensor | None = None
    """(B, D), DeiT's distillation token; None where the encoder has none."""
    pooled: Tensor | None = None
    """(B, D), or (B, 2D) for CLS + mean; None without pooling."""
    output: Tensor | None = None
    """Output of the head, (B, width); None without a head."""
    deepstack: Tensor | None = None
    """(B, K, cells, width), what the K blocks of `deepstack` give (Qwen3-VL); None without."""
    layers: Mapping[int, Features] = field(default_factory=dict)
    """The layers asked for, by number."""

    def __repr__(self) -> str:
        shapes = {
            name: tuple(value.shape)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        layers = f", layers {sorted(self.layers)}" if self.layers else ""
        return "Features(" + ", ".join(f"{k} {v}" for k, v in shapes.items()) + layers + ")"


@dataclass(frozen=True)
class Model:
    """A vision encoder in eval mode on its device, and the preprocessing that its input needs.

    `transform` turns images into the tensor that `encoder` (a plain `torch.nn.Module`) reads,
    `features` gives vectors and `attention` attention weights. `vitcli.load` makes one.
    """

    config: ModelConfig
    encoder: VisionEncoder
    known_preprocessing: PreprocessConfig | None
    """None if neither the weights' source nor the user gives a preprocessing config."""
    weights: str
    """Where the weights come from: `random (seed 0)` or the source as given."""
    fresh: bool
    """Whether the weights are random."""
    device: torch.device
    dtype: torch.dtype
    asked_size: tuple[int, int] | None = None
    """`--image-size`, (height, width) in pixels."""
    asked_engine: str | None = None
    """`--engine`; None for the default."""
    report: LoadReport | None = None
    """How the checkpoint was read; None for random weights."""
    request: ModelRequest | None = None
    """What it was loaded from."""

    def __post_init__(self) -> None:
        known = self.known_preprocessing
        if known and known.fit:
            _ = known.fit_size  # an error before any image is read

    @property
    def preprocessing(self) -> PreprocessConfig:
        """The preprocessing config. Raises VitcliError if it is unknown."""
        if self.known_preprocessing is None:
            raise VitcliError(
                f"{self.weights}: no preprocessing config found",
                f"put preprocessor_config.json beside the weights, or add {NAME_A_PRESET} or "
                "--set preprocess.KEY=VALUE",
            )
        return self.known_preprocessing

    def check_reads_images(self) -> None:
        """Raises VitcliError for an encoder of other input than decoded images, which are RGB."""
        channels = self.config.encoder.channels
        if channels != 3:
            raise VitcliError(
                f"{self.name}: does not read RGB images (got {channels} channels, expected 3)",
                "--set encoder.channels=3",
            )

    @property
    def by_library(self) -> bool:
        """Run by its own library, by `--engine reference`."""
        return isinstance(self.encoder, LibraryEncoder)

    def check_own(self, what: str) -> None:
        """Raises VitcliError for an encoder that its own library runs; `what` is not there."""
        if self.by_library:
            raise VitcliError(
                f"{self.name}: is run by its own library, which gives no {what} here",
                "use an encoder of `vitcli presets` or a family of `vitcli families`",
            )

    @property
    def input_size(self) -> tuple[int, int]:
        """(height, width) of what the encoder reads; its native size where it follows the image."""
        known = self.known_preprocessing and self.known_preprocessing.output_size
        return self.asked_size or known or self.config.encoder.image_size

    @cached_property
    def runner(self) -> Runner:
        """What runs `encoder`: an engine around it, which leaves it as it is."""
        return Runner(self.asked_engine, self.encoder)

    @property
    def engine(self) -> str:
        """What runs the encoder, one of `vitcli.engines.ENGINES` (auto until it has chosen)."""
        return self.runner.name

    @property
    def faster_way(self) -> str:
        """A hint about a much faster dtype or engine on this machine; empty if there is none."""
        return faster_way(self.device, self.dtype)

    def choose_engine(self, batch: int = AT_ONCE) -> str:
        """Resolve `--engine auto` by a trial on batches of this size; the choice as a sentence."""
        channels = self.config.encoder.channels
        zeros = torch.zeros(batch, channels, *self.input_size, dtype=self.dtype)
        self.runner.choose(zeros.to(self.device))
        return self.runner.choice

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.encoder.parameters())

    def __repr__(self) -> str:
        c = self.config.encoder
        height, width = self.input_size
        heads = f", {c.heads} heads" if c.heads else ""
        return (
            f"Model {self.name}: {self.parameters:,} parameters, {c.depth} "
            f"{'layers' if self.by_library else 'blocks'}, {c.hidden} hidden{heads}\n"
            f"  input: {height}x{width} px, {c.patch_size} px patches, "
            f"{c.prefix_tokens} prefix token{'' if c.prefix_tokens == 1 else 's'}\n"
            f"  weights: {self.weights}\n"
            f"  {self.dtype_name} on {self.device}, {self.engine} engine"
        )

    def transform(self, images: Pictures, *, background: Color = (255, 255, 255)) -> Tensor:
        """Images as the encoder reads them, (B, 3, height, width) on its device in its dtype.

        Resized, cropped and normalized as the library of the weights does it.

        Args:
            images: a path, a Pillow image, an array (H, W, 3) of 8-bit RGB, or a list of them.
            background: red, green, blue behind transparent pixels, 0 to 255.

        Raises:
            VitcliError: no image, unknown preprocessing, or images of different sizes for an
                encoder that keeps each image's own size.
            ImageError: a file that cannot be read.
        """
        self.check_reads_images()
        pictures = picture_list(images)
        if not pictures:
            raise VitcliError("images: the list is empty", "give at least one image")
        pixels = [
            torch.from_numpy(
                preprocess(read_picture(picture, background).image, self.preprocessing)
            )
            for picture in pictures
        ]
        sizes = {tuple(item.shape[-2:]) for item in pixels}
        if len(sizes) > 1:
            shown = ", ".join(f"{height}x{width}" for height, width in sorted(sizes))
            raise VitcliError(
                f"images: their sizes differ (got {shown}), and {self.name} does not resize to "
                "one size",
                "call it once per image, or vitcli.load(..., image_size=N)",
            )
        return torch.stack(pixels).to(self.device, self.dtype)

    @torch.no_grad()
    def features(self, images: Pictures | Tensor, layers: Sequence[int] = ()) -> Features:
        """The vectors of B images.

        The modules of `encoder` are called, so hooks on them see what they give.

        Args:
            images: as in `transform`, or the tensor that it made.
            layers: layers to keep too, in `.layers`; see `Features`.

        Raises:
            VitcliError: a layer that the encoder does not have; as `transform`.
        """
        depth = self.config.encoder.depth
        wanted = sorted({layer_index(layer, depth, "layers=") for layer in layers})
        pixels = self._pixels(images)
        modules = [module for _, module in layer_points(self.encoder)[: depth + 1]]
        kept: dict[int, list[Tensor]] = {layer: [] for layer in wanted}
        outputs: list[EncoderOutput] = []
        points = [(modules[layer], kept[layer].append) for layer in wanted]
        with self.runner.kernels(), hooked(points):
            for batch in pixels.split(AT_ONCE):
                outputs.append(self.encoder(batch))
        grid = self.encoder.front_end.grid(pixels)
        grids = getattr(self.encoder, "layer_grids", {})  # stages of another library differ
        found = _Layers({i: self._tokens(torch.cat(kept[i]), grids.get(i, grid)) for i in wanted})
        found.depth = depth
        ends: dict[str, Any] = {
            name: None if values[0] is None else torch.cat(values)
            for name, values in zip(EncoderOutput._fields, zip(*outputs, strict=True), strict=True)
            if name != "tokens_before_norm"
        }
        tokens = ends.pop("tokens")
        assert tokens is not None
        return replace(self._tokens(tokens, grid), **ends, layers=found)

    @torch.no_grad()
    def attention(self, images: Pictures | Tensor, block: int = -1) -> Tensor:
        """The attention weights of one block, (B, heads, N, N): a row per query, each sums to 1.

        N counts prefix tokens (CLS, registers), then patches row by row.

        Args:
            images: as in `transform`, or the tensor that it made.
            block: 1 is the first, -1 the last.

        Raises:
            VitcliError: a block that the encoder does not have; a library that returns no such
                weights; as `transform`.
        """
        by_library = isinstance(self.encoder, LibraryEncoder)
        depth = self.config.encoder.depth if by_library else len(attentions(self.encoder))
        if block == 0 or not -depth <= block <= depth:
            raise VitcliError(
                f"block={block}: the encoder does not have this block (got {block}, expected 1 "
                f"to {depth}, or -1 for the last)",
                f"block={depth}",
            )
        pixels = self._pixels(images)
        rows: list[Tensor] = []
        if isinstance(self.encoder, LibraryEncoder):
            index = block - 1 if block > 0 else block
            return torch.cat([self.encoder.attention(x)[index] for x in pixels.split(1)])
        with explicit_attention(self.encoder) as probabilities:
            module = probabilities[block - 1 if block > 0 else block]
            with self.runner.kernels(), hooked([(module, rows.append)]):
                for batch in pixels.split(AT_ONCE):
                    self.encoder(batch)
        return torch.cat(rows)

    def _pixels(self, images: Pictures | Tensor) -> Tensor:
        if not isinstance(images, Tensor):
            return self.transform(images)
        channels = self.config.encoder.channels
        if images.ndim != 4 or images.shape[1] != channels or not len(images):
            raise VitcliError(
                f"images: the tensor has the wrong shape (got {tuple(images.shape)}, expected "
                f"(B, {channels}, height, width))",
                "make it with model.transform(images)",
            )
        return images.to(self.device, self.dtype)

    def _tokens(self, tokens: Tensor, grid: tuple[int, int]) -> Features:
        """(B, P+N, D) by kind."""
        parts, start = {}, 0
        for kind, rows in self.encoder.front_end.prefix.items():
            parts[kind] = tokens[:, start : start + len(rows)]
            start += len(rows)
        cls, dist = (parts[kind][:, 0] if kind in parts else None for kind in ("cls", "dist"))
        patches = tokens[:, start:].unflatten(1, grid)
        return Features(patches, cls, parts.get("registers"), dist)


def model_info(model: Model) -> ModelInfo:
    """What a result says of the model that it is about."""
    encoder = model.config.encoder
    return ModelInfo(
        model.name,
        model.parameters,
        encoder.hidden,
        encoder.depth,
        encoder.heads,
        model.weights,
        str(model.device),
        model.dtype_name,
        model.report,
    )


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
    settings = tuple(
        Setting(tuple(key.split(".")), value, f"set[{key!r}]") for key, value in (set or {}).items()
    )
    return load_model(
        ModelRequest(
            preset=preset,
            config_file=None if config is None else Path(config),
            settings=settings,
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
                f"--adapter {request.adapter}: --weights is missing",
                "add --weights SOURCE",
            )
        config = request.fresh_config()
        encoder = build_encoder(config.encoder, request.seed)
        preprocess = config.preprocess
    else:
        loaded = load_weights(
            request.weights,
            preset=_preset(request),
            overrides=request.settings,
            dtype=dtype,
            image_size=size,
            which=request.which,
            prefix=request.prefix,
            adapters=None if of_encoder else peft,
        )
        config, encoder, report = loaded.config, loaded.encoder, loaded.report
        preprocess = config.preprocess if report.preprocess_by else None
    check_table_rule(request.settings, config.encoder)
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
    return VitcliError(
        f"{request.weights or request.preset}: is run by its own library, which this command does "
        "not support",
        "vitcli encode, embed, neighbors, probe, compare, params and attn-entropy run it",
    )


def plan_model(request: ModelRequest) -> tuple[Plan, LoadReport]:
    """The config and the report of a request with weights, without reading a tensor's values.

    Raises:
        VitcliError: as `load_model`.
    """
    assert request.weights is not None
    if request.by_library:
        raise _not_by_library(request)
    plan = plan_weights(
        request.weights,
        preset=_preset(request),
        overrides=request.settings,
        image_size=request.image_size,
        which=request.which,
        prefix=request.prefix,
    )
    return plan, plan.report(torch_dtype(request))


def _preset(request: ModelRequest) -> ModelConfig | None:
    """The preset or config that completes a checkpoint's settings."""
    named = request.preset or request.config_file
    return load_config(ModelConfig, request.preset, request.config_file) if named else None
