"""Entropy and distance of attention, per layer and head, of one encoder or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from vitcli.commands.attention.reducers import (
    FIELDS,
    MASS_KINDS,
    AttentionSamples,
    attention_maps,
    largest_entropies,
    observe_attention,
    parse_blocks,
    patch_index,
    query_slice,
    token_groups,
)
from vitcli.commands.attention.result import (
    OUTLIER_CUT,
    AttentionResult,
    ClsMass,
    EncoderAttention,
    HeadAttention,
    LayerAttention,
    MapPanel,
    MapSheet,
    OutlierCut,
    SeenImage,
)
from vitcli.errors import VitcliError
from vitcli.images.preprocess import margin_color, patch_box
from vitcli.loading import as_model, load_model
from vitcli.model import (
    Color,
    Model,
    Pictures,
    Prepared,
    covered_box,
    image_batches,
    picture_list,
    stacked,
)
from vitcli.results import QUIET, RANDOM_WEIGHTS, FailedImage, Progress
from vitcli.stats import CONFIDENCE, mean_interval

Watch = Callable[[Model, Sequence[Prepared], Tensor], None]
"""Called with each batch after its statistics, for example to draw maps, while its encoder and its
images are in memory; `Progress` gets counts alone."""


def attn_entropy(
    models: Model | str | PathLike[str] | Iterable[Model | str | PathLike[str]],
    images: Pictures = (),
    *,
    query: str = "all",
    layers: str | int | Sequence[int] | None = None,
    outlier_cut: OutlierCut = OUTLIER_CUT,
    background: Color = (255, 255, 255),
    seeds: int = 1,
    watch: Watch | None = None,
    progress: Progress = QUIET,
) -> AttentionResult:
    """Measure the attention of each encoder on the same images, one encoder in memory at a time.

    Args:
        models: one encoder or several: a model, or what `vitcli.load` takes first.
        images: paths, PIL images or (H, W, 3) arrays; by default a built-in image.
        query: all, cls, patch or "ROW,COL": the queries over which to average.
        layers: the blocks to report, as [3, 7, 11], "3,7,11" or -1; by default all.
        seeds: of random weights, from the model's own seed on: means are over all of them.
        watch: called with each batch of the first seed after its statistics.

    Raises:
        VitcliError: `seeds` above 1 for weights that are not random; a query or a layer that an
            encoder does not have; a library that returns no attention between all tokens;
            attention or tokens that are not finite, with the block where that begins (exit
            code 1).
    """
    single = isinstance(models, Model | str | PathLike)
    sources: Iterable[Any] = [models] if single else models  # type: ignore[assignment]
    pictures = picture_list(images)
    failed: list[FailedImage] = []
    answers: list[EncoderAttention] = []
    chosen: list[tuple[int, ...]] = []
    for source in sources:
        model = as_model(source, by_library=True)
        blocks = parse_blocks(layers, model.config.encoder.depth)
        draws: list[list[AttentionSamples]] = []
        for place in range(seeds):
            drawn = _redrawn(model, place) if place else model
            unread: list[FailedImage] = []
            seen: list[SeenImage] = []
            samples: list[AttentionSamples] = []
            for batch in image_batches(drawn, pictures, background, unread):
                pixels = stacked(drawn, batch)
                with drawn.runner.kernels():
                    part = observe_attention(drawn.encoder, pixels, query, _name(drawn))
                    if watch and not place:
                        watch(drawn, batch, pixels)
                seen += [SeenImage(item.path, part.tokens, part.grid) for item in batch]
                samples.append(part)
                done = place * max(len(pictures), 1) + len(seen) + len(unread)
                progress(done, seeds * max(len(pictures), 1))
            draws.append(samples)
        failed += [failure for failure in unread if failure not in failed]
        if samples:
            answers.append(_encoder(model, tuple(seen), draws, outlier_cut))
            chosen.append(blocks)
    code, words = verdict(answers)
    return AttentionResult(
        query=query,
        outlier_rule=str(outlier_cut),
        models=tuple(
            replace(answer, layers=tuple(answer.layers[block - 1] for block in blocks))
            for answer, blocks in zip(answers, chosen, strict=True)
        ),
        failed=tuple(failed),
        verdict=words,
        verdict_code=code,
    )


def _name(model: Model) -> str:
    return f"{model.name} ({model.weights})"


def _redrawn(model: Model, place: int) -> Model:
    """The same encoder with the random weights of a later seed."""
    if model.request is None or not model.fresh:
        raise VitcliError(
            f"{_name(model)}: has no seed to repeat",
            "give a preset or a config, or leave seeds out",
        )
    return load_model(model.request.repeated(place), by_library=True)


def _encoder(
    model: Model,
    images: tuple[SeenImage, ...],
    draws: Sequence[Sequence[AttentionSamples]],
    cut: OutlierCut,
) -> EncoderAttention:
    """`draws` are the samples of all images, once for each seed."""
    samples = [part for own in draws for part in own]
    tokens = {part.tokens for part in samples}
    heads = torch.cat([part.heads for part in samples], dim=1)  # (L, S b, H, F)
    normalized = heads[..., FIELDS.index("entropy_share")].unflatten(1, (len(draws), -1))
    first = model.request.seed if model.request and model.fresh else None
    seeds = () if first is None else tuple(range(first, first + len(draws)))
    weights = f"random (seeds {first} to {seeds[-1]})" if len(draws) > 1 else model.weights
    layers = []
    for block in range(len(heads)):
        norms = torch.cat([part.patch_norms[block].flatten() for part in samples])
        layers.append(_layer(block + 1, heads[block], normalized[block], norms, cut))
    return EncoderAttention(
        name=model.name,
        weights=weights,
        device=str(model.device),
        dtype=model.dtype_name,
        fresh=model.fresh,
        seeds=seeds,
        registers=model.config.encoder.registers,
        tokens=tokens.pop() if len(tokens) == 1 else None,
        heads=heads.shape[2],
        depth=model.config.encoder.depth,
        row_sum_error=float(heads[..., FIELDS.index("row_sum_error")].max()),
        images=images,
        layers=tuple(layers),
    )


def _layer(
    block: int, samples: Tensor, normalized: Tensor, norms: Tensor, cut: OutlierCut
) -> LayerAttention:
    """(S b, H, F) samples, (S, b, H) normalized entropies and all patch norms of one block."""
    by_head = samples.mean(0)  # (H, F)
    median = float(norms.median())
    limit = cut.norm(median)
    shares = normalized.mean((0, 1)).tolist()  # (H,)
    return LayerAttention(
        layer=block,
        entropy_normalised=float(normalized.mean()),
        head_spread=_deviation(normalized.mean(1)),
        image_spread=_deviation(normalized.mean((0, 2))),
        seed_spread=_deviation(normalized.mean((1, 2))),
        patch_norm_median=median,
        patch_norm_max=float(norms.max()),
        outlier_cut=limit,
        outlier_share=float((norms > limit).double().mean()),
        by_image=tuple(normalized.mean((0, 2)).tolist()),
        by_seed=tuple(normalized.mean((1, 2)).tolist()),
        heads=tuple(
            HeadAttention(head=head, entropy_normalised=share, **_means(values))
            for head, (values, share) in enumerate(zip(by_head, shares, strict=True), start=1)
        ),
        **_means(samples.mean((0, 1))),
    )


def _means(values: Tensor) -> dict[str, Any]:
    """What a layer and a head both report, from values in the order of FIELDS; None for NaN."""
    named = dict(zip(FIELDS, values.tolist(), strict=True))
    known = {name: None if math.isnan(value) else value for name, value in named.items()}
    mass = {kind: known[f"cls_on_{kind}"] or 0.0 for kind in MASS_KINDS}
    return {
        "entropy": named["entropy"],
        "entropy_cls": known["entropy_cls"],
        "entropy_patches": named["entropy_patches"],
        "entropy_registers": known["entropy_registers"],
        "attention_distance_px": named["distance"],
        "cls_mass": None if known["cls_on_cls"] is None else ClsMass(**mass),
    }


def _deviation(values: Tensor) -> float | None:
    """Sample standard deviation along the last axis, mean over others; None for one value."""
    return float(values.std(-1).mean()) if values.shape[-1] > 1 else None


def verdict(encoders: Sequence[EncoderAttention]) -> tuple[str, str]:
    """A code and one line: whose last layer is smoother, where images or seeds distinguish them.

    Encoders are compared by the paired differences of their normalized entropies image by image,
    or, of random weights, seed by seed, with Student's interval; with k encoders each of the
    k - 1 comparisons with the smoothest has its confidence raised to 1 - 0.05 / (k - 1)
    (Bonferroni).
    """
    if not encoders:
        return "no image", "no image could be read"
    if any(math.isnan(encoder.layers[-1].entropy_normalised) for encoder in encoders):
        return "undefined", "the chosen queries see a single token each: their entropy is always 0"
    ranked = sorted(encoders, key=lambda e: e.layers[-1].entropy_normalised, reverse=True)
    first, rest = ranked[0], ranked[1:]
    if not rest:
        code = "one encoder"
        text = f"last layer of {first.name}: {_spread(first.layers[-1])} of uniform attention"
    elif all(_same(first, other) for other in rest):
        code = "identical"
        text = f"identical: {len(ranked)} encoders with the same attention in every layer and head"
    else:
        code, text = _ranking(first, rest)
    if any(encoder.fresh for encoder in encoders):
        text += f"; {RANDOM_WEIGHTS}"
    return code, text


def _same(a: EncoderAttention, b: EncoderAttention) -> bool:
    """Whether two encoders gave equal values on the same images; repr compares NaN with NaN."""
    return a.images == b.images and repr(a.layers) == repr(b.layers)


def _ranking(first: EncoderAttention, rest: Sequence[EncoderAttention]) -> tuple[str, str]:
    everyone = (first, *rest)
    fresh = any(encoder.fresh for encoder in everyone)
    unit = "seed" if fresh else "image"
    pairs = [(other, *_paired(first, other, len(rest), fresh)) for other in rest]
    shared = min(count for _, count, *_ in pairs)
    if shared < 2:
        one = "one seed of random weights" if fresh else "one image"
        repeats = "; --seeds 5 repeats them" if all(encoder.fresh for encoder in everyone) else ""
        more = repeats if fresh else " on other images"
        text = f"{_figures(everyone)}; {one} cannot show whether they differ{more}"
        return f"one {unit}", text
    facts = []
    for other, _, mean, low, high in pairs:
        digits = ".4f" if high - low > 1e-3 else ".2g"
        facts.append(f"{mean:{digits}} [{low:{digits}}, {high:{digits}}] above {_title(other)}")
    together = " for all comparisons together" if len(rest) > 1 else ""
    seen = len(first.images)
    on = f" on {seen} image{'s' * (seen != 1)}" if fresh else ""
    paired = f"paired over {shared} {unit}s{on}, {CONFIDENCE:.0%} confidence{together}"
    if all(low > 0 for *_, low, _ in pairs):
        return "distinguished", (
            f"smoothest in its last layer: {_title(first)}, at {_spread(first.layers[-1])} of "
            f"uniform attention, {', '.join(facts)}; {paired}"
        )
    names = [_title(other) for other, _, _, low, _ in pairs if not low > 0]
    return "cannot be distinguished", (
        f"{' and '.join([_title(first), *names])} do not differ significantly in their last "
        f"layers: {_title(first)} is at {_spread(first.layers[-1])} of uniform attention, "
        f"{', '.join(facts)}; {paired}"
    )


def _figures(encoders: Sequence[EncoderAttention]) -> str:
    values = (f"{_title(e)} {e.layers[-1].entropy_normalised:.4f}" for e in encoders)
    return f"last layer, share of uniform attention: {', '.join(values)}"


def _paired(
    a: EncoderAttention, b: EncoderAttention, comparisons: int, by_seed: bool
) -> tuple[int, float, float, float]:
    """Images or seeds that both have, and the mean of a - b over them with its interval."""
    of_a, of_b = (_last(encoder, by_seed) for encoder in (a, b))
    gaps = [value - of_b[key] for key, value in of_a.items() if key in of_b]
    if not gaps:
        return 0, math.nan, math.nan, math.nan
    return len(gaps), *mean_interval(gaps, 1 - (1 - CONFIDENCE) / comparisons)


def _last(encoder: EncoderAttention, by_seed: bool) -> dict[str | int, float]:
    """The last layer's normalized entropies by seed or by the image's path."""
    layer = encoder.layers[-1]
    if by_seed:
        return dict(zip(encoder.seeds, layer.by_seed, strict=False))  # a checkpoint has no seed
    return dict(zip((image.path for image in encoder.images), layer.by_image, strict=True))


def _title(encoder: EncoderAttention) -> str:
    return f"{encoder.name} ({encoder.registers} registers, {encoder.weights})"


def _spread(layer: LayerAttention) -> str:
    spreads = {"heads": layer.head_spread, "images": layer.image_spread}
    spreads["seeds"] = layer.seed_spread
    facts = [f"±{value:.4f} over {what}" for what, value in spreads.items() if value is not None]
    return f"{layer.entropy_normalised:.4f}" + (f" ({', '.join(facts)})" if facts else "")


MOST_PANELS = 84
"""Maps in one figure: a page of some 20 inches; beyond it they are left out."""


@dataclass
class OverlayCollector:
    """Watches `attn_entropy` and keeps one query's maps of what goes by.

    Without `layers` it is the last block. `left_out` counts sheets that did not fit in MOST_PANELS.
    Values of the sheets are in times uniform: attention times the number of tokens that the query
    can see.
    """

    query: str
    layers: str | None
    fusion: str
    rollout: bool
    sheets: list[MapSheet] = field(default_factory=list)
    pictures: list[object] = field(default_factory=list)
    """The Pillow images that `MapSheet.image` counts."""
    left_out: int = 0

    def __call__(self, model: Model, batch: Sequence[Prepared], pixels: Tensor) -> None:
        layers = parse_blocks(self.layers or "-1", model.config.encoder.depth)
        per_sheet = model.config.encoder.heads + 2 + self.rollout
        drawn = sum(len(sheet.panels) + 1 for sheet in self.sheets)
        room = max(0, MOST_PANELS - drawn) // (per_sheet * len(layers))
        if not self.sheets:
            room = max(1, room)
        self.left_out += max(0, len(batch) - room) * len(layers)
        if not room:
            return
        maps = attention_maps(
            model.encoder,
            pixels[:room],
            layers,
            query=self.query,
            fusion=self.fusion,
            rollout=self.rollout,
        )
        names = {"cls": "CLS", "patch": "mean patch query"}
        grid = model.encoder.front_end.grid(pixels)
        query = names.get(maps.query, f"patch {maps.query}")
        chosen = query_slice(maps.query, token_groups(model.encoder), grid)
        most = largest_entropies(model.encoder, grid)
        # Times uniform: attention by the number of tokens that the query can see.
        seen = torch.stack([most[layer - 1][chosen].exp().mean() for layer in layers])
        uniform = seen[:, None, None, None]
        fused, heads = maps.fused * uniform, maps.heads * uniform[..., None]
        rollout = None if maps.rollout is None else maps.rollout * uniform
        for place, item in enumerate(batch[:room]):
            box = covered_box(model, item, grid)
            query_box = None
            if "," in maps.query:
                row, column = divmod(patch_index(maps.query, grid), grid[1])
                query_box = patch_box(box, row, column, grid)
            self.pictures.append(item.decoded.image)
            for index, layer in enumerate(layers):
                panels = [MapPanel(f"{self.fusion} of heads", _tuples(fused[index, place]))]
                if rollout is not None:
                    rolled = _tuples(rollout[index, place])
                    panels.append(MapPanel(f"rollout of {self.fusion}", rolled))
                panels += [
                    MapPanel(f"head {head}", _tuples(values))
                    for head, values in enumerate(heads[index, place], start=1)
                ]
                title = (
                    f"{PurePath(item.path).name}: {model.name}, "
                    f"{model.config.encoder.registers} registers, {model.weights}, "
                    f"block {layer}, query {query}"
                )
                shown = len(self.pictures) - 1
                margin = margin_color(model.preprocessing)
                self.sheets.append(MapSheet(shown, title, box, query_box, tuple(panels), margin))


def _tuples(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.tolist())
