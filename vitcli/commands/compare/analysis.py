"""Two encoders on the same images, layer by layer: CKA and plain differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from os import PathLike

import torch
from torch import Tensor

from vitcli.commands.compare.result import (
    EXAMPLES,
    BestPair,
    CompareResult,
    ConfigDifference,
    Hole,
    LayerDifferences,
    LinearCka,
)
from vitcli.commands.compare.similarity import (
    MIN_EXAMPLES,
    LayerDifference,
    MinibatchCka,
    Pairing,
    centered_gram,
    jackknife_error,
)
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError, check_choice
from vitcli.loading import as_model
from vitcli.model import (
    Color,
    Model,
    Picture,
    Pictures,
    Prepared,
    covered_box,
    image_batches,
    model_info,
    picture_list,
    stacked,
)
from vitcli.nn.attention import Grid
from vitcli.nn.encoder import EncoderOutput, hooked, layer_points
from vitcli.results import QUIET, FailedImage, Progress
from vitcli.stats import all_finite, student_quantile

IMAGES_FOR_CKA = 16
"""From this number of images on, examples are images; with fewer they are patches."""
PATCHES_AT_ONCE = 2048
"""Examples in a minibatch of patches: its Gram matrices have 2048 x 2048 entries a layer."""
IMAGES_AT_ONCE = 32
TOKENS_AT_ONCE = 2**27
"""Values of all layers of a minibatch that are kept to be compared: 512 MiB in float32."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative differences that rounding alone explains."""
Pair = tuple[Prepared, Prepared]


def compare(
    a: Model | str | PathLike[str],
    b: Model | str | PathLike[str],
    images: Pictures = (),
    *,
    examples: str = "auto",
    tolerance: float | None = None,
    background: Color = (255, 255, 255),
    progress: Progress = QUIET,
) -> CompareResult:
    """Compare A and B on images, each with its own preprocessing.

    Args:
        a, b: a model, or what `vitcli.load` takes as its first argument.
        images: paths, PIL images or (H, W, 3) arrays; by default a built-in image.
        examples: what CKA compares across: images, patches or auto (see `IMAGES_FOR_CKA`).
        tolerance: relative difference up to which layers are equal; by default that of the dtype.

    Raises:
        VitcliError: other `examples`, too few images, or patch grids that differ where patches are
            the examples.
    """
    check_choice("--examples", examples, EXAMPLES)
    a, b = as_model(a, by_library=True), as_model(b, by_library=True)
    pictures = picture_list(images)
    if examples == "auto":
        examples = "images" if len(pictures) >= IMAGES_FOR_CKA else "patches"
    if tolerance is None:
        tolerance = max(TOLERANCES[a.dtype], TOLERANCES[b.dtype])
    failed: list[FailedImage] = []
    pairs = _pairs(a, b, pictures, background, failed)
    together = _Comparison(a, b, examples)
    done = 0
    for batch in _minibatches(pairs, together.at_once, MIN_EXAMPLES if examples == "images" else 1):
        together.add([pair[0] for pair in batch], [pair[1] for pair in batch])
        done += len(batch)
        progress(done + len(failed), max(len(pictures), 1))
    if not done:
        raise VitcliError(
            failed[0].error if failed else "compare: no image could be read", exit_code=1
        )
    rows = together.differences()
    # A layer with a hole is neither equal nor within any tolerance.
    unequal = next((row.layer for row in rows if row.max_abs != 0), None)
    parted = next((row.layer for row in rows if not row.relative <= tolerance), None)
    if together.holes:
        code = "not finite"
    elif not together.same_shapes:
        code = "incomparable"
    else:
        code = "different" if parted else "rounding" if unequal else "identical"
    cka = together.cka()
    best = None if together.holes else together.best_pair()
    words = in_words(code, rows, best, done, tolerance, together.holes)
    if code == "incomparable" and best and best.low is not None and (a.fresh or b.fresh):
        words += ", not over seeds: random weights are one seed's"
    if cka.pairing:
        words += f"; {cka.pairing}"
    return CompareResult(
        a=model_info(a),
        b=model_info(b),
        images=done,
        verdict=words,
        verdict_code=code,
        summary=words,
        tolerance=tolerance,
        first_unequal=unequal,
        first_parted=parted,
        differences=tuple(rows),
        cka=cka,
        config_differences=config_differences(a, b),
        failed=tuple(failed),
        holes=tuple(together.holes),
        best_pair=best,
    )


def _pairs(
    a: Model, b: Model, pictures: Sequence[Picture], background: Color, failed: list[FailedImage]
) -> Iterator[Pair]:
    """Each image prepared for both, where both can read it."""
    if not pictures and a.input_size != b.input_size:
        raise VitcliError(
            "compare: the built-in image needs one input size (got "
            f"{_size_text(a.input_size)} px for A, {_size_text(b.input_size)} px for B)",
            f"name an image file, or add --image-size {_size_text(a.input_size)}",
        )
    shared = a.preprocessing == b.preprocessing  # then one decode serves both
    for one in [[picture] for picture in pictures] or [[]]:
        unread: list[FailedImage] = []
        first = next(image_batches(a, one, background, unread), None)
        second = first if shared else next(image_batches(b, one, background, unread), None)
        failed += unread[:1]
        if first and second:
            yield first[0], second[0]


def _minibatches(pairs: Iterator[Pair], size: int, least: int) -> Iterator[list[Pair]]:
    """Runs of equal shapes in parts of `size`, where a rest below `least` joins the part before."""
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
            f"--examples images: too few images of one size (got {len(batch)}, expected at least "
            f"{least})",
            "--examples patches",
        )
    return batch


def _shapes(pair: Pair) -> tuple[torch.Size, torch.Size]:
    return pair[0].pixels.shape, pair[1].pixels.shape


class _Comparison:
    """Runs both encoders on minibatches and keeps only Gram matrices and running differences."""

    def __init__(self, a: Model, b: Model, examples: str) -> None:
        self.models = (a, b)
        self.by_patch = examples == "patches"
        self.names = tuple([name for name, _ in layer_points(m.encoder)] for m in (a, b))
        self.rows: dict[str, LayerDifference] = {}
        self.holes: list[Hole] = []
        self.same_shapes = a.config.encoder.patch_size == b.config.encoder.patch_size
        self._cka = MinibatchCka()
        self._examples = 0
        self._pairing = Pairing()
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
        chosen: list[tuple[Tensor, Tensor]] = []
        if self.by_patch:
            if grids[0] != grids[1]:
                raise self._other_grids(grids[0], grids[1])
            grid = grids[0]
            chosen = [
                self._pairing.add(covered_box(a, one, grid), covered_box(b, one, grid), grid)
                for one in first
            ]
            if sum(len(places) for places, _ in chosen) < MIN_EXAMPLES:
                raise VitcliError(
                    "compare: the crops of A and B have too few patches in common (expected at "
                    f"least {MIN_EXAMPLES})",
                    f"add --examples images and at least {MIN_EXAMPLES} images",
                )
        if pixels[0].shape == pixels[1].shape:
            self._difference("pixels", pixels[0].cpu(), pixels[1].cpu())
        else:
            self.same_shapes = False
        kept: dict[str, Tensor] = {}
        where = first[0].path
        grams_a = self._run(0, pixels[0], kept, [pair[0] for pair in chosen], where)
        grams_b = self._run(1, pixels[1], kept, [pair[1] for pair in chosen], where)
        groups = [len(places) for places, _ in chosen] if self.by_patch else None
        self._cka.add(grams_a, grams_b, groups)
        self._examples += len(grams_a[0])

    def _other_grids(self, first: Grid, second: Grid) -> VitcliError:
        patch = self.models[1].config.encoder.patch_size
        size = _size_text((first[0] * patch, first[1] * patch))
        return VitcliError(
            "--examples patches: CKA across patches needs equal grids (got "
            f"{first[0]}x{first[1]} patches for A, {second[0]}x{second[1]} for B)",
            f"add --set-b encoder.image_size={size}, or --examples images with at least "
            f"{MIN_EXAMPLES} images",
        )

    @torch.inference_mode()
    def _run(
        self,
        side: int,
        pixels: Tensor,
        kept: dict[str, Tensor],
        places: Sequence[Tensor],
        where: str,
    ) -> list[Tensor]:
        """The Gram matrix of each layer; A's values are put into `kept`, B's compared with it."""
        encoder = self.models[side].encoder
        grams: list[Tensor] = []
        points = layer_points(encoder)
        names = iter([name for name, _ in points])
        prefix, count = encoder.prefix_tokens, math.prod(encoder.front_end.grid(pixels))

        def observe(tokens: Tensor) -> None:
            name, features = next(names), tokens
            if self.by_patch:
                patches = tokens[:, prefix:].cpu()
                if patches.shape[1] != count:
                    raise VitcliError(
                        f"{self.models[side].name}: {name} has {patches.shape[1]} places and the "
                        f"end {count}: CKA across patches needs one grid",
                        f"--examples images, with at least {MIN_EXAMPLES} images",
                    )
                features = torch.cat([x[i] for x, i in zip(patches, places, strict=True)])
            grams.append(centered_gram(features.cpu()))
            self._keep(side, name, tokens, kept, where)

        self._find_hole(side, "pixels", pixels, where)
        kernels = self.models[side].runner.kernels()
        with kernels, hooked((module, observe) for _, module in points):
            output: EncoderOutput = encoder(pixels)
        for name, value in (("pooled", output.pooled), ("head", output.output)):
            if value is not None:
                self._keep(side, name, value, kept, where)
        return grams

    def _keep(
        self, side: int, name: str, value: Tensor, kept: dict[str, Tensor], where: str
    ) -> None:
        self._find_hole(side, name, value, where)
        if side == 0:
            kept[name] = value.cpu()
        elif name in kept:
            self._difference(name, kept.pop(name), value.cpu())

    def _find_hole(self, side: int, layer: str, value: Tensor, where: str) -> None:
        """Note the first layer of a side that is not finite."""
        letter = "AB"[side]
        if not any(hole.side == letter for hole in self.holes) and not all_finite(value):
            self.holes.append(Hole(letter, layer, where))

    def _difference(self, name: str, a: Tensor, b: Tensor) -> None:
        if a.shape != b.shape:
            self.same_shapes &= name not in self.names[0]
            return
        self.rows.setdefault(name, LayerDifference(name)).add(a, b)

    def differences(self) -> list[LayerDifferences]:
        """Rows of the layers that subtracting makes sense of: none where patches differ in size."""
        order = ["pixels", *self.names[0], "pooled", "head"] if self.same_shapes else ["pixels"]
        return [
            LayerDifferences(row.name, row.max_abs, row.relative, row.cosine, row.cosine_min)
            for row in (self.rows[name] for name in order if name in self.rows)
        ]

    def cka(self) -> LinearCka:
        left_out = self._cka.spread()
        errors = None if left_out is None else _table(jackknife_error(left_out))
        return LinearCka(
            layers_a=tuple(self.names[0]),
            layers_b=tuple(self.names[1]),
            values=_table(self._cka.value()),
            examples="patches" if self.by_patch else "images",
            count=self._examples,
            minibatches=self._cka.minibatches,
            standard_errors=errors,
            pairing=self._pairing.in_words(),
        )

    def best_pair(self) -> BestPair | None:
        """The most similar layers, and how many other pairs could as well be the most similar."""
        values = self._cka.value()
        if values.isnan().all():
            return None
        place = int(values.nan_to_num(-1.0).argmax())
        row, column = divmod(place, values.shape[1])
        best, left_out = float(values[row, column]), self._cka.spread()
        low = high = ties = None
        if left_out is not None:
            t = student_quantile(len(left_out) - 1)
            half = t * float(jackknife_error(left_out)[row, column])
            low, high = best - half, min(best + half, 1.0)
            gaps = t * jackknife_error(left_out[:, row, column, None, None] - left_out)
            # NaN, of a layer without variation, is smaller than nothing: it is no tie.
            ties = int((best - values <= gaps).sum()) - 1
        return BestPair(self.names[0][row], self.names[1][column], best, low, high, ties)


def _table(values: Tensor) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(v if math.isfinite(v) else None for v in row) for row in values.tolist())


def in_words(
    code: str,
    rows: Sequence[LayerDifferences],
    best: BestPair | None,
    images: int,
    tolerance: float,
    holes: Sequence[Hole],
) -> str:
    """One line: not finite, identical, equal up to rounding, or different from which layer on."""
    on = f"on {images} image{'s' if images != 1 else ''}"
    if code == "not finite":
        places = (
            f"{hole.side} is not finite from {hole.layer} on ({hole.image})" for hole in holes
        )
        return f"NaN or infinity: {'; '.join(places)}; nothing else is reported"
    if code == "incomparable":
        text = "A and B have different patches, widths or token counts, so only CKA compares them"
        return text + _best(best, on)
    largest = max(rows, key=lambda row: row.relative)
    first = next((row for row in rows if row.max_abs > 0), None)
    if first is None:
        return f"identical: all {len(rows)} layers agree bit for bit {on}"
    if code == "rounding":
        return (
            f"equal up to rounding {on}: first at {_size(first)}; "
            f"largest at {_size(largest)}; compare with --dtype float64 to distinguish rounding "
            "from a small error"
        )
    parted = next(row for row in rows if row.relative > tolerance)
    before = "" if parted is first else f" (first unequal: {_size(first)})"
    return f"they differ from {_size(parted)} {on}{before}; largest at {_size(largest)}"


def _best(best: BestPair | None, on: str) -> str:
    if best is None:
        return ""
    pair = f"{best.layer_a} of A and {best.layer_b} of B, CKA {best.cka:.3f}"
    if best.low is None or best.ties is None:
        return f"; largest CKA: {pair}, {on} (too few images for an interval)"
    pair += f" [{best.low:.3f}, {best.high:.3f}]"
    over = f"{on}; 95% interval over images (jackknife)"
    if best.ties:
        pairs = f"{best.ties} other pair{'s' * (best.ties != 1)} of layers"
        return f"; largest CKA: {pair}, which does not differ significantly from {pairs} {over}"
    return f"; most similar: {pair}, {over}"


def _size(row: LayerDifferences) -> str:
    return f"{row.layer}: {row.max_abs:.2e}, {row.relative:.1e} of its largest value"


def _size_text(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def config_differences(a: Model, b: Model) -> tuple[ConfigDifference, ...]:
    """The keys of encoder and preprocessing that are not the same."""
    first, second = (
        dotted({"encoder": m.config.encoder.model_dump(), "preprocess": dict(m.preprocessing)})
        for m in (a, b)
    )
    return tuple(
        ConfigDifference(key, str(first.get(key)), str(second.get(key)))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    )
