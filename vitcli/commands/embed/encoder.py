"""One part of a job: its rows filled batch by batch, always in the same places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vitcli.commands.embed.parts import OK, Rows
from vitcli.commands.encode.analysis import NormTable, run_observed, select_tokens
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.images.decode import MAX_PIXELS
from vitcli.images.pool import Decoded, available_cpus
from vitcli.model import Model
from vitcli.nn.hooks import layer_points

VECTORS = ("pooled", "output", "cls", "dist")
"""Kinds of tokens of which an image has one."""
Tell = Callable[[int, Counter[str]], None]
"""Told (rows of this part done, its failures by code)."""


@dataclass(frozen=True)
class FolderOptions:
    """How a job is done. What IDENTITY names must not change while the job lasts."""

    kind: str = "pooled"
    format: str = "parquet"
    vector_dtype: str = "float32"
    norms: bool = False
    """Also write, for each layer, the mean patch norm and the norm of CLS."""
    part_rows: int = 1024
    batch: int = 16
    background: tuple[int, int, int] = (255, 255, 255)
    max_pixels: int = MAX_PIXELS
    min_side: int = 1

    workers: int | None = None
    """Decoding processes; None is one for each core."""
    timeout_s: float = 60.0
    memory_bytes: int = 4 * 2**30
    """Address space of a decoding process (Linux): what needs more is `out_of_memory`."""
    shard: tuple[int, int] = (1, 1)
    retry_failed: bool = False
    fail_fast: bool = False

    def workers_for(self, images: int) -> int:
        """Decoding processes for so many images."""
        return min(self.workers or available_cpus(), images)

    def ahead(self, workers: int) -> int:
        """Images decoded before they are needed: a batch, and something for each process to do."""
        return 2 * (self.batch + workers)


IDENTITY = (
    *("kind", "format", "vector_dtype", "norms", "part_rows", "batch"),
    *("background", "max_pixels", "min_side"),
)


def failure(rows: Rows, row: int) -> VitcliError:
    """What `fail_fast` stops with."""
    return VitcliError(
        f"{printable(rows.names[row])}: {rows.status[row]}: {rows.error[row]}",
        "without --fail-fast it becomes a row with that status",
        exit_code=1,
    )


class PartEncoder:
    """Fills the rows of a part that are not `ok` yet, batch by batch."""

    def __init__(self, model: Model, options: FolderOptions, tell: Tell) -> None:
        self.model = model
        self.options = options
        self.tell = tell
        self.widths = array_widths(model, options)
        # Images that keep their own size share no batch: one at a time.
        self.batch = options.batch if model.preprocessing.output_size else 1

    def encode(self, rows: Rows, decoded: Iterator[Decoded]) -> Rows:
        """Rows whose status is not `ok` take the next of `decoded` each; the others stay."""
        for name, width in self.widths.items():
            dtype = self.options.vector_dtype if name == "vector" else "float32"
            if name not in rows.arrays:
                rows.arrays[name] = np.full((len(rows), width), np.nan, dtype)
            elif not rows.arrays[name].flags.writeable:
                rows.arrays[name] = rows.arrays[name].copy()
        failures: Counter[str] = Counter()
        for first in range(0, len(rows), self.batch):
            indices = range(first, min(first + self.batch, len(rows)))
            self._fill(rows, indices, decoded)
            failures.update(rows.status[i] for i in indices if rows.status[i] != OK)
            self.tell(indices[-1] + 1, failures)
        return rows

    def _fill(self, rows: Rows, indices: range, decoded: Iterator[Decoded]) -> None:
        pixels: np.ndarray | None = None
        fresh: list[int] = []
        for place, row in enumerate(indices):
            if rows.status[row] == OK:
                continue
            image = next(decoded)
            rows.width[row], rows.height[row] = image.width, image.height
            rows.status[row], rows.error[row] = image.code, image.error
            if image.pixels is not None:
                if pixels is None:
                    pixels = np.zeros((len(indices), *image.pixels.shape), image.pixels.dtype)
                pixels[place] = image.pixels
                fresh.append(row)
            elif self.options.fail_fast:
                raise failure(rows, row)
        if pixels is None:
            return
        for name, values in self._run(torch.from_numpy(pixels)).items():
            rows.arrays[name][fresh] = values[[row - indices[0] for row in fresh]]
        self._check_finite(rows, fresh)

    @torch.inference_mode()
    def _run(self, pixels: torch.Tensor) -> dict[str, np.ndarray]:
        """One forward pass over B images as `levels` gives them: each array, (B, width)."""
        model = self.model
        pixels = normalized(pixels.to(model.device), model.preprocessing)
        table = NormTable(model.encoder.prefix_tokens, model.config.encoder.cls_token)
        observe = table.observe if self.options.norms else None
        output = run_observed(model, pixels.to(model.device, model.dtype), observe)
        with np.errstate(over="ignore"):
            vector = select_tokens(model, output, self.options.kind)
            arrays = {"vector": vector.astype(self.options.vector_dtype)}
        if self.options.norms:
            layers = table.rows([name for name, _ in layer_points(model.encoder)])
            arrays["patch_norm_mean"] = np.array([[a.patch_norm_mean for a in x] for x in layers])
            if model.config.encoder.cls_token:
                arrays["cls_norm"] = np.array([[a.cls_norm for a in x] for x in layers])
        return arrays

    def _check_finite(self, rows: Rows, fresh: list[int]) -> None:
        for row in fresh:
            if not np.isfinite(rows.arrays["vector"][row]).all():
                rows.status[row] = "not_finite"
                rows.error[row] = f"the vector is not finite in {self.options.vector_dtype}"
                for array in rows.arrays.values():
                    array[row] = np.nan


def normalized(pixels: torch.Tensor, config: PreprocessConfig) -> torch.Tensor:
    """A batch that `images.preprocess.levels` gave as float32 (B, 3, h, w), on its device.

    Equal to `images.preprocess.normalize` bit for bit: each step rounds once, as IEEE 754 says.
    """
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


def vector_width(model: Model, kind: str) -> int:
    """Numbers in one vector of that kind, from a pass of nothing through the encoder."""
    height, width = model.input_size
    nothing = torch.zeros(1, 3, height, width, device=model.device, dtype=model.dtype)
    with torch.inference_mode():
        vector = select_tokens(model, model.encoder(nothing), kind)
    if vector.ndim != 2:
        raise VitcliError(
            f"{kind}: {model.name} gives {vector.shape[1]} of them an image", "--tokens pooled"
        )
    return int(vector.shape[1])


def array_widths(model: Model, options: FolderOptions) -> dict[str, int]:
    """The columns of arrays in a part, and their widths."""
    widths = {"vector": vector_width(model, options.kind)}
    if options.norms:
        layers = len(layer_points(model.encoder))
        widths["patch_norm_mean"] = layers
        if model.config.encoder.cls_token:
            widths["cls_norm"] = layers
    return widths
