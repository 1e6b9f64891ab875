"""One checkpoint run by vitcli and by the library that wrote it, compared value by value."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.commands.compare.result import Checked, VerifyResult
from vitcli.config.request import checkpoint_of
from vitcli.engines.backbone import Backbone
from vitcli.engines.engine import timed
from vitcli.engines.reference import open_reference
from vitcli.errors import VitcliError
from vitcli.images.decode import ImageError
from vitcli.images.synthetic import synthetic_image
from vitcli.loading import load
from vitcli.model import Model, Pictures, model_info, picture_list, picture_name, read_picture
from vitcli.nn.encoder import EncoderOutput, hooked, layer_points
from vitcli.results import QUIET, FailedImage, Progress
from vitcli.stats import all_finite, largest_difference

FLOAT32_PARTS = 1e-6
"""Where the library computes RoPE, RMSNorm or a resized table in float32 whatever the dtype."""
LEVELS = 0.02
"""Pixels are equal when none is off by more of one of their 255 levels."""
TIMED = 3


def tolerance_of(model: Model) -> float:
    """The relative difference that is still rounding: 4 eps sqrt(D x depth), eps of the dtype.

    Sums of D terms in each of `depth` blocks, rounded at random; never below FLOAT32_PARTS where
    the library computes a part in float32.
    """
    c = model.config.encoder
    rounding = 4 * torch.finfo(model.dtype).eps * math.sqrt(c.hidden * c.depth)
    resized = bool(model.report and model.report.tensors_resized)
    single = (
        "rope" in c.position
        or c.norm == "rmsnorm"
        or c.attention.qk_norm_kind == "rmsnorm"
        or resized
    )
    return max(rounding, FLOAT32_PARTS) if single else rounding


@dataclass
class _Pairs:
    """The values of both sides, image by image, reduced as they come."""

    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    cosine: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, ours: Tensor, theirs: Tensor, scale: float | None = None) -> None:
        """Compare one value; `scale` is what 1 means, else the reference's largest value."""
        self.shapes.setdefault(name, (tuple(ours.shape), tuple(theirs.shape)))
        difference = cosine = math.nan
        if ours.shape == theirs.shape:
            top = scale or float(theirs.abs().max()) or 1.0
            difference = largest_difference(ours, theirs) / top
            if scale is None and all_finite(ours) and all_finite(theirs):
                pair = F.cosine_similarity(ours.double(), theirs.double(), dim=-1)
                zero = (ours == 0).all(-1) & (theirs == 0).all(-1)
                cosine = float(pair.masked_fill(zero, 1.0).min())
        self.largest[name] = _worst(max, self.largest.get(name, 0.0), difference)
        if scale is None:
            self.cosine[name] = _worst(min, self.cosine.get(name, 1.0), cosine)


def _worst(choose: Callable[[float, float], float], before: float, now: float) -> float:
    return math.nan if math.isnan(before) or math.isnan(now) else choose(before, now)


def verify(
    source: str | os.PathLike[str],
    images: Pictures = (),
    *,
    preset: str | None = None,
    set: Mapping[str, Any] | None = None,
    which: str | None = None,
    prefix: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    progress: Progress = QUIET,
) -> VerifyResult:
    """Load a checkpoint by vitcli and by the library that wrote it, and compare their values.

    Both preprocess the images. Both encoders then read the same pixels (the library's, if it has a
    processor for the source), so that a difference is counted only where it arises.

    Args:
        source: a directory or hub id with the library's config; `transformers:`, `timm:` or
            `open_clip:` before it chooses the library.
        images: as in `Model.transform`; by default the built-in image.
        preset, set, which, prefix, image_size, dtype, device: as in `vitcli.load`, for vitcli's
            side.

    Raises:
        VitcliError: one of the two cannot load the source, or no image could be read (exit code 2).
    """
    library, own = checkpoint_of(os.fspath(source))
    model = load(
        weights=own,
        preset=preset,
        set=set,
        which=which,
        prefix=prefix,
        image_size=image_size,
        dtype=dtype,
        device=device,
    )
    return verify_model(model, images, library=library, progress=progress)


def verify_model(
    model: Model,
    images: Pictures = (),
    *,
    library: str | None = None,
    progress: Progress = QUIET,
) -> VerifyResult:
    """As `verify`, for a model that `vitcli.load` read from a checkpoint.

    Args:
        library: the one to compare with; None for the one that the checkpoint's config names.
    """
    if model.fresh or model.report is None:
        raise VitcliError(
            f"{model.name}: weights are random (expected a checkpoint)",
            "name a checkpoint directory or hub id: vitcli verify SOURCE",
        )
    source = model.request.weights if model.request and model.request.weights else model.weights
    named = f"{library}:{source}" if library else source
    backbone = open_reference(named, device=model.device, dtype=model.dtype)
    if len(backbone.blocks) < model.config.encoder.depth:
        raise VitcliError(
            f"{source}: the numbers of blocks differ (got {len(backbone.blocks)} by "
            f"{backbone.library}, expected {model.config.encoder.depth})",
            "report the source as a bug of vitcli",
        )
    pairs = _Pairs()
    failed: list[FailedImage] = []
    names: list[str] = []
    notes: list[str] = []
    given = picture_list(images)
    pictures = given or [synthetic_image(model.input_size)]
    seconds: list[tuple[float, float]] = []
    for number, picture in enumerate(pictures, start=1):
        name = picture_name(picture, number) if given else "synthetic"
        try:
            decoded = read_picture(picture).image
        except ImageError as error:
            failed.append(FailedImage(name, error.code, error.message))
            continue
        pixels = _pixels(model, backbone, decoded, pairs, notes)
        _compare(model, backbone, pixels, pairs)
        if not names:
            seconds = [_time(model, backbone, pixels) for _ in range(TIMED)]
        names.append(name)
        progress(number, len(pictures))
    if not names:
        raise VitcliError(f"verify: no image could be read; the first error: {failed[0].error}")
    checked = _checked(model, pairs)
    different = [one.name for one in checked if not one.equal]
    return VerifyResult(
        source=source,
        model=model_info(model),
        library=backbone.library,
        library_version=backbone.version,
        architecture=backbone.name,
        images=tuple(names),
        failed=tuple(failed),
        checked=checked,
        first_difference=different[0] if different else None,
        equal=not different,
        wall_s=min(here for here, _ in seconds),
        reference_wall_s=min(there for _, there in seconds),
        verdict=_verdict(checked, f"{backbone.library} {backbone.version}", len(names)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _pixels(
    model: Model, backbone: Backbone, picture: Any, pairs: _Pairs, notes: list[str]
) -> Tensor:
    """What both encoders read, after both preparations are compared."""
    theirs = backbone.prepare(picture)
    if model.known_preprocessing is None:
        if theirs is None:
            return model.transform(picture)  # raises what is unknown
        notes.append(
            "vitcli found no preprocessing config: both encoders read the library's pixels"
        )
        return theirs
    ours = model.transform(picture)
    if theirs is None:
        notes.append(
            f"{backbone.library} has no processor for this source: pixels are not compared"
        )
        return ours
    level = 1 / (255 * max(model.preprocessing.std))
    pairs.add("pixels", ours, theirs, scale=level)
    if model.asked_size and ours.shape != theirs.shape:
        notes.append("--image-size: both encoders read vitcli's pixels")
        return ours
    return theirs


@torch.inference_mode()
def _compare(model: Model, backbone: Backbone, pixels: Tensor, pairs: _Pairs) -> None:
    """Run both on (1, 3, height, width) and compare every layer and what they return."""
    depth = model.config.encoder.depth
    kept: list[Tensor] = []
    points = [(module, kept.append) for _, module in layer_points(model.encoder)[: depth + 1]]
    with hooked(points):
        ours: EncoderOutput = model.encoder(pixels)
    theirs = backbone.run(pixels, range(depth + 1))
    for layer, tokens in enumerate(kept):
        pairs.add(f"layer {layer}", tokens, theirs.layers[layer])
    for name, here, there in (
        ("tokens", ours.tokens, theirs.tokens),
        ("pooled", ours.pooled, theirs.pooled),
        ("output", ours.output, theirs.output),
        ("deepstack", ours.deepstack, theirs.deepstack),
    ):
        if here is not None and there is not None:
            pairs.add(name, here, there)


@torch.inference_mode()
def _time(model: Model, backbone: Backbone, pixels: Tensor) -> tuple[float, float]:
    """Seconds of one forward pass of each, in turn."""
    ours = timed(lambda: model.encoder(pixels), model.device)
    return ours, timed(lambda: backbone.run(pixels), model.device)


def _checked(model: Model, pairs: _Pairs) -> tuple[Checked, ...]:
    tolerance = tolerance_of(model)
    found = []
    for name, (shape, reference) in pairs.shapes.items():
        limit = LEVELS if name == "pixels" else tolerance
        difference = pairs.largest[name]
        cosine = pairs.cosine.get(name, math.nan)
        equal = difference <= limit  # false for NaN
        found.append(Checked(name, shape, reference, difference, cosine, limit, equal))
    return tuple(found)


def _verdict(checked: tuple[Checked, ...], library: str, images: int) -> str:
    on = f"on {images} image{'' if images == 1 else 's'}"
    different = [one for one in checked if not one.equal]
    if not different:
        worst = max((c for c in checked if c.name != "pixels"), key=lambda c: c.largest_difference)
        return (
            f"equal to {library} {on}: the largest relative difference is "
            f"{worst.largest_difference:.1e} at {worst.name} "
            f"(tolerance {worst.tolerance:.1e})"
        )
    first = different[0]
    if first.shape != first.reference_shape:
        how = f"its shape is {first.shape} by vitcli and {first.reference_shape} by the library"
    elif math.isnan(first.largest_difference):
        how = "a value is not finite (NaN or infinite)"
    elif first.name == "pixels":
        how = f"a pixel is off by {first.largest_difference:.2g} of 255 levels"
    else:
        how = (
            f"relative difference {first.largest_difference:.1e} (tolerance {first.tolerance:.1e})"
        )
    rest = f"; {len(different)} of {len(checked)} values differ" if len(different) > 1 else ""
    return f"not equal to {library} {on}: {first.name} is the first value that differs, {how}{rest}"
