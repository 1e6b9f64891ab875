from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.train.runs import TINY, request, run
from tests.conftest import randomize, tiny_config
from vitcli.build import build_encoder
from vitcli.checkpoints.weights import save_snapshot
from vitcli.commands.train import analysis as train
from vitcli.commands.train import run as run_room
from vitcli.commands.train.start import map_outputs, start_encoder, with_classifier
from vitcli.config.request import ModelRequest
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting
from vitcli.config.training import LoraConfig, TrainConfig
from vitcli.errors import VitcliError
from vitcli.loading import load_model
from vitcli.model import Model
from vitcli.nn.positions import LearnedPosition


def source_for(**changes: object):  # type: ignore[no-untyped-def]
    encoder = build_encoder(tiny_config(head="linear", head_out=7, **changes))
    randomize(encoder)
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


def test_adapters_keep_a_classifier_whose_names_fit() -> None:
    source, names = source_for(), tuple("abcdefg")
    config = with_classifier(tiny_config(), 7)
    lora, outputs = LoraConfig(heads=("2:1",)), map_outputs(names, names)
    kept = start_encoder(config, TrainConfig(lora=lora), source, outputs)
    assert torch.equal(kept.state_dict()["head.linear.weight"], source.head.linear.weight)
    assert not kept.head.linear.weight.requires_grad
    free = LoraConfig(heads=("2:1",), train_head=True)
    freed = start_encoder(config, TrainConfig(lora=free), source, outputs)
    assert torch.equal(freed.head.linear.weight, source.head.linear.weight)
    assert freed.head.linear.weight.requires_grad


def test_outputs_follow_their_names_and_never_their_shape() -> None:
    """cat and dog, on folders dog and zebra: dog's row moves, zebra's is the fresh one."""
    source = source_for()
    outputs = map_outputs(("cat", "dog", "", "x", "y", "z", "w"), ("dog", "zebra"))
    assert (outputs.rows, outputs.new) == (((1, 0),), ("zebra",))
    assert outputs.line() == (
        "1 of the weights' outputs kept by name; new: zebra; left out: cat, x, y and 2 more"
    )
    config = with_classifier(tiny_config(), 2)
    encoder, fresh = start_encoder(config, TrainConfig(), source, outputs), build_encoder(config, 0)
    for part in ("weight", "bias"):
        theirs = source.get_parameter(f"head.linear.{part}")
        own = encoder.get_parameter(f"head.linear.{part}")
        assert torch.equal(own[0], theirs[1])
        assert torch.equal(own[1], fresh.get_parameter(f"head.linear.{part}")[1])
    same_shape = start_encoder(with_classifier(tiny_config(), 7), TrainConfig(), source)
    assert not torch.equal(same_shape.head.linear.weight, source.head.linear.weight)


def test_an_accent_is_one_name_however_it_is_written() -> None:
    """macOS writes names of files decomposed, as e and an accent."""
    found = map_outputs(["cafe\u0301", "the"], ["caf\u00e9", "th\u00e9"])
    assert found.rows == ((0, 0),) and found.new == ("th\u00e9",) and found.left == ("the",)


def test_adapters_alone_cannot_learn_a_new_class() -> None:
    lora, config = LoraConfig(heads=("2:1",)), with_classifier(tiny_config(), 7)
    for outputs in (None, map_outputs(tuple("abcdefg"), tuple("abcdefx"))):
        with pytest.raises(VitcliError, match="no output for the class") as caught:
            start_encoder(config, TrainConfig(lora=lora), source_for(), outputs)
        assert "--train-head" in caught.value.hint


def test_a_classifier_needs_a_pooled_vector() -> None:
    with pytest.raises(VitcliError, match="pooled"):
        with_classifier(tiny_config(pooling="none"), 4)


def test_adapters_on_no_such_head_are_refused() -> None:
    train = TrainConfig(lora=LoraConfig(heads=("9:1",)))
    with pytest.raises(VitcliError, match="no block 9"):
        start_encoder(with_classifier(tiny_config(), 4), train)


def test_a_run_directory_is_a_weights_source(tmp_path: Path) -> None:
    """The model that another command loads answers as the run's own, bit for bit."""
    run(tmp_path / "run", train__ema=0.5, encoder__registers=1, train__lr=0.01)
    loaded = load_model(ModelRequest(weights=str(tmp_path / "run"), device="cpu"))
    assert loaded.config.encoder.registers == 1 and loaded.config.encoder.head_out == 4
    averaged = load_file(tmp_path / "run" / "snapshots" / "step-000000008" / "ema.safetensors")
    for name, tensor in loaded.encoder.state_dict().items():
        assert torch.equal(tensor, averaged[name])


def test_adapters_start_from_a_run_and_change_one_head_alone(tmp_path: Path) -> None:
    base = run(tmp_path / "run", train__lr=0.01)
    weights = str(tmp_path / "run")
    asked = dataclasses.replace(
        request(tmp_path / "lora", train__lora__heads=["2:1"], train__lr=1e-12),
        model=ModelRequest(weights=weights, device="cpu"),
    )
    asked = dataclasses.replace(
        asked, settings=(*asked.settings, Setting(("train", "weights"), weights, "--weights"))
    )
    source = train.source_of(asked)
    result = train.run_shapes(asked, train.shapes_config(asked, source), source)
    # At no learning rate to speak of it is the base model, its classifier included.
    assert result.result.val_loss == pytest.approx(base.result.val_loss, rel=1e-6)
    resumed = dataclasses.replace(asked, resume=True)
    again = train.run_shapes(resumed, train.shapes_config(resumed, source), source)
    assert again.result.val_loss == result.result.val_loss


def two_copies(folder: Path) -> Path:
    """A snapshot whose file has averaged weights beside the raw ones, which are all 2."""
    encoder = build_encoder(tiny_config())
    save_snapshot(folder, ModelConfig(encoder=tiny_config()), encoder)
    average = encoder.state_dict()
    raw = {name: torch.full_like(t, 2.0) for name, t in average.items()}
    torch.save({"state_dict": raw, "state_dict_ema": average}, folder / "model.pth")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("which", ["raw", "ema", None])
def test_a_run_starts_from_the_copy_that_is_named(
    which: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is started again from its own config, and that config says which."""
    seen = []

    def load(request: ModelRequest) -> Model:
        seen.append(load_model(request))
        return seen[-1]

    for module in (train, run_room):
        monkeypatch.setattr(module, "load_model", load)
    weights = str(two_copies(tmp_path / "weights"))
    for resume in (False, True):
        train.train_shapes(
            weights=None if resume else weights,
            which=None if resume else which,
            set={k: v for k, v in TINY.items() if not k.startswith("encoder")},
            epochs=1,
            out=tmp_path / "run",
            device="cpu",
            resume=resume,
        )
        for snapshot in (tmp_path / "run" / "snapshots").iterdir():
            shutil.rmtree(snapshot)  # as a run that was killed before its first
    assert len(seen) == 2
    for model in seen:
        raw = all(bool((p == 2.0).all()) for p in model.encoder.parameters())
        assert raw == (which == "raw")


def test_a_config_that_names_another_copy_than_the_command(tmp_path: Path) -> None:
    with pytest.raises(VitcliError, match=r"train\.which = raw") as caught:
        train.train_shapes(weights=two_copies(tmp_path / "a"), set={"train.which": "raw"})
    assert caught.value.hint.startswith("--which raw beside --weights")
