"""One part of a job: its rows filled batch by batch, always in the same places."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from vitcli.commands.embed.parts import OK, Rows
from vitcli.commands.embed.result import PART_BYTES, FolderOptions
from vitcli.commands.encode.analysis import NormTable, select_tokens
from vitcli.commands.encode.result import available_tokens
from vitcli.config.schema import PreprocessConfig
from vitcli.config.variants import POOLINGS
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.preprocess import normalize
from vitcli.images.workers import Decoded
from vitcli.model import Model, layer_index
from vitcli.nn.encoder import layer_points

SINGLE = ("pooled", "output", "cls", "dist")
"""Kinds of tokens of which an image has one."""
BY_GRID = ("patch", "deepstack")
"""Kinds whose number of tokens follows from the image's size."""
KINDS = (*SINGLE, "register", *BY_GRID)
_TOKENS_PER_IMAGE = 256
"""A ViT-B/16 at 256 px: `batch` images of it are what a pass over images of any size may hold."""
_WAITING_BYTES = 2**28
"""Pixels of images that wait for others of their size."""
Column = tuple[str, str, Sequence[int]]
"""An array of a part: its name, dtype, and shape of one image."""
Report = Callable[[int, Counter[str]], None]
"""Called with (rows of this part done, its failures by code)."""


def failure(rows: Rows, row: int) -> VitcliError:
    """What `fail_fast` stops with."""
    return VitcliError(
        f"{printable(rows.names[row])}: {rows.status[row]}: {rows.error[row]}",
        "leave out --fail-fast: it becomes a row with that status",
        exit_code=1,
    )


def normalized(pixels: Tensor, config: PreprocessConfig) -> Tensor:
    """A batch that `images.preprocess.levels` gave as float32 (B, 3, h, w), on its device."""
    if pixels.device.type != "cpu":
        return normalized_by_torch(pixels, config)
    count, *shape = pixels.shape
    height, width = shape[:2] if pixels.dtype == torch.uint8 else shape[1:]
    batch = np.empty((count, 3, height, width), np.float32)
    for image, out in zip(pixels.numpy(), batch, strict=True):  # fits a core's cache, unlike all
        normalize(image, config, out)
    return torch.from_numpy(batch)


def normalized_by_torch(pixels: Tensor, config: PreprocessConfig) -> Tensor:
    """`images.preprocess.normalize` of a batch, bit for bit: IEEE 754 rounds each step once."""
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=pixels.device).view(3, 1, 1)
        for values in (config.mean, config.std)
    )
    if pixels.dtype == torch.uint8:
        pixels = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        # A tensor, since a GPU multiplies by the reciprocal of a number.
        pixels /= torch.tensor(255.0, device=pixels.device)
    else:
        pixels = pixels.clone()
    return pixels.sub_(mean).div_(std)


@dataclass(frozen=True)
class _Pass:
    """A forward pass that was started: which rows it is for, and how to get its values."""

    rows: list[int]
    places: list[int]
    values: Callable[[], dict[str, np.ndarray]]


@dataclass
class _Group:
    """Images of one size that wait for a pass."""

    rows: list[int] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.pixels)


class PartEncoder:
    """Fills the rows of a part that are not `ok` yet, batch by batch."""

    def __init__(
        self, model: Model, options: FolderOptions, columns: Sequence[Column], report: Report
    ) -> None:
        self.model = model
        self.options = options
        self.columns = columns
        self.report = report

    def encode(self, rows: Rows, decoded: Iterator[Decoded]) -> Rows:
        """Rows whose status is not `ok` take the next of `decoded` each; the rest stays."""
        for name, dtype, shape in self.columns:
            if name not in rows.arrays:
                rows.arrays[name] = np.full((len(rows), *shape), np.nan, dtype)
            elif not rows.arrays[name].flags.writeable:
                rows.arrays[name] = rows.arrays[name].copy()
        fixed = self.model.preprocessing.output_size is not None
        passes = (self._in_places if fixed else self._by_size)(rows, decoded)
        running: _Pass | None = None
        for started, done in passes:
            # On a GPU the next batch is copied and started before the last one's values arrive.
            if running is not None:
                self._keep(rows, running)
            running = started
            if running is not None and self.model.device.type != "cuda":
                self._keep(rows, running)
                running = None
            self.report(done, _failures(rows.status[:done] if fixed else rows.status))
        if running is not None:
            self._keep(rows, running)
        return rows

    def _in_places(
        self, rows: Rows, decoded: Iterator[Decoded]
    ) -> Iterator[tuple[_Pass | None, int]]:
        """Images of one size: each batch is the same rows, each image in the same place."""
        for first in range(0, len(rows), self.options.batch):
            indices = range(first, min(first + self.options.batch, len(rows)))
            pixels: np.ndarray | None = None
            fresh: list[int] = []
            for row in indices:
                if rows.status[row] == OK:
                    continue
                found = self._take(rows, row, decoded)
                if found is None:
                    continue
                if pixels is None:
                    pixels = np.zeros((len(indices), *found.shape), found.dtype)
                pixels[row - first] = found
                fresh.append(row)
            started = None
            if pixels is not None:
                started = self._start(pixels, fresh, [row - first for row in fresh])
            yield started, indices[-1] + 1

    def _by_size(
        self, rows: Rows, decoded: Iterator[Decoded]
    ) -> Iterator[tuple[_Pass | None, int]]:
        """Images that keep their own size: those of one size share passes of bounded tokens."""
        waiting: dict[tuple[int, ...], _Group] = {}
        done = 0

        def flush(shape: tuple[int, ...]) -> tuple[_Pass, int]:
            nonlocal done
            group = waiting.pop(shape)
            done += len(group.rows)
            started = self._start(np.stack(group.pixels), group.rows, [*range(len(group.rows))])
            return started, done

        for row in range(len(rows)):
            found = None if rows.status[row] == OK else self._take(rows, row, decoded)
            if found is None:
                done += 1
                continue
            group = waiting.setdefault(found.shape, _Group())
            group.rows.append(row)
            group.pixels.append(found)
            if len(group.rows) == self._batch(found):
                yield flush(found.shape)
            elif sum(group.bytes for group in waiting.values()) > _WAITING_BYTES:
                yield flush(max(waiting, key=lambda shape: waiting[shape].bytes))
        for shape in [*waiting]:
            yield flush(shape)

    def _batch(self, pixels: np.ndarray) -> int:
        """Images of this size in one pass: no more tokens than `batch` images of a usual size."""
        height, width = pixels.shape[:2] if pixels.dtype == np.uint8 else pixels.shape[1:]
        patch = int(self.model.config.encoder.patch_size)
        tokens = max(1, (int(height) // patch) * (int(width) // patch))
        return max(1, min(self.options.batch, self.options.batch * _TOKENS_PER_IMAGE // tokens))

    def _take(self, rows: Rows, row: int, decoded: Iterator[Decoded]) -> np.ndarray | None:
        """The next image's pixels, and what became of it into its row."""
        image = next(decoded)
        rows.width[row], rows.height[row] = image.width, image.height
        rows.status[row], rows.error[row] = image.code, image.error
        if image.pixels is None and self.options.fail_fast:
            raise failure(rows, row)
        return image.pixels

    def _start(self, pixels: np.ndarray, rows: list[int], places: list[int]) -> _Pass:
        """Start one forward pass over B images as `levels` gives them."""
        batch = torch.from_numpy(pixels)
        if self.model.device.type == "cuda":
            batch = batch.pin_memory().to(self.model.device, non_blocking=True)
        batch = normalized(batch.to(self.model.device), self.model.preprocessing)
        columns, norms = self.options.columns, self.options.norms
        return _Pass(rows, places, forward(self.model, batch, columns, norms))

    def _keep(self, rows: Rows, started: _Pass) -> None:
        """The values of a pass into their rows; a row with one that is not finite fails."""
        for name, values in started.values().items():
            with np.errstate(over="ignore"):
                rows.arrays[name][started.rows] = values[started.places]
        for row in started.rows:
            for name in self.options.columns:
                if not np.isfinite(rows.arrays[name][row]).all():
                    rows.status[row] = "not_finite"
                    rows.error[row] = f"{name} is not finite in {self.options.vector_dtype}"
                    for array in rows.arrays.values():
                        array[row] = np.nan
                    break


def _failures(status: list[str]) -> Counter[str]:
    return Counter(code for code in status if code not in (OK, ""))


@torch.inference_mode()
def forward(
    model: Model,
    pixels: Tensor,
    columns: Mapping[str, tuple[str, int | None]],
    norms: bool = False,
) -> Callable[[], dict[str, np.ndarray]]:
    """Start a pass over normalized (B, 3, h, w); the function that waits for its arrays.

    Args:
        columns: kind and layer of each array by its name, as `FolderOptions.columns`.
        norms: give `patch_norm_mean` and `cls_norm` (B, layers) too.

    Each array is (B, width), (B, R, D) of registers or (B, h, w, D) of patches.
    """
    wanted = {layer for _, layer in columns.values() if layer is not None}
    table = NormTable(model.encoder.prefix_tokens, model.config.encoder.cls_token)
    kept: dict[int, Tensor] = {}
    points = iter(range(len(layer_points(model.encoder))))

    def observe(tokens: Tensor) -> None:
        point = next(points)
        if point in wanted:
            kept[point] = tokens
        if norms:
            table.observe(tokens)

    watched = bool(wanted or norms)
    output = model.runner(pixels.to(model.dtype), observe if watched else None)
    grid = model.encoder.front_end.grid(pixels)

    def values() -> dict[str, np.ndarray]:
        arrays = {}
        for name, (kind, layer) in columns.items():
            found = output
            if layer is not None:
                tokens = kept[layer]
                prefix = model.encoder.prefix_tokens
                pooled = None
                if kind == "pooled":
                    with torch.inference_mode():
                        pooled = model.encoder.pooling(tokens[:, :prefix], tokens[:, prefix:])
                found = output._replace(tokens=tokens, pooled=pooled)
            array = select_tokens(model, found, kind)
            if kind == "patch":
                grids = getattr(model.encoder, "layer_grids", {})  # another library's stages
                rows, width = grids.get(layer, grid), array.shape[-1]
                array = array.reshape(len(array), *rows, width)
            arrays[name] = array
        if norms:
            layers = table.rows([name for name, _ in layer_points(model.encoder)])
            arrays["patch_norm_mean"] = np.array([[a.patch_norm_mean for a in x] for x in layers])
            if model.config.encoder.cls_token:
                arrays["cls_norm"] = np.array([[a.cls_norm for a in x] for x in layers])
        return arrays

    return values


def checked(model: Model, options: FolderOptions) -> tuple[FolderOptions, list[Column]]:
    """The options with layers from 0 and rows per part that fit, and a part's arrays.

    Nothing but a pass over zeros is made, before any image is read.

    Raises:
        VitcliError: kinds or layers that this encoder cannot give, or that fit no format.
    """
    model.check_reads_images()
    size = model.preprocessing.output_size  # an error without a preprocessing config
    c = model.config.encoder
    available = [kind for kind in KINDS if kind in available_tokens(c)]
    if size is None:
        available = [kind for kind in available if kind not in BY_GRID]
    if options.layers:
        weightless = not POOLINGS[c.pooling].trained
        last = ("output", "deepstack", *(() if weightless else ("pooled",)))
        available = [kind for kind in available if kind not in last]
    for kind in (kind for kind, _ in options.columns.values()):
        if kind not in available:
            why = f"{model.name} does not give it"
            if kind not in KINDS:
                why = "unknown kind"
            elif kind in BY_GRID and kind in available_tokens(c) and size is None:
                why = "images of different sizes have different grids"
            elif options.layers and kind in ("output", "pooled", "deepstack"):
                why = "it exists only after the last block"
            fixed = why.startswith("images")
            hint = "--image-size 224" if fixed else f"--tokens {','.join(available[:1])}"
            raise VitcliError(f"--tokens {kind}: {why} (expected {', '.join(available)})", hint)
    layers = tuple(sorted({layer_index(layer, c.depth, "--layers") for layer in options.layers}))
    options = replace(options, layers=layers)
    if options.format == "npy" and (options.norms or len(options.columns) > 1):
        what = "--norms" if options.norms else f"--tokens {options.kind}"
        raise VitcliError(
            f"{what}: a .npy file holds vectors alone, of one kind", "--format parquet"
        )
    zeros = torch.zeros(1, 3, *model.input_size, device=model.device)
    plain = replace(model, asked_engine="eager")
    columns: list[Column] = [
        (name, options.vector_dtype if name in options.columns else "float32", array.shape[1:])
        for name, array in forward(plain, zeros, options.columns, options.norms)().items()
    ]
    fits = PART_BYTES // max(1, row_bytes(columns))
    whole = max(1, fits // options.batch) * options.batch
    return replace(options, part_rows=min(options.part_rows, whole)), columns


def row_bytes(columns: Sequence[Column]) -> int:
    """Bytes of the arrays of one row."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in columns)
