"""A model: the images it takes, its preprocessing, features and attention; images as batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitcli.config.request import NAME_A_PRESET, ModelRequest
from vitcli.config.schema import ModelConfig, PreprocessConfig
from vitcli.config.variants import Grid
from vitcli.engines.engine import Runner, faster_way
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.images.decode import DecodedImage, ImageError, decode, from_pillow, is_quick
from vitcli.images.preprocess import Box, grid_box, preprocess
from vitcli.images.synthetic import synthetic_image
from vitcli.images.workers import decode_within
from vitcli.nn.encoder import (
    EncoderOutput,
    VisionEncoder,
    attentions,
    explicit_attention,
    hooked,
    layer_points,
)
from vitcli.results import FailedImage, LoadReport, ModelInfo

AT_ONCE = 16
"""Images in one forward pass; more make a CPU no faster and the activations larger."""
Picture = str | PathLike[str] | Image.Image | np.ndarray
"""One image: a file's path, a Pillow image, or an array (H, W, 3) of 8-bit RGB."""
Pictures = Picture | Iterable[Picture]
"""One image or several."""
Color = tuple[int, int, int]


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
        tensors = ((name, v) for name, v in vars(self).items() if isinstance(v, Tensor))
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors)
        layers = f", layers {sorted(self.layers)}" if self.layers else ""
        return f"Features({shapes}{layers})"


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
                "--set encoder.channels=3" if self.fresh else "name a checkpoint of RGB images",
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
        # One image needs no copy.
        batch = torch.stack(pixels) if len(pixels) > 1 else pixels[0][None]
        return batch.to(self.device, self.dtype)

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
        library = self.encoder if isinstance(self.encoder, LibraryEncoder) else None
        depth = len(attentions(self.encoder)) if library is None else self.config.encoder.depth
        if block == 0 or not -depth <= block <= depth:
            raise VitcliError(
                f"block={block}: the encoder does not have this block (got {block}, expected 1 "
                f"to {depth}, or -1 for the last)",
                f"block={depth}",
            )
        pixels, index = self._pixels(images), block - 1 if block > 0 else block
        if library is not None:
            return torch.cat([library.attention(image)[index] for image in pixels.split(1)])
        rows: list[Tensor] = []
        with (
            explicit_attention(self.encoder) as probabilities,
            self.runner.kernels(),
            hooked([(probabilities[index], rows.append)]),
        ):
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


@dataclass(frozen=True)
class Prepared:
    """An image as the encoder reads it, and where it came from."""

    path: str
    decoded: DecodedImage
    pixels: Tensor
    """(3, height, width) in float32."""


def image_batches(
    model: Model, images: Pictures, background: Color, failed: list[FailedImage]
) -> Iterator[list[Prepared]]:
    """Images in order, up to AT_ONCE neighbors of equal shape at a time.

    Without images it is the built-in synthetic one. One that cannot be read goes to `failed`.

    Raises:
        VitcliError: an encoder that does not read RGB, or whose preprocessing is unknown.
    """
    model.check_reads_images()
    prepared = _prepare(model, picture_list(images) or [None], background, failed)
    for _, same in groupby(prepared, key=lambda item: item.pixels.shape):
        while batch := list(islice(same, AT_ONCE)):
            yield batch


def covered_box(model: Model, item: Prepared, grid: Grid) -> Box:
    """What the patch grid covers of an image, in its own pixels."""
    size = item.decoded.height, item.decoded.width
    return grid_box(model.preprocessing, size, grid, model.config.encoder.patch_size)


def stacked(model: Model, batch: Sequence[Prepared]) -> Tensor:
    """(B, 3, height, width) on the model's device in its dtype."""
    return torch.stack([item.pixels for item in batch]).to(model.device, model.dtype)


def picture_list(images: Pictures) -> list[Picture]:
    """One image or several as a list: a string is one path, never its characters."""
    if isinstance(images, str | PathLike | Image.Image):
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
    if isinstance(picture, str | PathLike):
        if is_quick(picture):
            return decode(picture, background=background)
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


def picture_name(picture: Picture, number: int) -> str:
    """The path of a file; `image 3` for the third image where it is none."""
    return fspath(picture) if isinstance(picture, str | PathLike) else f"image {number}"


def _prepare(
    model: Model,
    sources: Sequence[Picture | None],
    background: Color,
    failed: list[FailedImage],
) -> Iterator[Prepared]:
    for number, source in enumerate(sources, start=1):
        name = "synthetic" if source is None else picture_name(source, number)
        try:
            if source is None:
                picture = synthetic_image(model.input_size)
                decoded = DecodedImage(picture, "RGB", *picture.size, format=None)
            else:
                decoded = read_picture(source, background)
            pixels = torch.from_numpy(preprocess(decoded.image, model.preprocessing, name=name))
        except ImageError as error:
            failed.append(FailedImage(name, error.code, error.message))
        else:
            yield Prepared(name, decoded, pixels)


def layer_index(layer: int, depth: int, named: str = "--layer") -> int:
    """The number of a layer, 0 to `depth`.

    0 is the input of the first block, i the output of block i, -1 the last, as in transformers'
    `hidden_states`.

    Raises:
        VitcliError: the encoder does not have it; `named` is how the error calls the setting.
    """
    if not -depth - 1 <= layer <= depth:
        raise VitcliError(
            f"{named} {layer}: the encoder does not have this layer (got {layer}, expected 0 to "
            f"{depth}, or -1 for the last)",
            f"{named} {depth}",
        )
    return layer % (depth + 1)
