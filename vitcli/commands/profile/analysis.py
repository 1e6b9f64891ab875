"""Where an encoder's time goes, against what this machine can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vitcli.commands.params.analysis import component_costs
from vitcli.commands.params.result import ATTENTION_PRODUCTS, FFN, OUTPUT_PROJECTION, QK_NORM, QKV
from vitcli.commands.profile.machine import describe_machine
from vitcli.commands.profile.result import EngineInfo, ProfileResult, ProfileRun, ProfileSettings
from vitcli.commands.profile.session import Session, random_images
from vitcli.config.schema import EncoderConfig
from vitcli.engines.engine import Engine, default_engine, largest_error, prepare_engine
from vitcli.inference import Advance
from vitcli.model import Model, model_info
from vitcli.nn.attention import ATTENDS, ExplicitAttention
from vitcli.nn.encoder import VisionEncoder
from vitcli.nn.hooks import attentions


def profile(
    model: Model,
    settings: ProfileSettings,
    advance: Advance = lambda done, total: None,
) -> ProfileResult:
    """Time every engine at every batch of random images, then see where the time went.

    Memory, timing and profiler are passes of their own, so that none disturbs another. Engines
    are timed in turn, A B A B, so that a machine that slows down slows all of them.

    Raises:
        VitcliError: settings that cannot be, or an engine that cannot run this encoder.
    """
    settings.check()
    default = "eager" if settings.backward else default_engine(model.device, model.dtype)
    settings = replace(settings, engines=settings.engines or (default,))
    attend(model.encoder, settings.attention)
    one = random_images(model, 1)
    engines = [
        prepare_engine(name, model.encoder, one, batches=settings.batches)
        for name in settings.engines
    ]
    infos = tuple(_engine_info(engine, model.encoder, one) for engine in engines)
    session = Session(model, settings, engines, advance)
    runs = tuple(run for batch in settings.batches for run in session.answer(batch))
    return ProfileResult(
        model=model_info(model),
        image_size=model.input_size,
        tokens=session.tokens,
        step="forward and backward" if settings.backward else "forward",
        macs_per_image=session.macs,
        runs=runs,
        engines=infos,
        comparisons=tuple(session.comparisons),
        machine=describe_machine(
            model.device, model.dtype, {engine.name: engine.version for engine in engines}
        ),
        verdict=verdict(model.config.encoder, model.input_size, runs),
    )


def attend(encoder: VisionEncoder, kind: str | None) -> None:
    """Let every block attend in one way of ATTENDS, its dropout kept; None changes nothing."""
    if kind is None:
        return
    for attention in attentions(encoder):
        old = attention.attend
        rate = old.dropout.p if isinstance(old, ExplicitAttention) else old.dropout
        assert isinstance(rate, float)
        attention.attend = ATTENDS[kind](rate).train(encoder.training)


def _engine_info(engine: Engine, encoder: VisionEncoder, images: Tensor) -> EngineInfo:
    error = None if engine.name == "eager" else largest_error(engine, encoder, images)
    return EngineInfo(engine.name, engine.prepare_s, engine.note, error)


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
    """By arithmetic: where every token sees every token, the products grow with their square."""
    double = (2 * image_size[0], 2 * image_size[1])
    macs, macs_double = (_operations(config, size) for size in (image_size, double))
    (ffn, products), (ffn_double, products_double) = (
        (m[FFN] / sum(m.values()), m[ATTENTION_PRODUCTS] / sum(m.values()))
        for m in (macs, macs_double)
    )
    text = (
        f"At twice the side ({double[0]}x{double[1]}) the attention products go from "
        f"{products:.0%} to {products_double:.0%} of the operations and FFN from {ffn:.0%} to "
        f"{ffn_double:.0%}"
    )
    rows, columns = config.grid_at(image_size)
    per_token = config.depth * (config.prefix_tokens + rows * columns)
    if macs[ATTENTION_PRODUCTS] != 2 * config.hidden * per_token**2 // config.depth:
        return text + "."  # windows, neighborhoods or channels
    # 2 N^2 D for the products against N times the FFN's operations for a token, in each block
    even = macs[FFN] / per_token / (2 * config.hidden)
    return f"{text}; beyond {even:.0f} tokens the products outweigh FFN."


def _operations(config: EncoderConfig, image_size: tuple[int, int]) -> dict[str, int]:
    """Multiply-accumulates of each component."""
    return {cost.name: cost.total.macs for cost in component_costs(config, image_size)}
