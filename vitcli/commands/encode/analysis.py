"""An encoder on a few images: norms by layer, vectors, patch features as colors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.commands.attention.reducers import patch_index
from vitcli.commands.encode.result import (
    EncodedImage,
    EncodeResult,
    FeatureSheet,
    LayerNorms,
    check_tokens,
    describe,
)
from vitcli.errors import VitcliError
from vitcli.images.preprocess import Box, patch_box
from vitcli.loading import as_model
from vitcli.model import (
    Color,
    Model,
    Pictures,
    Prepared,
    covered_box,
    image_batches,
    layer_index,
    model_info,
    picture_list,
    stacked,
)
from vitcli.nn.encoder import EncoderOutput, hooked, layer_points
from vitcli.results import QUIET, FailedImage, Progress
from vitcli.stats import all_finite

Around = Callable[[Model, Sequence[Prepared]], AbstractContextManager[None]]


def no_context(model: Model, batch: Sequence[Prepared]) -> AbstractContextManager[None]:
    """A context that does nothing."""
    return nullcontext()


def encode(
    model: Model | str | os.PathLike[str],
    images: Pictures = (),
    tokens: Sequence[str] = (),
    *,
    background: Color = (255, 255, 255),
    progress: Progress = QUIET,
    around: Around = no_context,
) -> tuple[EncodeResult, dict[str, np.ndarray]]:
    """Norms of an encoder's tokens after every layer, and vectors of the images.

    Args:
        model: a `Model`, or what `vitcli.load` takes.
        images: a path, a Pillow image, an array (H, W, 3) of 8-bit RGB, or a list of them; by
            default the built-in image.
        tokens: kinds of vectors to return: cls, dist, register, patch, pooled, output, deepstack.
        background: red, green, blue behind transparent pixels, 0 to 255.
        progress: called with (done, total) as images are encoded.
        around: a context entered for the forward pass of each batch, for hooks.

    Returns the result and an array for each kind in `tokens` (see `select_tokens`) whose first
    axis is `result.images`. Images that cannot be read are in `result.failed`.

    Raises:
        VitcliError: a kind of token that the encoder does not have, or whose number differs
            between images; vectors that are not finite.
    """
    model = as_model(model, by_library=True)
    pictures = picture_list(images)
    check_tokens(model.config, tokens)
    failed: list[FailedImage] = []
    encoded: list[EncodedImage] = []
    vectors: dict[str, list[np.ndarray]] = {kind: [] for kind in tokens}
    names = [*(name for name, _ in layer_points(model.encoder)), *ENDS]
    hole = len(names)
    for batch in image_batches(model, pictures, background, failed):
        with around(model, batch):
            rows, output, first = _run(model, batch)
        hole = min(hole, len(names) if first is None else first)
        if hole < len(names) and tokens:
            raise not_finite(model, names[hole])
        for index, (item, layers) in enumerate(zip(batch, rows, strict=True)):
            encoded.append(_image(model, item, layers, output, index))
        for kind in tokens:
            vectors[kind] += list(select_tokens(model, output, kind))
        progress(len(encoded) + len(failed), max(len(pictures), 1))
    result = EncodeResult(
        model_info(model),
        engine=model.engine,
        images=tuple(encoded),
        failed=tuple(failed),
        not_finite_from=names[hole] if hole < len(names) else None,
    )
    return result, {kind: _stack(kind, arrays) for kind, arrays in vectors.items()}


def seen(model: Model, images: Pictures, background: Color, most: int = 8) -> list[np.ndarray]:
    """What the encoder reads of the first images that can be read: (height, width, 3) in [0, 1]."""
    mean, std = (torch.tensor(v) for v in (model.preprocessing.mean, model.preprocessing.std))
    prepared = (item for batch in image_batches(model, images, background, []) for item in batch)
    return [
        (item.pixels.movedim(0, -1) * std + mean).clamp(0, 1).numpy()
        for item in islice(prepared, most)
    ]


ENDS = ("pooled vector", "head output", "DeepStack output")
"""What comes after the last layer."""


def not_finite(model: Model, layer: str) -> VitcliError:
    """The error that says where NaN or infinities begin, and the way out."""
    low = model.dtype_name in ("float16", "bfloat16")
    return VitcliError(
        f"{model.name}: values are not finite (NaN or infinity, from {layer} on, weights: "
        f"{model.weights})",
        "--dtype float32" if low else "print each layer's norms with `vitcli encode`",
        exit_code=1,
    )


@torch.inference_mode()
def _run(
    model: Model, batch: Sequence[Prepared]
) -> tuple[list[tuple[LayerNorms, ...]], EncoderOutput, int | None]:
    """The layer table of each image, the encoder's output, and the first layer not finite.

    Layers count as in `layer_points`, then ENDS.
    """
    table = NormTable(model.encoder.prefix_tokens, model.config.encoder.cls_token)
    finite: list[bool] = []

    def observe(tokens: Tensor) -> None:
        finite.append(all_finite(tokens))
        table.observe(tokens)

    output = model.runner(stacked(model, batch), observe)
    names = [name for name, _ in layer_points(model.encoder)]
    ends = (output.pooled, output.output, output.deepstack)
    finite += [part is None or all_finite(part) for part in ends]
    first = finite.index(False) if False in finite else None
    return table.rows(names), output, first


class NormTable:
    """Norms of each layer's tokens, reduced in a hook on the layer."""

    def __init__(self, prefix_tokens: int, has_cls: bool) -> None:
        self.prefix_tokens = prefix_tokens
        self.has_cls = has_cls
        self.layers: list[list[list[float]]] = []
        self.last_cls: Tensor | None = None

    def observe(self, tokens: Tensor) -> None:
        """(B, P+N, D) -> for each image CLS norm, patch mean, patch max, cosine to the last CLS."""
        tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        norms = tokens[:, self.prefix_tokens :].norm(dim=-1)  # (B, N)
        nothing = torch.full_like(norms[:, 0], float("nan"))
        cls = tokens[:, 0] if self.has_cls else None
        cosine = (
            nothing
            if cls is None or self.last_cls is None
            else F.cosine_similarity(cls, self.last_cls, dim=-1)
        )
        columns = [
            nothing if cls is None else cls.norm(dim=-1),
            norms.mean(dim=1),
            norms.amax(dim=1),
            cosine,
        ]
        self.layers.append(torch.stack(columns, dim=1).tolist())
        self.last_cls = cls

    def rows(self, names: Sequence[str]) -> list[tuple[LayerNorms, ...]]:
        """The table of each image, one row for each observed layer."""
        return [
            tuple(
                LayerNorms(
                    layer,
                    name,
                    cls_norm=cls if self.has_cls else None,
                    patch_norm_mean=mean,
                    patch_norm_max=peak,
                    cls_cosine_prev=cosine if self.has_cls and layer else None,
                )
                for layer, (name, (cls, mean, peak, cosine)) in enumerate(
                    zip(names, image, strict=True)
                )
            )
            for image in zip(*self.layers, strict=True)
        ]


def _image(
    model: Model,
    item: Prepared,
    layers: tuple[LayerNorms, ...],
    output: EncoderOutput,
    index: int,
) -> EncodedImage:
    pooled, head, decoded = output.pooled, output.output, item.decoded
    patch = model.config.encoder.patch_size
    return EncodedImage(
        path=item.path,
        mode=decoded.mode,
        width=decoded.width,
        height=decoded.height,
        preparation=describe(model.preprocessing, decoded.width, decoded.height)
        + ("" if model.by_library else _left_over(item.pixels.shape[-2:], patch)),
        input_shape=(1, *item.pixels.shape),
        output_shape=(1, *output.tokens.shape[1:]),
        layers=layers,
        pooled_norm=None if pooled is None else float(pooled[index].float().norm()),
        head_shape=None if head is None else (1, *head.shape[1:]),
    )


def _left_over(size: Sequence[int], patch: int) -> str:
    """The pixels at the bottom and at the right that fill no patch, in words."""
    edges = [
        f"{side % patch} {name}"
        for side, name in zip(size, ("rows", "columns"), strict=True)
        if side % patch
    ]
    return f"; the last {' and '.join(edges)} fill no patch and are not read" if edges else ""


def select_tokens(model: Model, output: EncoderOutput, kind: str) -> np.ndarray:
    """One kind of TOKENS of each image as float32 (float64 for a float64 model).

    cls, dist and pooled are (B, D); register (B, R, D); patch (B, N, D); output (B, width);
    deepstack (B, K, cells, width).
    """
    c = model.config.encoder
    places: dict[str, int | slice] = {
        "cls": 0,
        "dist": int(c.cls_token),
        "register": slice(c.cls_token + c.dist_token, c.prefix_tokens),
        "patch": slice(c.prefix_tokens, None),
    }
    chosen = output.tokens[:, places[kind]] if kind in places else getattr(output, kind)
    assert chosen is not None  # check_tokens has refused it
    array: np.ndarray = chosen.to(torch.promote_types(chosen.dtype, torch.float32)).cpu().numpy()
    return array


def _stack(kind: str, arrays: list[np.ndarray]) -> np.ndarray:
    if len({array.shape for array in arrays}) > 1:
        raise VitcliError(
            f"--tokens {kind}: the number of patches differs between images",
            "add --image-size 224",
        )
    return np.stack(arrays) if arrays else np.empty(0, np.float32)


COMPONENTS = 3
DEVIATIONS = 2.5
"""Standard deviations of a component from the middle of its color to the end."""


class PrincipalColors:
    """Colors of patch tokens by the principal components of all patches of all images of a call.

    So colors mean the same in every picture of the call. Components come largest variance first;
    the sign of each makes its entry of largest absolute value positive; its mean is 0.5 and
    `DEVIATIONS` standard deviations reach 0 and 1. A component without variance stays at 0.5.
    Only moments are kept, so memory does not grow with the number of images.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum: Tensor | float = 0.0
        self.products: Tensor | float = 0.0

    def add(self, patches: Tensor) -> None:
        """Take patches (n, D) into the fit."""
        patches = patches.cpu().double()
        self.count += len(patches)
        self.sum = self.sum + patches.sum(0)
        self.products = self.products + patches.T @ patches

    def axes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (D,), unit axes (D, 3) and the standard deviation along each, (3,).

        A direction in which the patches do not vary beyond rounding is a zero axis of deviation 1.
        """
        assert isinstance(self.sum, Tensor) and isinstance(self.products, Tensor)
        mean, moments = self.sum / self.count, self.products / self.count
        variances, axes = torch.linalg.eigh(moments - mean[:, None] * mean)  # ascending
        variances, axes = variances.flip(0)[:COMPONENTS], axes.flip(1)[:, :COMPONENTS]
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        rounding = float(moments.trace()) * len(mean) * torch.finfo(axes.dtype).eps
        flat = variances <= rounding
        axes, variances = axes.masked_fill(flat, 0.0), variances.masked_fill(flat, 1.0)
        missing = COMPONENTS - axes.shape[1]
        return mean, F.pad(axes, (0, missing)), F.pad(variances.sqrt(), (0, missing), value=1.0)

    def explained(self) -> tuple[float, float, float]:
        """The share of the patches' variance along each of the three axes."""
        assert isinstance(self.sum, Tensor) and isinstance(self.products, Tensor)
        mean = self.sum / self.count
        total = float((self.products / self.count).trace() - mean @ mean)
        _, axes, deviations = self.axes()
        shares = (axes.square().sum(0) * deviations.square() / (total or 1.0)).tolist()
        return shares[0], shares[1], shares[2]

    def colors(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Patch tokens (rows, columns, D) of each image -> colors (rows, columns, 3) in [0, 1]."""
        mean, axes, deviations = self.axes()
        scale = axes / (2 * DEVIATIONS * deviations)
        return [(0.5 + (image.cpu().double() - mean) @ scale).clamp(0, 1) for image in images]


def cosines_to(vector: Tensor, image: Tensor) -> Tensor:
    """A token (D,) and patch tokens (rows, columns, D) -> their cosines, (rows, columns)."""
    return F.cosine_similarity(image.cpu().double(), vector.cpu().double(), dim=-1)


MOST_SHEETS = 24
"""Images drawn in one figure; the colors are fitted over all."""


@dataclass
class FeatureCollector:
    """Around each forward pass of `encode`: keeps the patch tokens of one layer of each image.

    `layer` counts as in `layer_index`; None is what the encoder gives, after its final norm.
    `query` is "ROW,COL" of a patch of the first image, or None.
    """

    layer: int | None = None
    query: str | None = None
    pictures: list[object] = field(default_factory=list)
    """The Pillow images that `FeatureSheet.image` counts, at most MOST_SHEETS."""
    left_out: int = 0
    """Images in the fit that are not drawn."""
    _fit: PrincipalColors = field(default_factory=PrincipalColors)
    _tokens: list[Tensor] = field(default_factory=list)
    _boxes: list[Box] = field(default_factory=list)
    _titles: list[str] = field(default_factory=list)

    @contextmanager
    def __call__(self, model: Model, batch: Sequence[Prepared]) -> Iterator[None]:
        points = layer_points(model.encoder)
        depth = model.config.encoder.depth
        name, module = points[-1 if self.layer is None else layer_index(self.layer, depth)]
        grid = model.encoder.front_end.grid(batch[0].pixels)
        if self.query is not None and not self._tokens:
            patch_index(self.query, grid)
        kept: list[Tensor] = []
        with hooked([(module, lambda x: kept.append(x[:, model.encoder.prefix_tokens :].cpu()))]):
            yield
        self._fit.add(kept[0].flatten(0, 1))
        room = MOST_SHEETS - len(self.pictures)
        self.left_out += max(0, len(batch) - room)
        for item, tokens in zip(batch[:room], kept[0], strict=False):
            self.pictures.append(item.decoded.image)
            self._tokens.append(tokens.float().unflatten(0, grid))
            self._boxes.append(covered_box(model, item, grid))
            self._titles.append(f"{PurePath(item.path).name}, {model.name}, {name}")

    def sheets(self) -> list[FeatureSheet]:
        """One for each of the first images, colors fitted over all."""
        colors = self._fit.colors(self._tokens)
        cosines: list[Tensor | None] = [None] * len(colors)
        query_box = None
        if self.query is not None:
            rows, columns = self._tokens[0].shape[:2]
            row, column = divmod(patch_index(self.query, (rows, columns)), columns)
            cosines = [cosines_to(self._tokens[0][row, column], image) for image in self._tokens]
            query_box = patch_box(self._boxes[0], row, column, (rows, columns))
        return [
            FeatureSheet(
                image=image,
                title=title,
                box=box,
                colors=tuple(tuple((r, g, b) for r, g, b in row) for row in colors[image].tolist()),
                cosines=None if likeness is None else tuple(map(tuple, likeness.tolist())),
                query_box=query_box if image == 0 else None,
            )
            for image, (title, box, likeness) in enumerate(
                zip(self._titles, self._boxes, cosines, strict=True)
            )
        ]
