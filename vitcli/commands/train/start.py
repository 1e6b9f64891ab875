"""What a run starts from: the encoder with its classifier, and which of it trains."""

from __future__ import annotations

import torch

from vitcli.build import build_encoder
from vitcli.commands.train.data import derived_seed
from vitcli.config.schema import EncoderConfig
from vitcli.config.training import TrainConfig
from vitcli.errors import VitcliError
from vitcli.nn.adapters import adapt_heads, adapters
from vitcli.nn.encoder import VisionEncoder

SMALL = 5_000_000
"""Below this many parameters a second thread waits more than it works."""


def with_classifier(config: EncoderConfig, classes: int) -> EncoderConfig:
    """The config with a classifier of `classes` outputs on its pooled vector.

    Raises:
        VitcliError: nothing is pooled.
    """
    if config.pooling == "none" and config.head != "distilled":
        raise VitcliError("a classifier needs a pooled vector", "--pool cls, mean or map")
    head = "distilled" if config.head == "distilled" else "linear"
    values = {**dict(config), "head": head, "head_out": classes}
    return EncoderConfig.model_validate(values)


def start_encoder(
    config: EncoderConfig, train: TrainConfig, source: VisionEncoder | None = None
) -> VisionEncoder:
    """A fresh encoder, or one with the weights of `source`; frozen and adapted as told.

    Raises:
        VitcliError: the source has other parameters, or adapters cannot go where they are told.
    """
    encoder = build_encoder(config, train.seed)
    if source is not None:
        copy_weights(source, encoder, keep_head=bool(train.lora.heads))
    if train.freeze == "encoder":
        encoder.requires_grad_(False)
        encoder.head.requires_grad_(True)
    if train.lora.heads:
        lora = train.lora
        try:
            seed = derived_seed(train.seed, "adapters")
            adapt_heads(encoder, lora.places(), lora.on, lora.rank, lora.alpha, seed)
        except ValueError as error:
            raise VitcliError(f"--lora: {error}", "BLOCK:HEAD, both from 1") from error
        encoder.head.requires_grad_(lora.train_head)
    return encoder


def trained_names(encoder: VisionEncoder, train: TrainConfig) -> set[str]:
    """The parameters that the recipe trains, whatever their `requires_grad` says."""
    names = {name for name, _ in encoder.named_parameters()}
    head = {name for name in names if name.startswith("head.")}
    if train.lora.heads:
        added = {f"{name}.{part}" for name, _ in adapters(encoder) for part in ("down", "up")}
        return added | head if train.lora.train_head else added
    return head if train.freeze == "encoder" else names


@torch.no_grad()
def copy_weights(source: VisionEncoder, encoder: VisionEncoder, keep_head: bool = False) -> None:
    """All of `source` but the classifier, its positions converted to the encoder's grid.

    With `keep_head` a classifier of the same shape is copied too.

    Raises:
        VitcliError: a parameter is missing, left over or of another shape.
    """
    given, own = source.state_dict(), encoder.state_dict()
    position = encoder.front_end.position.converted(source.front_end.position)
    given |= {f"front_end.position.{key}": value for key, value in position.items()}
    heads = {key for key in (*given, *own) if key.startswith("head.")}
    same = all(k in given and k in own and given[k].shape == own[k].shape for k in heads)
    if not (keep_head and same):
        given = {key: value for key, value in given.items() if key not in heads}
        own = {key: value for key, value in own.items() if key not in heads}
    missing, left = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    shapes = [k for k in given.keys() & own.keys() if given[k].shape != own[k].shape]
    for what, names in (("misses", missing), ("has also", left), ("differs in", sorted(shapes))):
        if names:
            raise VitcliError(
                f"the weights do not fit the config: the source {what} {names[0]}"
                + (f" and {len(names) - 1} more" if names[1:] else ""),
                "change the encoder's keys back, or train from fresh weights",
            )
    encoder.load_state_dict({**encoder.state_dict(), **given})


def set_threads(encoder: VisionEncoder, threads: int | None) -> None:
    """As told; else one for a small model on the CPU, where more only wait for each other."""
    small = sum(p.numel() for p in encoder.parameters()) < SMALL
    if threads or small:
        torch.set_num_threads(threads or 1)
