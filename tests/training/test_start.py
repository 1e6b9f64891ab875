from __future__ import annotations

import pytest
import torch

from tests.conftest import randomise, tiny_config
from vitcli.build import build_encoder
from vitcli.config.training import LoraConfig, TrainConfig
from vitcli.core.positions import LearnedPosition
from vitcli.errors import VitcliError
from vitcli.training.start import start_encoder, with_classifier


def source_for(**changes: object):  # type: ignore[no-untyped-def]
    encoder = build_encoder(tiny_config(head="linear", head_dim=7, **changes))
    randomise(encoder)
    return encoder


def test_fine_tuning_takes_all_but_the_classifier() -> None:
    source, config = source_for(), with_classifier(tiny_config(), 4)
    encoder = start_encoder(config, TrainConfig(), source)
    given = source.state_dict()
    for name, tensor in encoder.state_dict().items():
        assert name.startswith("head.") or torch.equal(tensor, given[name])
    assert encoder.state_dict()["head.linear.weight"].shape == (4, 24)
    images = torch.rand(2, 3, 24, 32)
    assert torch.equal(encoder(images).tokens, source.eval()(images).tokens)


def test_positions_are_resized_to_the_new_grid() -> None:
    """The tokens are those that the source gives at the new size, where it resizes as it runs."""
    source = source_for(registers=1)
    config = with_classifier(tiny_config(registers=1, image_size=(40, 48)), 4)
    encoder = start_encoder(config, TrainConfig(), source)
    position = encoder.front_end.position
    assert isinstance(position, LearnedPosition) and position.grid == (5, 6)
    images = torch.rand(2, 3, 40, 48)
    assert torch.allclose(encoder(images).tokens, source(images).tokens, atol=1e-6)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(VitcliError, match=r"misses front_end\.prefix\.registers"):
        start_encoder(with_classifier(tiny_config(registers=2), 4), TrainConfig(), source_for())
    with pytest.raises(VitcliError, match="differs in"):
        start_encoder(with_classifier(tiny_config(mlp_hidden=48), 4), TrainConfig(), source_for())


def test_adapters_keep_a_classifier_that_fits() -> None:
    source = source_for()
    config = with_classifier(tiny_config(), 7)
    lora = LoraConfig(heads=("1:0",))
    kept = start_encoder(config, TrainConfig(lora=lora), source)
    assert torch.equal(kept.state_dict()["head.linear.weight"], source.head.linear.weight)
    assert not kept.head.linear.weight.requires_grad
    free = LoraConfig(heads=("1:0",), train_head=True)
    fresh = start_encoder(config, TrainConfig(lora=free), source)
    assert fresh.head.linear.weight.requires_grad


def test_a_classifier_needs_a_pooled_vector() -> None:
    with pytest.raises(VitcliError, match="pooled"):
        with_classifier(tiny_config(pooling="none"), 4)


def test_adapters_on_no_such_head_are_refused() -> None:
    train = TrainConfig(lora=LoraConfig(heads=("9:0",)))
    with pytest.raises(VitcliError, match="no layer 9"):
        start_encoder(with_classifier(tiny_config(), 4), train)
