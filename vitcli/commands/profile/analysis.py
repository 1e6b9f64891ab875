"""Speed and memory of an encoder by engine, dtype and batch size, and time by component."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vitcli.commands.params.analysis import (
    ATTENTION_PRODUCTS,
    FFN,
    OUTPUT_PROJECTION,
    QK_NORM,
    QKV,
    component_costs,
)
from vitcli.commands.profile.measure import Session, Way, describe_machine, random_images
from vitcli.commands.profile.result import (
    Comparison,
    EngineInfo,
    Fidelity,
    Fit,
    ProfileResult,
    ProfileRun,
    ProfileSettings,
)
from vitcli.config.request import REFERENCE
from vitcli.config.schema import EncoderConfig
from vitcli.engines import ENGINES
from vitcli.engines.engine import Engine, default_engine, largest_error, prepare_engine
from vitcli.engines.reference import LibraryEncoder, open_reference
from vitcli.errors import VitcliError
from vitcli.images.synthetic import synthetic_image
from vitcli.loading import as_model, load_model
from vitcli.model import Model, Pictures, model_info, picture_list
from vitcli.nn.attention import ATTENDS, ChannelAttention, ExplicitAttention
from vitcli.nn.encoder import EncoderOutput, VisionEncoder, attentions
from vitcli.results import QUIET, Progress
from vitcli.stats import largest_difference


def profile(
    model: Model | str | os.PathLike[str],
    settings: ProfileSettings | None = None,
    progress: Progress = QUIET,
    *,
    images: Pictures = (),
    **choices: Any,
) -> ProfileResult:
    """Time every engine in every dtype at every batch size on random images, then its components.

    Memory, time and components are measured in separate passes. Engines and dtypes are timed
    alternately, A B A B, so that a change of the machine's speed affects all of them.

    Args:
        model: a `Model`, or what `vitcli.load` takes; in float32 where dtypes are compared.
        settings: all `choices` in one object.
        progress: called with (done, total) images.
        images: images on which dtypes are compared, as in `Model.transform`; by default the
            built-in image.
        choices: fields of `ProfileSettings`, such as batches=[1, 8], engines=["eager", "onnx"],
            dtypes=["float32", "bfloat16"], runs=5, memory_bytes=4 * 2**30; one value in place of
            a list is that value.

    Raises:
        VitcliError: settings that are not possible, or an engine that cannot run this encoder.
    """
    for key in choices.keys() & {"batches", "engines", "dtypes"}:
        value = choices[key]
        choices[key] = (value,) if isinstance(value, int | str) else tuple(value)
    settings = replace(settings or ProfileSettings(), **choices)
    settings.check()
    model = as_model(model, by_library=True)
    if model.by_library:
        settings = settings_of_library(model, settings)
    dtypes = settings.dtypes or (model.dtype_name,)
    if len(dtypes) > 1 and model.dtype != torch.float32:
        raise VitcliError(
            f"dtypes: the model is not in float32 (got {model.dtype_name})",
            "vitcli.load(..., dtype='float32')",
        )
    if settings.attention and (model.by_library or REFERENCE in settings.engines):
        raise VitcliError(
            f"--attention {settings.attention}: the library attends in its own way",
            "leave out --attention",
        )
    attend(model.encoder, settings.attention)
    ways = []
    for dtype in dtypes:
        turned = in_dtype(model, dtype)
        default = "eager" if settings.backward else default_engine(turned.device, turned.dtype)
        one = random_images(turned, 1)
        for name in settings.engines or (default,):
            if name == REFERENCE:
                engine = library_engine(turned)
            else:
                engine = prepare_engine(name, turned.encoder, one, batches=settings.batches)
            ways.append(Way(engine, turned))
    infos = tuple(_engine_info(way.engine, way.model) for way in ways)
    faithful = tuple(
        fidelity(model, way.engine, way.model, images)
        for way in ways
        if (way.model.dtype != torch.float32 and len(dtypes) > 1)
        or (model.dtype == torch.float32 and not ENGINES[way.engine.name].exact)
    )
    session = Session(model, settings, ways, progress)
    runs = tuple(run for batch in settings.batches for run in session.answer(batch))
    fits = largest_batches(runs, ways, settings.memory_bytes) if settings.memory_bytes else ()
    words = [
        verdict(None if model.by_library else model.config.encoder, model.input_size, runs),
        *dtype_words(session.comparisons, faithful),
        *slower_words(session.beside_plain),
        *map(fit_words, fits),
    ]
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
            model.device, model.dtype, {way.engine.name: way.engine.version for way in ways}
        ),
        verdict=" ".join(words),
        fidelity=faithful,
        fits=fits,
    )


def settings_of_library(model: Model, settings: ProfileSettings) -> ProfileSettings:
    """The settings for an encoder that its own library runs, and nothing else here."""
    for name in settings.engines:
        if name != REFERENCE:
            raise VitcliError(
                f"--engine {name}: {model.name} is run by its own library", f"--engine {REFERENCE}"
            )
    settings = replace(settings, engines=(REFERENCE,))
    settings.check()
    return settings


def library_engine(model: Model) -> Engine:
    """The library that wrote a checkpoint, timed alone or beside vitcli's engines."""
    source = model.request.weights if model.request else None
    if source is None and not model.by_library:
        raise VitcliError(
            f"--engine {REFERENCE}: {model.name} has fresh weights, so no library wrote them",
            "--weights SOURCE",
        )
    encoder: VisionEncoder = model.encoder
    seconds = 0.0
    if not isinstance(encoder, LibraryEncoder):
        assert source is not None
        start = time.perf_counter()
        opened = open_reference(
            source, device=model.device, dtype=model.dtype, image_size=model.asked_size
        )
        encoder = LibraryEncoder(opened, model.input_size)
        seconds = time.perf_counter() - start
    backbone, gives_pooled = encoder.backbone, encoder.gives_pooled

    def run(images: Tensor) -> tuple[EncoderOutput, list[Tensor]]:
        with torch.inference_mode():
            found = encoder(images)
        pooled = found.pooled if gives_pooled else None
        return EncoderOutput(found.tokens, cast(Tensor, None), pooled, found.output), []

    version = f"{backbone.library} {backbone.version}"
    return Engine(REFERENCE, run, version, seconds)


def in_dtype(model: Model, dtype: str) -> Model:
    """The model with parameters in another dtype; itself where they are in it."""
    if dtype == model.dtype_name:
        return model
    if model.by_library:
        assert model.request is not None
        return load_model(replace(model.request, dtype=dtype), by_library=True)
    kind: torch.dtype = getattr(torch, dtype)
    return replace(model, encoder=copy.deepcopy(model.encoder).to(kind), dtype=kind)


@torch.no_grad()
def fidelity(reference: Model, engine: Engine, model: Model, images: Pictures) -> Fidelity:
    """Difference of an engine in another dtype to plain torch in float32, on the same pixels."""
    pictures = picture_list(images)
    if reference.known_preprocessing is None or reference.config.encoder.channels != 3:
        pixels = random_images(reference, max(1, len(pictures)))
    else:
        pixels = reference.transform(pictures or [synthetic_image(reference.input_size)])
    theirs: EncoderOutput = reference.encoder(pixels)
    ours = engine.run(pixels.to(model.dtype))
    tokens, expected = ours.tokens.double(), theirs.tokens.double()
    pooled = None
    if ours.pooled is not None and theirs.pooled is not None:
        pooled = F.cosine_similarity(ours.pooled.double(), theirs.pooled.double(), dim=-1)
    return Fidelity(
        engine=engine.name,
        dtype=model.dtype_name,
        images=len(pixels),
        cosine_min=float(F.cosine_similarity(tokens, expected, dim=-1).min()),
        pooled_cosine_min=None if pooled is None else float(pooled.min()),
        relative_difference=largest_difference(tokens, expected) / float(expected.abs().max()),
    )


def dtype_words(comparisons: Sequence[Comparison], faithful: Sequence[Fidelity]) -> Iterator[str]:
    """A sentence per dtype: speed at the largest batch, difference to float32."""
    for item in faithful:
        far = item.cosine_min if item.pooled_cosine_min is None else item.pooled_cosine_min
        what = "token" if item.pooled_cosine_min is None else "pooled vector"
        exact = ENGINES[item.engine].exact
        name = f"{item.dtype} ({item.engine})" if exact else item.engine
        if not math.isfinite(item.cosine_min):
            yield f"{name} gives values that are not finite."
            continue
        rows = [c for c in comparisons if (c.engine, c.dtype) == (item.engine, item.dtype)]
        fast = ""
        if rows:
            last = max(rows, key=lambda row: row.batch)
            ratio = last.speed_ratio.median
            speed = (
                f"{ratio:.2g} times as fast as"
                if ratio >= 1
                else f"{1 / ratio:.2g} times slower than"
            )
            fast = f" is {speed} {last.baseline_dtype} ({last.baseline}) at batch {last.batch};"
        count = "1 image" if item.images == 1 else f"{item.images} images"
        yield f"{name}{fast} smallest cosine of a {what} to float32 {far:.5f} on {count}."


WHY_SLOWER = {
    "compile": "the matrix products take most of the time, and it gains only between them",
    "onnx": "it multiplies by kernels of its own",
    "openvino": "it multiplies by kernels of its own",
}


def slower_words(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """A sentence per engine and dtype that costs preparation and is slower all the same.

    Slower is a ratio below 1 in the 90th percentile of the paired steps.
    """
    slower = [c for c in comparisons if c.engine in WHY_SLOWER and c.speed_ratio.p90 < 1]
    for name, dtype in dict.fromkeys((c.engine, c.dtype) for c in slower):
        rows = [c for c in slower if (c.engine, c.dtype) == (name, dtype)]
        each = ", ".join(f"{c.batch} ({c.speed_ratio.median:.2f} times)" for c in rows)
        yield (
            f"{name} is slower than {rows[0].baseline} in {dtype} at batch {each}: "
            f"{WHY_SLOWER[name]}."
        )


def largest_batches(
    runs: Sequence[ProfileRun], ways: Sequence[Way], memory: int
) -> tuple[Fit, ...]:
    """The largest batch of each way that fits, on the line through the peaks measured.

    A step takes the weights, of the encoder and of an engine that holds its own, and its peak
    grows with the batch; one batch gives a line through zero.
    """
    fits = []
    for way in ways:
        peaks = sorted(
            (run.batch, run.peak_bytes)
            for run in runs
            if (run.engine, run.dtype) == way.key and run.peak_bytes
        )
        if not peaks:
            continue
        (low, least), (high, most) = peaks[0], peaks[-1]
        image = (most - least) / (high - low) if high > low else most / high
        image = max(image, 1.0)
        base = max(0.0, most - image * high)
        weights = way.engine.weight_bytes
        if way.model.device.type == "cuda":  # the peak holds the encoder's weights already
            base = most - image * high
        else:
            weights += sum(p.numel() * p.element_size() for p in way.model.encoder.parameters())
        batch = max(0, int((memory - weights - base) / image))
        fits.append(Fit(*way.key, memory, weights, int(image), batch))
    return tuple(fits)


def fit_words(fit: Fit) -> str:
    gib, mib = 2**30, 2**20
    return (
        f"In {fit.memory_bytes / gib:.3g} GiB the largest batch is {fit.batch} ({fit.engine}, "
        f"{fit.dtype}: weights {fit.weight_bytes / mib:.4g} MiB, {fit.image_bytes / mib:.3g} MiB "
        "per image)."
    )


def attend(encoder: VisionEncoder, kind: str | None) -> None:
    """Set the attention implementation of every block, dropout kept; None changes nothing."""
    if kind is None:
        return
    for attention in attentions(encoder):
        old = attention.attend
        if isinstance(old, ChannelAttention):
            raise VitcliError(
                f"--attention {kind}: attention over channels has one implementation",
                "leave out --attention",
            )
        rate = old.dropout.p if isinstance(old, ExplicitAttention) else old.dropout
        assert isinstance(rate, float)
        attention.attend = ATTENDS[kind](rate).train(encoder.training)


def _engine_info(engine: Engine, model: Model) -> EngineInfo:
    images = random_images(model, 1)
    plain = engine.name == "eager" or model.by_library
    error = None if plain else largest_error(engine, model.encoder, images)
    return EngineInfo(engine.name, engine.prepare_s, engine.note, error)


ATTENTION = (QKV, QK_NORM, ATTENTION_PRODUCTS, OUTPUT_PROJECTION)


def _shares(run: ProfileRun) -> tuple[float, float, float]:
    """Share of the time in FFN, attention, attention products."""
    share = {component.name: component.share for component in run.components}
    return (
        share.get(FFN, 0.0),
        sum(share.get(name, 0.0) for name in ATTENTION),
        share.get(ATTENTION_PRODUCTS, 0.0),
    )


def verdict(
    config: EncoderConfig | None, image_size: tuple[int, int], runs: Sequence[ProfileRun]
) -> str:
    """Which components dominate, and what changes with batch and, by the config, resolution."""
    parts = [*_time(runs), *_batch(runs)]
    if config is not None:
        return " ".join([*parts, _resolution(config, image_size)])
    fastest = max(runs, key=lambda run: run.images_per_s or 0)
    if fastest.images_per_s:
        at = f"{fastest.images_per_s:.3g} images/s at batch {fastest.batch}"
        parts.append(f"The library, unchanged, runs at most {at}.")
    return " ".join(parts)


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
    for way in dict.fromkeys((run.engine, run.dtype) for run in runs):
        answered = sorted(
            (run for run in runs if (run.engine, run.dtype) == way and run.images_per_s),
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
