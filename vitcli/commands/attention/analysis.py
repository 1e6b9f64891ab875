"""How sharp or smooth attention is, by layer and head, for one encoder or several side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitcli.commands.attention.reductions import (
    FIELDS,
    MASS_KINDS,
    AttentionSamples,
    observe_attention,
)
from vitcli.commands.attention.result import (
    AttentionResult,
    ClsMass,
    EncoderAttention,
    HeadAttention,
    LayerAttention,
    SeenImage,
)
from vitcli.errors import VitcliError
from vitcli.inference import Advance, Prepared, image_batches, stacked
from vitcli.model import Color, Model
from vitcli.results import FailedImage

Watch = Callable[[Model, Sequence[Prepared], Tensor], None]
"""Sees each batch that an encoder reads, for what else is wanted of it."""


def unwatched(model: Model, batch: Sequence[Prepared], pixels: Tensor) -> None:
    """Nothing else is wanted."""


@dataclass(frozen=True)
class OutlierCut:
    """Above which norm a patch token is an outlier (Darcet et al. 2024, section 2.1).

    They cut DINOv2-g at a norm of 150, read off its histogram; a multiple of the layer's median
    norm is such a cut without a unit.
    """

    value: float
    of_median: bool

    @classmethod
    def parse(cls, text: str) -> OutlierCut:
        """`3x` is three times the median of the layer, `150` a norm."""
        number = text.removesuffix("x")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise VitcliError(
                f"--outlier-cut {text}: expected 3x or 150",
                "3x is three times the layer's median norm, 150 a norm",
            )
        return cls(value, text != number)

    def norm(self, median: float) -> float:
        return self.value * median if self.of_median else self.value

    def __str__(self) -> str:
        of = "times the median norm of the layer's patch tokens" if self.of_median else "in norm"
        return f"above {self.value:g} {of}"


def parse_layers(text: str | None, depth: int) -> tuple[int, ...]:
    """`-1` or `3,7,11` as blocks counted from 1, in order; None is all of them.

    Raises:
        VitcliError: not numbers, or no such block.
    """
    if text is None:
        return tuple(range(1, depth + 1))
    try:
        asked = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise VitcliError(f"--layers {text}: not numbers", "for example 3,7,11 or -1") from error
    blocks = [block if block > 0 else depth + 1 + block for block in asked]
    for number, block in zip(asked, blocks, strict=True):
        if number == 0 or not 1 <= block <= depth:
            raise VitcliError(
                f"--layers {text}: there is no block {number}",
                f"blocks are 1 to {depth}; -1 is the last",
            )
    return tuple(sorted(set(blocks)))


def attn_entropy(
    models: Iterable[Model],
    paths: Sequence[str],
    *,
    query: str = "all",
    layers: str | None = None,
    outlier_cut: OutlierCut = OutlierCut(3.0, of_median=True),
    background: Color = (255, 255, 255),
    watch: Watch = unwatched,
    advance: Advance = lambda done, total: None,
) -> AttentionResult:
    """Measure each encoder's attention on the same images, one encoder in memory at a time.

    `query` (all, cls, patch or "ROW,COL") says over which queries entropy and distance are
    averaged, `layers` which blocks are reported. `watch` sees every batch beside.

    Raises:
        VitcliError: a query or a layer that an encoder does not have; attention that is not finite.
    """
    failed: list[FailedImage] = []
    answers: list[EncoderAttention] = []
    chosen: list[tuple[int, ...]] = []
    for model in models:
        blocks = parse_layers(layers, model.config.encoder.depth)
        unread: list[FailedImage] = []
        seen: list[SeenImage] = []
        samples: list[AttentionSamples] = []
        for batch in image_batches(model, paths, background, unread):
            pixels = stacked(model, batch)
            part = observe_attention(model.encoder, pixels, query)
            watch(model, batch, pixels)
            seen += [SeenImage(item.path, part.tokens, part.grid) for item in batch]
            samples.append(part)
            advance(len(seen) + len(unread), max(len(paths), 1))
        failed += [failure for failure in unread if failure not in failed]
        if samples:
            answers.append(_encoder(model, tuple(seen), samples, outlier_cut))
            chosen.append(blocks)
    return AttentionResult(
        query=query,
        outlier_rule=str(outlier_cut),
        models=tuple(
            replace(answer, layers=tuple(answer.layers[block - 1] for block in blocks))
            for answer, blocks in zip(answers, chosen, strict=True)
        ),
        failed=tuple(failed),
        verdict=verdict(answers),
    )


def _encoder(
    model: Model,
    images: tuple[SeenImage, ...],
    samples: Sequence[AttentionSamples],
    cut: OutlierCut,
) -> EncoderAttention:
    tokens = {part.tokens for part in samples}
    # Each image by its own number of tokens, so that sizes may differ within a call.
    logs = torch.tensor([math.log(image.tokens) for image in images], dtype=torch.float64)
    heads = torch.cat([part.heads for part in samples], dim=1)  # (L, b, H, F)
    normalized = heads[..., FIELDS.index("entropy")] / logs[:, None]  # (L, b, H)
    layers = []
    for block in range(len(heads)):
        norms = torch.cat([part.patch_norms[block].flatten() for part in samples])
        layers.append(_layer(block + 1, heads[block], normalized[block], norms, cut))
    return EncoderAttention(
        name=model.name,
        weights=model.weights,
        device=str(model.device),
        dtype=model.dtype_name,
        fresh=model.fresh,
        registers=model.config.encoder.registers,
        tokens=tokens.pop() if len(tokens) == 1 else None,
        heads=model.config.encoder.heads,
        depth=model.config.encoder.depth,
        row_sum_error=float(heads[..., FIELDS.index("row_sum_error")].max()),
        images=images,
        layers=tuple(layers),
    )


def _layer(
    block: int, samples: Tensor, normalized: Tensor, norms: Tensor, cut: OutlierCut
) -> LayerAttention:
    """(b, H, F) samples, (b, H) normalized entropies and all patch norms of one block."""
    mean = _Means(samples.mean((0, 1)))
    by_head = samples.mean(0)  # (H, F)
    median = float(norms.median())
    limit = cut.norm(median)
    return LayerAttention(
        layer=block,
        entropy=mean["entropy"],
        entropy_normalised=float(normalized.mean()),
        head_spread=_deviation(normalized.mean(0)),
        image_spread=_deviation(normalized.mean(1)),
        entropy_cls=mean.optional("entropy_cls"),
        entropy_patches=mean["entropy_patches"],
        entropy_registers=mean.optional("entropy_registers"),
        attention_distance_px=mean["distance"],
        cls_mass=mean.cls_mass(),
        patch_norm_median=median,
        patch_norm_max=float(norms.max()),
        outlier_cut=limit,
        outlier_share=float((norms > limit).double().mean()),
        heads=tuple(
            _head(head, _Means(values), float(normalized[:, head].mean()))
            for head, values in enumerate(by_head)
        ),
    )


def _head(head: int, mean: _Means, normalized: float) -> HeadAttention:
    return HeadAttention(
        head=head,
        entropy=mean["entropy"],
        entropy_normalised=normalized,
        entropy_cls=mean.optional("entropy_cls"),
        entropy_patches=mean["entropy_patches"],
        entropy_registers=mean.optional("entropy_registers"),
        attention_distance_px=mean["distance"],
        cls_mass=mean.cls_mass(),
    )


class _Means:
    """Values in the order of FIELDS, by name."""

    def __init__(self, values: Tensor) -> None:
        self.values = dict(zip(FIELDS, values.tolist(), strict=True))

    def __getitem__(self, name: str) -> float:
        return float(self.values[name])

    def optional(self, name: str) -> float | None:
        """None where the encoder has no such token."""
        return None if math.isnan(self[name]) else self[name]

    def cls_mass(self) -> ClsMass | None:
        if self.optional("cls_on_cls") is None:
            return None
        shares = {kind: self.optional(f"cls_on_{kind}") or 0.0 for kind in MASS_KINDS}
        return ClsMass(**shares)


def _deviation(values: Tensor) -> float | None:
    """Sample standard deviation; None for a single value."""
    return float(values.std()) if len(values) > 1 else None


def verdict(encoders: Sequence[EncoderAttention]) -> str:
    """One line: whose last layer is smoother, by how much, with the spread; and of what weights."""
    if not encoders:
        return "no image could be read"
    ranked = sorted(encoders, key=lambda e: e.layers[-1].entropy_normalised, reverse=True)
    smoothest, sharpest = ranked[0], ranked[-1]
    top, bottom = smoothest.layers[-1], sharpest.layers[-1]
    if len(ranked) == 1:
        text = f"last layer of {smoothest.name}: {_spread(top)} of the entropy of uniform attention"
    else:
        difference = top.entropy_normalised - bottom.entropy_normalised
        between = f" (between them: {', '.join(_title(e) for e in ranked[1:-1])})"
        text = (
            f"smoothest in its last layer: {_title(smoothest)}, at {_spread(top)} of uniform, "
            f"{difference:.4f} more than {_title(sharpest)} at {_spread(bottom)}"
            f"{between if len(ranked) > 2 else ''}"
        )
    if any(encoder.fresh for encoder in encoders):
        text += "; fresh weights: this is about architectures, not about learned attention"
    return text


def _title(encoder: EncoderAttention) -> str:
    return f"{encoder.name} ({encoder.registers} registers, {encoder.weights})"


def _spread(layer: LayerAttention) -> str:
    spreads = {"heads": layer.head_spread, "images": layer.image_spread}
    told = [f"±{value:.4f} over {what}" for what, value in spreads.items() if value is not None]
    return f"{layer.entropy_normalised:.4f}" + (f" ({', '.join(told)})" if told else "")
