"""The answer of `vitcli profile` in words, from its figures."""

from __future__ import annotations

from collections.abc import Sequence

from vitcli.commands.params.analysis import component_costs
from vitcli.commands.params.components import (
    ATTENTION_PRODUCTS,
    FFN,
    OUTPUT_PROJECTION,
    QK_NORM,
    QKV,
)
from vitcli.commands.profile.result import ProfileRun
from vitcli.config.schema import EncoderConfig

ATTENTION = (QKV, QK_NORM, ATTENTION_PRODUCTS, OUTPUT_PROJECTION)


def verdict(config: EncoderConfig, image_size: tuple[int, int], runs: Sequence[ProfileRun]) -> str:
    """What takes the time, and what changes with batch and with resolution."""
    parts = [*_time(runs), *_batch(runs), _resolution(config, image_size)]
    return " ".join(parts)


def _shares(run: ProfileRun) -> tuple[float, float, float]:
    """Share of the time in FFN, attention, attention products."""
    share = {component.name: component.share for component in run.components}
    return (
        share.get(FFN, 0.0),
        sum(share.get(name, 0.0) for name in ATTENTION),
        share.get(ATTENTION_PRODUCTS, 0.0),
    )


def _time(runs: Sequence[ProfileRun]) -> list[str]:
    seen = [run for run in runs if run.components]
    if not seen:
        return []
    run = seen[-1]
    ffn, attention, products = _shares(run)
    return [
        f"At batch {run.batch}, FFN {ffn:.0%} of the time, attention {attention:.0%} "
        f"(of which the attention products {products / attention:.0%})."
    ]


def _batch(runs: Sequence[ProfileRun]) -> list[str]:
    """From the smallest batch to the largest, of the first engine that answered at both."""
    for engine in dict.fromkeys(run.engine for run in runs):
        answered = sorted(
            (run for run in runs if run.engine == engine and run.images_per_s),
            key=lambda run: run.batch,
        )
        if len(answered) < 2:
            continue
        first, last = answered[0], answered[-1]
        text = (
            f"From batch {first.batch} to {last.batch}, "
            f"{first.images_per_s:.3g} to {last.images_per_s:.3g} images/s"
        )
        if first.components and last.components:
            (ffn, attention, _), (ffn_last, attention_last, _) = _shares(first), _shares(last)
            text += f", FFN {ffn:.0%} to {ffn_last:.0%}, "
            text += f"attention {attention:.0%} to {attention_last:.0%}"
        return [text + "."]
    return []


def _resolution(config: EncoderConfig, image_size: tuple[int, int]) -> str:
    """By arithmetic: the products grow with the square of the tokens, the rest with the tokens."""
    double = (2 * image_size[0], 2 * image_size[1])
    (ffn, products), (ffn_double, products_double) = (
        _operations(config, size) for size in (image_size, double)
    )
    # 2 N^2 D for the products against 2 N D M for the FFN (3 N D M gated) in each block
    even = config.mlp_hidden * (1.5 if config.mlp == "gated" else 1)
    return (
        f"At twice the side ({double[0]}x{double[1]}) the attention products go from "
        f"{products:.0%} to {products_double:.0%} of the operations and FFN from {ffn:.0%} to "
        f"{ffn_double:.0%}; beyond {even:.0f} tokens the products outweigh FFN."
    )


def _operations(config: EncoderConfig, image_size: tuple[int, int]) -> tuple[float, float]:
    """Share of the operations in FFN and in the attention products."""
    macs = {cost.name: cost.total.macs for cost in component_costs(config, image_size)}
    total = sum(macs.values())
    return macs[FFN] / total, macs[ATTENTION_PRODUCTS] / total
