"""Patch features and attention of a few images, quantized for one self-contained page.

N patches after the prefix tokens, T tokens in all, D channels, H heads. Features are projected on
the directions in which they are long, then every array is reduced to 8 bits with one scale per row.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitcli.commands.attention.reducers import Rollout
from vitcli.commands.encode.analysis import PrincipalColors, not_finite
from vitcli.errors import VitcliError
from vitcli.files import atomic_write, check_output, data_size, filled_page
from vitcli.images.preprocess import Box, small_jpeg
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
from vitcli.nn.encoder import Observer, explicit_attention, hooked, layer_points
from vitcli.results import QUIET, FailedImage, ModelInfo, Progress, Result
from vitcli.stats import all_finite


@dataclass(frozen=True)
class ExploredEncoder:
    """The part of the page about one encoder."""

    model: ModelInfo
    layers: tuple[int, ...]
    """0 is the input of the first block, i the output of block i."""
    grids: tuple[tuple[int, int], ...]
    """(rows, columns) of patches, for each image."""
    directions: int
    """Directions of feature space that are kept, of `model.hidden`."""
    cosine_error: float
    """Largest error of a cosine similarity on the page, over a sample of pairs of patches."""
    attention_error: float
    """Largest error of an attention value on the page, relative to the largest of its map."""
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    """What does not fit on the page, most useful first."""


@dataclass(frozen=True)
class ExploreResult(Result):
    """The page that `vitcli explore` wrote."""

    rows_at: ClassVar[str] = "encoders"

    path: str
    bytes: int
    images: tuple[str, ...]
    failed: tuple[FailedImage, ...]
    encoders: tuple[ExploredEncoder, ...]


MEBIBYTE = 2**20
DEFAULT_LAYERS = 4
LONGEST_SIDE = 448
"""Pixels of a picture's longer side on the page."""
DIRECTIONS = (32, 64, 96, 128, 192, 256, 384)
COSINE_ERROR = 0.02
"""Directions are added until no cosine of the sample is off by more."""
SAMPLE = 512
"""Patches whose cosines to each other are checked."""
LARGEST_MAP = 2**22
"""Values of one attention matrix; beyond it only attention from CLS is kept."""
KINDS = {
    "features": (0, "features"),
    "colors": (0, "features as colors"),
    "norms": (0, "norms"),
    "cls": (1, "attention from CLS by head"),
    "cls_rollout": (1, "rollout from CLS"),
    "mean": (2, "attention from patches, mean of heads"),
    "rollout": (3, "rollout from patches"),
    "heads": (4, "attention from patches by head"),
}
"""Rank and words of each kind of array: the most useful enter first, those of one rank together."""

Array = NDArray[Any]
Source = Model | str | os.PathLike[str]
"""What `loading.as_model` takes."""


def explore(
    models: Source | Sequence[Source],
    images: Pictures = (),
    out: str | Path = "explore.html",
    *,
    layers: Sequence[int] | None = None,
    max_bytes: int = 10 * MEBIBYTE,
    background: Color = (255, 255, 255),
    progress: Progress = QUIET,
) -> ExploreResult:
    """Write a page that shows, for the patch under the pointer, similarity and attention.

    Args:
        models: one encoder or two: models, or what `vitcli.load` takes.
        images: as in `Model.transform`; by default the built-in image.
        layers: 0 is the input of the first block, i the output of block i, -1 the last; by
            default four, evenly spaced, with the last.
        max_bytes: of the file. What does not fit is left out and named on the page.
        progress: its `line` is called with the size before the file is written.

    Raises:
        VitcliError: no encoder or more than two, a layer that an encoder does not have, no image
            that could be read, features that are not finite, or a page that cannot be so small.
    """
    loaded, images = models_of(models), picture_list(images)
    if not 1 <= len(loaded) <= 2:
        raise VitcliError(f"explore: is for 1 or 2 encoders (got {len(loaded)})", "name one or two")
    out = Path(out)
    check_output(out, ".html", ".htm", option="--out")
    chosen = [choose_layers(model, layers) for model in loaded]
    hint = f"vitcli explore photo.jpg --out {out}"
    prepared, failed = read_images(loaded, images, background, "explore", hint)
    pictures = prepared[0]
    seen: list[Seen] = []
    for number, (model, numbers) in enumerate(zip(loaded, chosen, strict=True)):
        encoder = Seen(model, numbers, 4 * max_bytes // len(pictures))
        for place, item in enumerate(prepared[number], start=1):
            encoder.look(item)
            progress(number * len(pictures) + place, len(loaded) * len(pictures))
        seen.append(encoder)
    names = [PurePath(item.path).name for item in pictures]
    shown = []
    for name, item in zip(names, pictures, strict=True):
        size, jpeg = small_jpeg(item.decoded.image, LONGEST_SIDE)
        facts = {"width": item.decoded.width, "height": item.decoded.height}
        shown.append({"name": name, **facts, "shown": size, "jpeg": jpeg})
    blocks = [block for number, one in enumerate(seen) for block in one.blocks(number)]
    page = _page(shown, seen, blocks, max_bytes)
    progress.line(f"writing {data_size(len(page))} to {out}")
    with atomic_write(out) as file:
        file.write(page)
    return ExploreResult(
        path=str(out),
        bytes=len(page),
        images=tuple(names),
        failed=tuple(failed),
        encoders=tuple(
            ExploredEncoder(
                model=model_info(one.model),
                layers=tuple(one.layers),
                grids=tuple(one.grids),
                directions=one.directions,
                cosine_error=one.cosine_error,
                attention_error=1 / 510,
                kept=tuple(one.kept),
                left_out=tuple(one.left_out),
            )
            for one in seen
        ),
    )


def models_of(models: Source | Sequence[Source]) -> list[Model]:
    """One encoder or several, loaded."""
    many = [models] if isinstance(models, Model | str | os.PathLike) else models
    return [as_model(model) for model in many]


def read_images(
    models: Sequence[Model], images: Pictures, background: Color, command: str, hint: str
) -> tuple[list[list[Prepared]], list[FailedImage]]:
    """The images that all encoders can read, as each of them reads them, and the rest.

    Raises:
        VitcliError: there are none.
    """
    failed: list[FailedImage] = []
    read: list[list[Prepared]] = []
    for model in models:
        unread: list[FailedImage] = []
        batches = image_batches(model, images, background, unread)
        read.append([item for batch in batches for item in batch])
        known = {one.path for one in failed}
        failed += [one for one in unread if one.path not in known]
    lost = {one.path for one in failed}
    read = [[item for item in prepared if item.path not in lost] for prepared in read]
    if not read[0]:
        what = f"{command}: no image could be read; the first error: {failed[0].error}"
        raise VitcliError(what, hint, exit_code=1)
    return read, failed


def choose_layers(model: Model, layers: Sequence[int] | None) -> list[int]:
    """Layers from 0 to the depth, ascending; by default DEFAULT_LAYERS evenly spaced.

    Raises:
        VitcliError: a layer that the encoder does not have.
    """
    depth = model.config.encoder.depth
    if layers is None:
        steps = range(1, DEFAULT_LAYERS + 1)
        return sorted({max(1, round(depth * step / DEFAULT_LAYERS)) for step in steps})
    return sorted({layer_index(layer, depth, "--layers") for layer in layers})


@dataclass(frozen=True)
class Block:
    """One kind of array of one encoder and layer: for each image its values, then its scales."""

    encoder: int
    kind: str
    layer: int
    arrays: list[Array]
    """Empty where it was too large to keep."""

    @property
    def what(self) -> str:
        return f"{KINDS[self.kind][1]}, layer {self.layer}"

    @property
    def rank(self) -> tuple[int, int]:
        return KINDS[self.kind][0], -self.layer


@dataclass
class Seen:
    """The arrays of one encoder that the page shows."""

    model: Model
    layers: list[int]
    most_bytes: int
    """Of one attention array of one image; larger ones could never be on the page."""
    grids: list[tuple[int, int]] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    tokens: dict[int, list[Tensor]] = field(default_factory=dict)
    """By layer, for each image: patch tokens (rows, columns, D)."""
    attention: dict[tuple[str, int], list[Array]] = field(default_factory=dict)
    """By kind and layer, for each image: bytes and their scales; empty where too large."""
    directions: int = 0
    cosine_error: float = 0.0
    kept: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What the page shows of it, and what does not fit."""

    @torch.inference_mode()
    def look(self, item: Prepared) -> None:
        """One pass that keeps the patch tokens and the attention of the chosen layers."""
        encoder, prefix = self.model.encoder, self.model.encoder.prefix_tokens
        pixels = stacked(self.model, [item])
        grid = encoder.front_end.grid(pixels)
        kept: dict[int, Tensor] = {}
        rollout = Rollout()
        block = 0

        def keep(layer: int) -> Observer:
            return lambda x: kept.update({layer: x[0, prefix:].float().cpu()})

        def attend(rows: Tensor) -> None:
            """(1, H, T, T) of the next block."""
            nonlocal block
            block += 1
            small = rows.shape[-1] ** 2 <= LARGEST_MAP
            if small:
                rollout.add(rows.float().mean(1))
            if block in self.layers and all_finite(rows):  # holes are said below
                self._attend(block, rows[0].float().cpu(), rollout if small else None)

        points = [module for _, module in layer_points(encoder)]
        with (
            explicit_attention(encoder) as probabilities,
            hooked([(module, attend) for module in probabilities]),
            hooked([(points[layer], keep(layer)) for layer in self.layers]),
        ):
            encoder(pixels)
        for layer in self.layers:
            if not all_finite(kept[layer]):
                raise not_finite(self.model, f"layer {layer}")
            self.tokens.setdefault(layer, []).append(kept[layer].unflatten(0, grid))
        self.grids.append(grid)
        self.boxes.append(covered_box(self.model, item, grid))

    def _attend(self, block: int, rows: Tensor, rollout: Rollout | None) -> None:
        """Keep a block's attention (H, T, T) to patches, in times uniform: probability x T."""
        tokens, prefix = rows.shape[-1], self.model.encoder.prefix_tokens
        if self.model.config.encoder.cls_token:
            self._keep("cls", block, rows[:, 0, prefix:] * tokens)  # (H, N)
        if rollout is None:
            for kind in ("mean", "rollout", "heads"):
                self.attention[kind, block] = []
            return
        assert rollout.matrix is not None
        rolled = rollout.matrix[0].cpu() * tokens
        if self.model.config.encoder.cls_token:
            self._keep("cls_rollout", block, rolled[:1, prefix:])  # (1, N)
        patches = rows[:, prefix:, prefix:] * tokens
        self._keep("mean", block, patches.mean(0))  # (N, N)
        self._keep("rollout", block, rolled[prefix:, prefix:])  # (N, N)
        self._keep("heads", block, patches.flatten(0, 1))  # (H N, N)

    def _keep(self, kind: str, block: int, rows: Tensor) -> None:
        arrays = self.attention.setdefault((kind, block), [])
        if rows.numel() > self.most_bytes:
            arrays.clear()
        elif len(arrays) == 2 * len(self.grids):  # none of an earlier image was too large
            arrays += quantized(rows.numpy(), signed=False)

    def blocks(self, encoder: int) -> list[Block]:
        """Every array that the page could hold of this encoder."""
        found = []
        for layer in self.layers:
            flat = [tokens.flatten(0, 1) for tokens in self.tokens[layer]]  # (N, D) each
            fit = PrincipalColors()
            for tokens in flat:
                fit.add(tokens)
            colors = [
                np.rint(image.flatten(0, 1).numpy() * 255).astype(np.uint8)
                for image in fit.colors(self.tokens[layer])
            ]
            norms: list[Array] = [tokens.norm(dim=-1).numpy() for tokens in flat]
            arrays = {"features": self._project(flat), "colors": colors, "norms": norms}
            found += [Block(encoder, kind, layer, values) for kind, values in arrays.items()]
        found += [
            Block(encoder, kind, layer, arrays) for (kind, layer), arrays in self.attention.items()
        ]
        return found

    def _project(self, images: Sequence[Tensor]) -> list[Array]:
        """Unit vectors in the fewest directions that keep cosines within COSINE_ERROR."""
        unit = F.normalize(torch.cat(list(images)).double(), dim=-1)  # (all patches, D)
        _, axes = torch.linalg.eigh(unit.T @ unit)  # ascending
        sample = unit[torch.linspace(0, len(unit) - 1, min(SAMPLE, len(unit))).long()]
        width = unit.shape[1]
        for directions in (*(number for number in DIRECTIONS if number < width), width):
            basis = axes[:, -directions:]
            values, scales = quantized((sample @ basis).numpy(), signed=True)
            short = torch.from_numpy(values * scales[:, None].astype(np.float64))
            error = float((short @ short.T - sample @ sample.T).abs().max())
            if error <= COSINE_ERROR:
                break
        self.directions = max(self.directions, directions)
        self.cosine_error = max(self.cosine_error, error)
        parts = torch.split(unit @ basis, [len(tokens) for tokens in images])
        return [array for part in parts for array in quantized(part.numpy(), signed=True)]


def quantized(rows: Array, *, signed: bool) -> tuple[Array, Array]:
    """Rows (n, m) as bytes (n, m) and float32 scales (n,): value = byte x scale.

    Signed bytes are off by at most 1/254 of their row's largest value, unsigned ones by 1/510.
    """
    top, kind = (127, np.int8) if signed else (255, np.uint8)
    scales = (np.abs(rows).max(axis=1) / top).astype(np.float32)
    safe = np.where(scales > 0, scales, 1)
    return np.rint(rows / safe[:, None]).clip(-top, top).astype(kind), scales


def _page(
    shown: list[dict[str, Any]], seen: Sequence[Seen], blocks: Sequence[Block], max_bytes: int
) -> bytes:
    """The page with the blocks that fit, by rank."""
    data: list[dict[str, Any]] = []
    encoders = [
        {
            "name": one.model.name,
            "weights": one.model.weights,
            "heads": one.model.config.encoder.heads,
            "hidden": one.model.config.encoder.hidden,
            "cls": one.model.config.encoder.cls_token,
            "layers": one.layers,
            "grids": one.grids,
            "boxes": one.boxes,
            "directions": one.directions,
            "cosine_error": one.cosine_error,
            "left_out": one.left_out,
        }
        for one in seen
    ]
    meta = {"images": shown, "encoders": encoders, "data": data}
    fill = partial(filled_page, "vitcli.commands.explore", "page.html")
    names = sum(len(block.what) + 8 for block in blocks)
    room = max_bytes - len(fill(meta)) - names
    for block in sorted(blocks, key=lambda block: block.rank):
        raw = b"".join(np.ascontiguousarray(array).tobytes() for array in block.arrays)
        packed = base64.b64encode(zlib.compress(raw, 6)).decode()
        entry = {
            "encoder": block.encoder,
            "kind": block.kind,
            "layer": block.layer,
            "lengths": [int(array.size) for array in block.arrays],
            "types": [array.dtype.name for array in block.arrays],
            "data": packed,
        }
        size = len(json.dumps(entry)) + 2
        if raw and size <= room:
            room -= size
            data.append(entry)
            seen[block.encoder].kept.append(block.what)
        elif block.rank[0] == 0:
            raise VitcliError(
                f"--max-size {max_bytes / MEBIBYTE:g}: too small for the features of these images",
                f"--max-size {2 * max_bytes / MEBIBYTE:g}, or fewer images or --layers",
            )
        else:
            seen[block.encoder].left_out.append(block.what)
    return fill(meta)
