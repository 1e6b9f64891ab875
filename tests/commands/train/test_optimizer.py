from __future__ import annotations

import pytest
import torch

from tests.conftest import tiny_config
from vitcli.build import build_encoder
from vitcli.commands.train.optimization import make_optimizer
from vitcli.config.training import TrainConfig
from vitcli.nn.attention import decayed_names


def test_only_matrices_are_decayed() -> None:
    config = tiny_config(registers=2, layer_scale=0.1, head="linear", head_out=4, pooling="map")
    encoder = build_encoder(config)
    decayed = decayed_names(encoder)
    without = {name for name, _ in encoder.named_parameters()} - decayed
    assert all(name.endswith(".weight") for name in decayed)
    assert not any("norm" in name for name in decayed)
    assert {
        "front_end.prefix.cls",
        "front_end.prefix.registers",
        "front_end.position.table",
        "pooling.probe",
        "vit.blocks.0.scale1.gamma",
        "vit.blocks.1.norm2.weight",
        "head.linear.bias",
    } <= without
    assert {
        "front_end.projection.weight",
        "vit.blocks.1.attention.qkv.weight",
        "vit.blocks.0.feed_forward.fc2.weight",
        "head.linear.weight",
    } <= decayed


def test_the_optimizer_has_every_trainable_parameter_once() -> None:
    encoder = build_encoder(tiny_config(head="linear", head_out=4, position="sincos2d"))
    groups = make_optimizer(encoder, TrainConfig(weight_decay=0.3)).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in encoder.parameters() if p.requires_grad)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_decay_alone_shrinks_matrices_by_one_minus_lr_times_decay() -> None:
    encoder = build_encoder(tiny_config(head="linear", head_out=4))
    before = {name: p.detach().clone() for name, p in encoder.named_parameters()}
    optimizer = make_optimizer(encoder, TrainConfig(lr=0.1, weight_decay=0.5))
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    decayed = decayed_names(encoder)
    for name, p in encoder.named_parameters():
        factor = 0.95 if name in decayed else 1.0
        assert p.detach().numpy() == pytest.approx((before[name] * factor).numpy(), rel=1e-6)
