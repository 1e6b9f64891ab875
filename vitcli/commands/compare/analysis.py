"""Two encoders on the same images, layer by layer: CKA and plain differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vitcli.commands.compare.result import (
    CompareResult,
    ConfigDifference,
    LayerDifferences,
    LinearCka,
)
from vitcli.commands.compare.similarity import (
    MIN_EXAMPLES,
    LayerDifference,
    MinibatchCka,
    centered_gram,
)
from vitcli.commands.encode.analysis import model_info
from vitcli.errors import VitcliError
from vitcli.inference import Advance, Prepared, image_batches, stacked
from vitcli.model import Color, Model
from vitcli.nn.encoder import EncoderOutput
from vitcli.nn.hooks import layer_points, tapped
from vitcli.results import FailedImage

IMAGES_FOR_CKA = 16
"""From so many images on, examples are images; fewer say too little, so patches are compared."""
PATCHES_AT_ONCE = 2048
"""Examples in a minibatch of patches: its Gram matrices have 2048 x 2048 entries a layer."""
IMAGES_AT_ONCE = 32
TOKENS_AT_ONCE = 2**27
"""Values of all layers of a minibatch that are kept to be compared: 512 MiB in float32."""

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 1e-2,
}
"""Relative differences that rounding alone explains."""

Pair = tuple[Prepared, Prepared]


def compare(
    a: Model,
    b: Model,
    paths: Sequence[str],
    *,
    examples: str = "auto",
    tolerance: float | None = None,
    background: Color = (255, 255, 255),
    advance: Advance = lambda done, total: None,
) -> CompareResult:
    """Compare A and B on images, each with its own preprocessing.

    `examples` is images, patches or auto (see `IMAGES_FOR_CKA`).

    Raises:
        VitcliError: too few images, or patch grids that differ where patches are the examples.
    """
    if examples == "auto":
        examples = "images" if len(paths) >= IMAGES_FOR_CKA else "patches"
    if tolerance is None:
        tolerance = max(TOLERANCES[a.dtype], TOLERANCES[b.dtype])
    failed: list[FailedImage] = []
    pairs = _pairs(a, b, paths, background, failed)
    together = _Together(a, b, examples)
    images = 0
    for batch in _minibatches(pairs, together.at_once, MIN_EXAMPLES if examples == "images" else 1):
        together.add([pair[0] for pair in batch], [pair[1] for pair in batch])
        images += len(batch)
        advance(images + len(failed), max(len(paths), 1))
    if not images:
        raise VitcliError(failed[0].error if failed else "no image to compare on", exit_code=1)
    rows = together.differences()
    unequal = next((row.layer for row in rows if row.max_abs > 0), None)
    parted = next((row.layer for row in rows if row.relative > tolerance), None)
    config = config_differences(a, b)
    verdict = (
        "incomparable"
        if not together.same_shapes
        else ("identical" if not unequal else ("different" if parted else "rounding"))
    )
    cka = together.cka()
    return CompareResult(
        a=model_info(a),
        b=model_info(b),
        images=images,
        verdict=verdict,
        summary=summary(verdict, rows, cka, images, tolerance),
        tolerance=tolerance,
        first_unequal=unequal,
        first_parted=parted,
        differences=tuple(rows),
        cka=cka,
        config_differences=config,
        failed=tuple(failed),
    )


def _pairs(
    a: Model,
    b: Model,
    paths: Sequence[str],
    background: Color,
    failed: list[FailedImage],
) -> Iterator[Pair]:
    """Each image prepared for both, where both can read it."""
    if not paths and a.input_size != b.input_size:
        raise VitcliError(
            "the built-in picture has another size for each of these encoders",
            "name an image, or give both the same --image-size",
        )
    shared = a.preprocessing == b.preprocessing  # then one decode serves both
    for one in [[path] for path in paths] or [[]]:
        unread: list[FailedImage] = []
        first = next(image_batches(a, one, background, unread), None)
        second = first if shared else next(image_batches(b, one, background, unread), None)
        failed += unread[:1]
        if first and second:
            yield first[0], second[0]


def _minibatches(pairs: Iterator[Pair], size: int, least: int) -> Iterator[list[Pair]]:
    """Runs of equal shapes in parts of `size`, where a rest below `least` joins the part before.

    Raises:
        VitcliError: a whole run is shorter than `least`.
    """
    batch: list[Pair] = []
    for pair in pairs:
        if batch and _shapes(pair) != _shapes(batch[0]):
            yield _enough(batch, least)
            batch = []
        batch.append(pair)
        if len(batch) == size + least:
            yield batch[:size]
            batch = batch[size:]
    if batch:
        yield _enough(batch, least)


def _enough(batch: list[Pair], least: int) -> list[Pair]:
    if len(batch) < least:
        raise VitcliError(
            f"only {len(batch)} images of one size: CKA across images needs at least {least}",
            "more images, or --examples patches",
        )
    return batch


def _shapes(pair: Pair) -> tuple[torch.Size, torch.Size]:
    return pair[0].pixels.shape, pair[1].pixels.shape


class _Together:
    """Runs both encoders on minibatches and keeps only Gram matrices and running differences."""

    def __init__(self, a: Model, b: Model, examples: str) -> None:
        self.models = (a, b)
        self.by_patch = examples == "patches"
        self.names = tuple([name for name, _ in layer_points(m.encoder)] for m in (a, b))
        self.rows: dict[str, LayerDifference] = {}
        self.same_shapes = True
        self._cka = MinibatchCka()
        self._examples = 0
        encoder, size = a.config.encoder, a.input_size
        rows, columns = encoder.grid_at(size)
        patches = rows * columns
        kept = len(self.names[0]) * (patches + encoder.prefix_tokens) * encoder.hidden
        self.at_once = (
            max(1, PATCHES_AT_ONCE // patches)
            if self.by_patch
            else max(MIN_EXAMPLES, min(IMAGES_AT_ONCE, TOKENS_AT_ONCE // kept))
        )

    def add(self, first: Sequence[Prepared], second: Sequence[Prepared]) -> None:
        a, b = self.models
        pixels = stacked(a, first), stacked(b, second)
        grids = [m.encoder.front_end.grid(p) for m, p in zip(self.models, pixels, strict=True)]
        if self.by_patch and grids[0] != grids[1]:
            (r, c), (s, d) = grids
            raise VitcliError(
                f"A cuts the image into {r}x{c} patches, B into {s}x{d}: no common patches",
                "more images and --examples images, or one --image-size that gives equal grids",
            )
        if pixels[0].shape == pixels[1].shape:
            self._difference("pixels", pixels[0].cpu(), pixels[1].cpu())
        kept: dict[str, Tensor] = {}
        grams_a = self._run(a, pixels[0], kept, compare=False)
        grams_b = self._run(b, pixels[1], kept, compare=True)
        self._cka.add(grams_a, grams_b)
        self._examples += len(grams_a[0])

    @torch.inference_mode()
    def _run(
        self, model: Model, pixels: Tensor, kept: dict[str, Tensor], *, compare: bool
    ) -> list[Tensor]:
        """The Gram matrix of each layer; values are put into `kept`, or compared with it."""
        grams: list[Tensor] = []
        points = layer_points(model.encoder)
        names = iter([name for name, _ in points])
        prefix = model.encoder.prefix_tokens

        def observe(tokens: Tensor) -> None:
            name = next(names)
            features = tokens[:, prefix:].flatten(0, 1) if self.by_patch else tokens
            grams.append(centered_gram(features.cpu()))
            self._keep(name, tokens, kept, compare)

        with tapped((module, observe) for _, module in points):
            output: EncoderOutput = model.encoder(pixels)
        for name, value in (("pooled", output.pooled), ("head", output.output)):
            if value is not None:
                self._keep(name, value, kept, compare)
        return grams

    def _keep(self, name: str, value: Tensor, kept: dict[str, Tensor], compare: bool) -> None:
        if not compare:
            kept[name] = value.cpu()
        elif name in kept:
            self._difference(name, kept.pop(name), value.cpu())

    def _difference(self, name: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            self.same_shapes &= name not in self.names[0]
            return
        self.rows.setdefault(name, LayerDifference(name)).add(a, b)

    def differences(self) -> list[LayerDifferences]:
        order = ["pixels", *self.names[0], "pooled", "head"]
        return [
            LayerDifferences(row.name, row.max_abs, row.relative, row.cosine, row.cosine_min)
            for row in (self.rows[name] for name in order if name in self.rows)
        ]

    def cka(self) -> LinearCka:
        values = self._cka.value()
        return LinearCka(
            layers_a=tuple(self.names[0]),
            layers_b=tuple(self.names[1]),
            values=tuple(
                tuple(None if value != value else value for value in row) for row in values.tolist()
            ),
            examples="patches" if self.by_patch else "images",
            count=self._examples,
            minibatches=self._cka.minibatches,
        )


def summary(
    verdict: str,
    rows: Sequence[LayerDifferences],
    cka: LinearCka,
    images: int,
    tolerance: float,
) -> str:
    """One line: equal, equal up to rounding, or where they part and by how much."""
    on = f"on {images} image{'s' if images != 1 else ''}"
    if verdict == "incomparable":
        pairs = [
            (value, name_a, name_b)
            for name_a, row in zip(cka.layers_a, cka.values, strict=True)
            for name_b, value in zip(cka.layers_b, row, strict=True)
            if value is not None
        ]
        best = max(pairs, default=None)
        alike = f"; most alike: {best[1]} of A, {best[2]} of B, CKA {best[0]:.3f}" if best else ""
        return f"tokens of A and B have different shapes, so only CKA compares them{alike}"
    largest = max(rows, key=lambda row: row.relative)
    first = next((row for row in rows if row.max_abs > 0), None)
    if first is None:
        return f"equal: all {len(rows)} layers agree bit for bit {on}"
    if verdict == "rounding":
        return (
            f"equal up to rounding {on}: first at {_size(first)}; "
            f"largest at {_size(largest)}; --dtype float64 tells rounding from a small mistake"
        )
    parted = next(row for row in rows if row.relative > tolerance)
    before = "" if parted is first else f" (first unequal: {_size(first)})"
    return f"they part at {_size(parted)} {on}{before}; largest at {_size(largest)}"


def _size(row: LayerDifferences) -> str:
    return f"{row.layer}: {row.max_abs:.2e}, {row.relative:.1e} of its largest value"


def config_differences(a: Model, b: Model) -> tuple[ConfigDifference, ...]:
    """The keys of encoder and preprocessing that are not the same."""
    first, second = (
        dict(
            _leaves({"encoder": m.config.encoder.model_dump(), "preprocess": dict(m.preprocessing)})
        )
        for m in (a, b)
    )
    return tuple(
        ConfigDifference(key, str(first.get(key)), str(second.get(key)))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    else:
        yield path, value
