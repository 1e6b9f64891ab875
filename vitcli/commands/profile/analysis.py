"""Where an encoder's time goes, against what this machine can do."""

from __future__ import annotations

from torch import Tensor

from vitcli.commands.encode.analysis import model_info
from vitcli.commands.profile.machine import describe_machine
from vitcli.commands.profile.result import EngineInfo, ProfileResult
from vitcli.commands.profile.session import Session, random_images
from vitcli.commands.profile.settings import ProfileSettings
from vitcli.commands.profile.verdict import verdict
from vitcli.engines.engine import Engine, largest_error, prepare_engine
from vitcli.inference import Advance
from vitcli.model import LoadedModel
from vitcli.nn.attention import ATTENDS, ExplicitAttention
from vitcli.nn.encoder import VisionEncoder
from vitcli.nn.hooks import attentions


def profile(
    model: LoadedModel,
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
