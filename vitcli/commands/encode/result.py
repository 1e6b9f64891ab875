"""The result of `vitcli encode`, and the file of vectors that it writes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vitcli.config.schema import EncoderConfig, ModelConfig, PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.files import atomic_write, check_output
from vitcli.results import FailedImage, ModelInfo, Result

if TYPE_CHECKING:
    import numpy as np

    from vitcli.images.preprocess import Box


@dataclass(frozen=True)
class LayerNorms:
    """One layer's tokens: 0 is the input of the first block, then each block, then the norm."""

    layer: int
    name: str
    cls_norm: float | None
    patch_norm_mean: float
    patch_norm_max: float
    cls_cosine_prev: float | None


@dataclass(frozen=True)
class EncodedImage:
    path: str
    mode: str
    width: int
    height: int
    preparation: str
    """How the image was resized, cropped and normalized."""
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    layers: tuple[LayerNorms, ...]
    pooled_norm: float | None
    head_shape: tuple[int, ...] | None


@dataclass(frozen=True)
class EncodeResult(Result):
    """The result of `vitcli encode`."""

    rows_at: ClassVar[str] = "images.layers"

    model: ModelInfo
    engine: str
    """The engine, one of `vitcli.engines.ENGINES`."""
    images: tuple[EncodedImage, ...]
    failed: tuple[FailedImage, ...]
    not_finite_from: str | None = None
    """The layer from which on tokens hold NaN or infinities, None where all are finite."""


TOKENS = ("cls", "dist", "register", "patch", "pooled", "output", "deepstack")
"""Kinds of vectors: prefix tokens, patches, the pooled vector, the head's output, and those of
blocks with a merger of their own."""


def available_tokens(c: EncoderConfig) -> list[str]:
    """The kinds of TOKENS that this encoder has."""
    there = {
        "cls": c.cls_token,
        "dist": c.dist_token,
        "register": c.registers > 0,
        "patch": True,
        "pooled": c.pooling != "none",
        "output": c.head != "none",
        "deepstack": bool(c.deepstack),
    }
    return [kind for kind in TOKENS if there[kind]]


def check_tokens(config: ModelConfig, tokens: Sequence[str]) -> None:
    """Refuse kinds that the encoder does not have."""
    available = available_tokens(config.encoder)
    for kind in tokens:
        if kind not in available:
            what = f"{config.name} does not have such tokens" if kind in TOKENS else "unknown"
            raise VitcliError(
                f"--tokens {kind}: {what} (expected {', '.join(available)})",
                f"--tokens {','.join(available)}",
            )


VECTOR_SUFFIXES = (".npz", ".npy", ".safetensors")


def check_vector_file(path: Path, tokens: Sequence[str]) -> None:
    """Refuse a file that `write_vectors` could not write, before anything is computed."""
    check_output(path, *VECTOR_SUFFIXES, option="--out")
    if path.suffix == ".npy" and len(tokens) > 1:
        raise VitcliError(
            f"--out {path}: a .npy file holds one array (got {len(tokens)} kinds)",
            f"--out {path.with_suffix('.npz')}",
        )


def write_vectors(
    path: Path,
    vectors: dict[str, np.ndarray],
    paths: Sequence[str],
    failed: Sequence[FailedImage] = (),
) -> list[Path]:
    """Write arrays whose rows are those of `paths`, with these names; the files written.

    .npz: an array per kind, and `paths`, `failed_paths` and `failed_errors`, arrays of strings.
    .safetensors: a tensor per kind; the metadata holds `paths` and `failed` (pairs of path and
    error) as JSON. .npy: one array, and a .csv of the same name with the columns row, path, error;
    what failed has no row.
    """
    import numpy as np
    import safetensors.numpy

    written = [path]
    if path.suffix == ".npy":
        names = path.with_suffix(".csv")
        rows = [(row, name, "") for row, name in enumerate(paths)]
        lost = [("", item.path, item.error) for item in failed]
        text = io.StringIO()
        csv.writer(text).writerows([("row", "path", "error"), *rows, *lost])
        with atomic_write(names) as file:
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))
        written.append(names)
    with atomic_write(path) as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(vectors.values())), allow_pickle=False)
        elif path.suffix == ".npz":
            strings = {
                "paths": list(paths),
                "failed_paths": [item.path for item in failed],
                "failed_errors": [item.error for item in failed],
            }
            arrays = {name: np.array(values, dtype=np.str_) for name, values in strings.items()}
            np.savez(file, **vectors, **arrays)  # type: ignore[arg-type]
        else:
            contiguous = {kind: np.ascontiguousarray(array) for kind, array in vectors.items()}
            metadata = {
                "paths": json.dumps(list(paths)),
                "failed": json.dumps([(item.path, item.error) for item in failed]),
            }
            file.write(safetensors.numpy.save(contiguous, metadata))
    return written


@dataclass(frozen=True)
class FeatureSheet:
    """The patch features of one image as colors, and their cosine to one patch."""

    image: int
    title: str
    box: Box
    colors: tuple[tuple[tuple[float, float, float], ...], ...]
    """Red, green and blue in [0, 1] for each patch, by rows: the principal components."""
    cosines: tuple[tuple[float, ...], ...] | None
    query_box: Box | None
    """The chosen patch, on the picture that holds it."""


_RESIZED = {
    "none": "not resized",
    "squash": "squashed to {size}",
    "shortest": "{target}: {size}",
    "smart": "to multiples of {c.multiple} px: {size}",
    "patches": "to {c.max_patches} patches of {c.multiple} px: {size}",
    "bounded": "to sides of {c.shortest_edge} to {c.longest_edge} px: {size}",
    "within": "within {c.longest_edge} px, up to multiples of {c.multiple} px: {size}",
    "tile": "{steps}",
    "longest": "longer side to {c.longest_edge}: {size}",
    "shrink": "to at most {c.max_patches} patches of {c.multiple} px: {size}",
    "area": "to {c.max_pixels} px in multiples of {c.multiple}: {size}",
    "closest": "one side as of {asked}, to multiples of {c.multiple} px: {size}",
    "canvas": "resized to {size}",
}
"""Each `preprocess.resize` in words."""


def describe(config: PreprocessConfig, width: int, height: int) -> str:
    """What `preprocess` does to an image of this size, in one plain line; sizes are WxH."""
    from vitcli.images.preprocess import plan

    steps = plan(config, width, height)
    size, whole = _wxh(steps.resized), _wxh(steps.output)
    how = f"({config.filter}{', in float32' * (config.resize_dtype == 'float32')})"
    mean, std = (" ".join(f"{v:.6g}" for v in values) for values in (config.mean, config.std))
    scale = f"mean {mean}, std {std}"
    if config.fit and steps.part:
        left, top, right, bottom = (f"{side:.6g}" for side in steps.part)
        cut = f"x {left} to {right}, y {top} to {bottom}"
        return f"fit crop: {cut} resized to {whole} {how}; {scale}"
    if config.fit and steps.padded:
        return f"fit whole: resized to {size} {how} in the middle of {whole}; {scale}"
    if config.fit:
        return f"fit {config.fit}: resized to {whole} {how}; {scale}"
    h, w = config.resize_size or (0, 0)
    resize = _RESIZED[config.resize].format(
        c=config,
        size=size,
        asked=f"{w}x{h}",
        target=f"shorter side to {h}" if h == w else f"to cover {w}x{h}",
        steps=" then ".join(f"resized to {_wxh(s)}" for s in (*steps.before, steps.resized)),
    )
    if steps.square:
        height, width, side = steps.square
        resize = f"{width}x{height} in the middle of {side}x{side}; {resize}"
    facts = [f"{resize} {how}" if config.resize != "none" or steps.square else resize]
    if steps.crop and config.crop_size:
        y, x = steps.offset
        black = ", black around" * steps.padded
        facts.append(f"center {whole} at x {x}, y {y}{black}")
    elif steps.crop:
        facts.append(f"filled up with black to {whole}")
    return "; ".join([*facts, scale])


def _wxh(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"
