"""A network of timm trained in place of vitcli's encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitcli
from vitcli.commands.train import analysis as train
from vitcli.commands.train.data import ShapesSource
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.result import TrainResult
from vitcli.commands.train.start import World, start_encoder
from vitcli.config.settings import Setting
from vitcli.config.training import ShapesRun, TrainRequest
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.images.synthetic import Shapes

timm = pytest.importorskip("timm")
NAME = "test_efficientnet"
TINY: dict[str, Any] = {
    "train.backbone": f"timm:{NAME}",
    "encoder.image_size": 32,
    "data.train_size": 48,
    "data.val_size": 40,
    "train.batch": 8,
    "train.epochs": 2,
    "train.snapshot_every": 5,
}


def request(out: Path | None = None, resume: bool = False, **keys: Any) -> TrainRequest:
    values = TINY | {key.replace("__", "."): value for key, value in keys.items()}
    settings = tuple(Setting(tuple(key.split(".")), v, key) for key, v in values.items())
    return TrainRequest(settings=settings, device="cpu", out=out, resume=resume)


def trainer(**keys: Any) -> Trainer:
    config = train.shapes_config(request(**keys))
    shapes = train.shapes_of(config)
    data = ShapesSource(shapes, config.data.train_size, config.data.val_size, config.preprocess)
    encoder = start_encoder(config.encoder, config.train)
    return Trainer(encoder, data, config.train, torch.device("cpu"), World())


def run(out: Path, resume: bool = False, **keys: Any) -> TrainResult:
    asked = request(out, resume, **keys)
    return train.run_shapes(asked, train.shapes_config(asked))


def test_one_step_is_adamw_on_timms_network() -> None:
    """The first update against the same written out with timm and torch alone."""
    ours = trainer(train__lr=0.01, train__weight_decay=0.5, train__clip_grad=None, train__seed=3)
    torch.manual_seed(3)
    plain = timm.create_model(NAME, num_classes=4).train()
    images, labels = next(ours._batches())
    names = dict(plain.named_parameters())
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    decayed = [f"{n}.weight" for n, m in plain.named_modules() if isinstance(m, kinds)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [names[n] for n in decayed], "weight_decay": 0.5},
            {"params": [p for n, p in names.items() if n not in decayed], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    loss = torch.nn.functional.cross_entropy(plain(images), labels)
    loss.backward()
    optimizer.step()
    finite, entry = ours._update((images, labels))
    assert finite and entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    ours_state, theirs = ours.encoder.state_dict(), plain.state_dict()
    assert {f"net.{name}" for name in theirs} == set(ours_state)
    for name, value in theirs.items():
        # Adam divides by the gradient's own size: where that is rounding, so is the update.
        torch.testing.assert_close(ours_state[f"net.{name}"], value, rtol=0, atol=0.0201)
        if "running" in name:
            torch.testing.assert_close(ours_state[f"net.{name}"], value, rtol=1e-4, atol=1e-5)


def test_the_run_is_a_checkpoint_of_timm(tmp_path: Path) -> None:
    result = run(tmp_path / "run", preprocess__mean=[0.4, 0.5, 0.6])
    assert result.result.parameters == sum(
        p.numel() for p in timm.create_model(NAME, num_classes=4).parameters()
    )
    model = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    config = ShapesRun.model_validate(result.config)
    shapes = Shapes((32, 32), config.data.classes, config.data.difficulty, config.train.seed)
    data = ShapesSource(shapes, 48, 40, config.preprocess)
    right = 0
    for images, labels in data.val_batches([range(40)]):
        with torch.inference_mode():
            right += int((model(images).argmax(1) == labels).sum())
    assert result.result.val_accuracy == pytest.approx(right / 40)
    ours = vitcli.load(f"timm:{tmp_path / 'run'}")
    assert isinstance(ours.encoder, LibraryEncoder) and ours.input_size == (32, 32)
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    from PIL import Image

    pixels = ours.transform(picture)
    torch.testing.assert_close(pixels[0], transform(Image.fromarray(picture)), rtol=0, atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(ours.features(pixels).output, model(pixels))  # type: ignore[arg-type]


def test_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"train__ema": 0.9, "train__schedule": "constant"}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "cut", **(keys | {"train__epochs": 1}))
    resumed = run(tmp_path / "cut", resume=True, **keys)
    assert resumed.history == whole.history
    for name in ("model.safetensors", "config.json"):
        files = [(tmp_path / place / name).read_bytes() for place in ("whole", "cut")]
        assert files[0] == files[1]


def test_an_average_has_the_statistics_of_its_norms() -> None:
    ours = trainer(train__ema=0.5)
    for batch, _ in zip(ours._batches(), range(2), strict=False):
        ours._update(batch)
    assert ours.averaged is not None
    pairs = list(zip(ours.averaged.buffers(), ours.encoder.buffers(), strict=True))
    assert len(pairs) > 10 and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"train__backbone": "timm:reznet18"}, "does not have this architecture"),
        ({"train__backbone": "resnet18"}, "timm:ARCHITECTURE"),
        ({"train__weights": "x.safetensors"}, "starts from random weights"),
        ({"train__freeze": "encoder"}, "is trained whole"),
        ({"train__lora__heads": ["1:1"]}, "is trained whole"),
        ({"encoder__depth": 3}, "encoder.depth has no effect"),
        ({"encoder__attention__mask": "causal"}, "encoder.attention has no effect"),
        (
            {
                "preprocess__resize": "none",
                "preprocess__resize_size": None,
                "preprocess__crop_size": 32,
            },
            "timm has no such preprocessing",
        ),
    ],
)
def test_what_a_backbone_cannot_do_is_refused(
    keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(VitcliError, match=told) as caught:
        run(tmp_path / "run", **keys)
    assert caught.value.exit_code == 2 and caught.value.hint


def test_the_preset_names_the_backbone(tmp_path: Path) -> None:
    result = vitcli.train_shapes(
        preset=f"timm:{NAME}",
        set={"data.train_size": 16, "data.val_size": 8, "train.batch": 8},
        device="cpu",
    )
    assert result.config["train"]["backbone"] == f"timm:{NAME}"


def test_validations_are_as_far_apart_as_asked() -> None:
    ours = trainer(train__epochs=5, train__validate_every=2)
    ours.run()
    validated = [row["epoch"] for row in ours.history if "val_loss" in row]
    assert validated == [2, 4, 5]
