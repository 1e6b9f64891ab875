"""The model of the Python API: what it takes as images, and what it gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

import vitcli
from tests.checkpoints.parity.compare import randomized
from tests.checkpoints.sources import vit_folder

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[T.ViTModel, Path]:
    folder = tmp_path_factory.mktemp("twin")
    model = randomized(T.ViTModel(T.ViTConfig(**SMALL))).double().eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model, folder


@pytest.fixture(scope="module")
def model(twin: tuple[T.ViTModel, Path]) -> vitcli.Model:
    return vitcli.load(twin[1], dtype="float64")


def test_a_path_a_picture_and_an_array_are_one_image(
    model: vitcli.Model, picture: Image.Image, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    picture.save(file)
    one = model.transform(file)
    assert one.shape == (1, 3, 32, 32) and one.dtype == torch.float64
    for same in (str(file), picture, np.asarray(picture), [str(file)], (p for p in [picture])):
        assert torch.equal(model.transform(same), one)
    stacked = np.stack([np.asarray(picture)] * 2)
    assert torch.equal(model.transform(stacked), one.expand(2, -1, -1, -1))
    with Image.open(file) as opened:
        assert torch.equal(model.transform([opened, file]), one.expand(2, -1, -1, -1))


def test_a_picture_is_read_as_its_file_is(model: vitcli.Model, tmp_path: Path) -> None:
    """Orientation and transparency are of the image, however it is given."""
    file = tmp_path / "turned.png"
    values = np.random.default_rng(1).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(values).save(file, exif=exif)
    opened = Image.open(file)
    read = model.transform(file)
    assert torch.equal(model.transform(opened), read)
    assert torch.equal(model.transform(opened), read), "the image is as it was"
    assert opened.mode == "RGBA" and opened.size == (30, 20)
    black = model.transform(file, background=(0, 0, 0))
    assert not torch.equal(black, read)


def test_features_are_the_hidden_states_of_transformers(
    model: vitcli.Model, twin: tuple[T.ViTModel, Path], picture: Image.Image
) -> None:
    pixels = model.transform([picture, picture.rotate(90)])
    with torch.no_grad():
        theirs = twin[0](pixels, output_hidden_states=True)
    ours = model.features(pixels, layers=[0, 2, -1])
    assert list(ours.layers) == [0, 2, 3]
    for layer in (0, 2, 3, -1):
        states, mine = theirs.hidden_states[layer], ours.layers[layer]
        torch.testing.assert_close(mine.cls, states[:, 0], rtol=1e-12, atol=1e-12)
        patches = states[:, 1:].unflatten(1, (4, 4))
        torch.testing.assert_close(mine.patches, patches, rtol=1e-12, atol=1e-12)
        assert mine.registers is None and mine.pooled is None
    torch.testing.assert_close(ours.cls, theirs.last_hidden_state[:, 0], rtol=1e-12, atol=1e-12)


def test_attention_is_that_of_transformers(
    model: vitcli.Model, twin: tuple[T.ViTModel, Path], picture: Image.Image
) -> None:
    """Its explicit path rounds each softmax to float32."""
    pixels = model.transform([picture, picture.rotate(90)])
    theirs = T.ViTModel.from_pretrained(twin[1], attn_implementation="eager", dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(pixels, output_attentions=True).attentions
    for block in (1, 3, -1):
        rows = model.attention(pixels, block=block)
        assert rows.shape == (2, 2, 17, 17)
        same = expected[block - 1 if block > 0 else block]
        torch.testing.assert_close(rows, same.double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


def test_more_images_than_a_batch_give_the_same_rows(
    model: vitcli.Model, picture: Image.Image
) -> None:
    several = [picture.rotate(angle) for angle in range(0, 340, 17)]
    together = model.features(several, layers=[1])
    alone = model.features(several[18], layers=[1])
    assert len(together.layers[1].patches) == len(several) == 20
    torch.testing.assert_close(together.layers[1].patches[18:19], alone.layers[1].patches)
    torch.testing.assert_close(together.cls[18:19], alone.cls)


def test_kinds_of_tokens_of_an_encoder_with_registers() -> None:
    model = vitcli.load(
        "vit-ti16",
        set={
            "encoder.depth": 1,
            "encoder.registers": 3,
            "encoder.head": "linear",
            "encoder.head_out": 5,
        },
        image_size=(32, 48),
    )
    features = model.features(torch.zeros(2, 3, 32, 48))
    assert features.registers.shape == (2, 3, 192) and features.cls.shape == (2, 192)
    assert features.patches.shape == (2, 2, 3, 192) and features.dist is None
    answer = model.encoder(torch.zeros(2, 3, 32, 48))
    torch.testing.assert_close(features.pooled, answer.pooled)
    torch.testing.assert_close(features.output, answer.output)
    torch.testing.assert_close(features.registers, answer.tokens[:, 1:4])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.transform([]), "the list is empty"),
        (lambda m: m.transform(np.zeros((4, 4, 3))), r"got \(4, 4, 3\) float64"),
        (lambda m: m.transform(3.5), "got float"),
        (lambda m: m.transform([b"x"]), "got bytes"),
        (lambda m: m.features(torch.zeros(3, 32, 32)), r"got \(3, 32, 32\)"),
        (lambda m: m.features(torch.zeros(1, 3, 32, 32), layers=[4]), r"layers= 4.*0 to 3"),
        (lambda m: m.attention(torch.zeros(1, 3, 32, 32), block=0), "expected 1 to 3"),
    ],
)
def test_what_is_not_an_image_is_an_error(model: vitcli.Model, call: object, words: str) -> None:
    with pytest.raises(vitcli.VitcliError, match=words):
        call(model)  # type: ignore[operator]


def test_repr_is_a_few_lines(model: vitcli.Model) -> None:
    lines = repr(model).splitlines()
    assert 2 <= len(lines) <= 6 and all(len(line) < 120 for line in lines)
    assert "3 blocks" in lines[0] and "32x32" in repr(model)


def test_what_load_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"encoder.depth": 1}
    by_name = vitcli.load("vit-ti16", set=small)
    assert by_name.fresh and by_name.name == vitcli.load(preset="vit-ti16", set=small).name
    source = vit_folder(tmp_path / "vit-like")
    assert not vitcli.load(source).fresh and not vitcli.load(weights=str(source)).fresh
    file = tmp_path / "mine.yaml"
    file.write_text("{preset: vit-ti16, name: mine, encoder: {depth: 1}}")
    assert vitcli.load(file).name == "mine"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit-ti16").mkdir()
    with pytest.raises(vitcli.VitcliError, match="preset and a path") as caught:
        vitcli.load("vit-ti16")
    assert "weights='./vit-ti16'" in caught.value.hint
    with pytest.raises(vitcli.VitcliError, match="not a preset") as caught:
        vitcli.load("vit-b61")
    assert "vit-b16" in caught.value.hint
    with pytest.raises(vitcli.VitcliError, match="given twice"):
        vitcli.load("vit-b16", preset="vit-s16")
