"""The proof holds on good twins of three libraries, and fails where one setting is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from typer.testing import CliRunner

import vitcli
from tests.checkpoints.parity import hf, open_clip_models, timm_models
from tests.checkpoints.parity.compare import randomized
from tests.checkpoints.parity.towers import TOWERS
from tests.checkpoints.parity.vlms import WHOLE
from tests.checkpoints.sources import SQUASH
from vitcli.cli import app
from vitcli.commands.compare.verify import verify
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")
PROCESSOR = {"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}}


def transformers_twin(folder: Path, case: str = "vit", processor: str = "ViTImageProcessor") -> str:
    """A tiny random model as transformers writes it, with its processor."""
    randomized(hf.CASES[case].make()).float().save_pretrained(folder)
    if processor:
        getattr(transformers, processor + "Pil")(**PROCESSOR).save_pretrained(folder)
    return str(folder)


def timm_twin(folder: Path) -> str:
    model: Any = randomized(timm_models.Case("timm-vit", "vit_base_patch16_clip_224").make())
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32)}
    save_for_hf(model.float(), folder, model_args=timm_models.SMALL, safe_serialization=True)
    return str(folder)


def open_clip_twin(folder: Path) -> str:
    case = open_clip_models.CASES["QuickGELU"]
    folder.mkdir()
    case.save(randomized(case.make()).float(), folder)
    return str(folder)


TWINS = {
    "transformers": transformers_twin,
    "timm": timm_twin,
    "open_clip": open_clip_twin,
}


@pytest.mark.parametrize("library", TWINS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_good_twin_is_equal(library: str, dtype: str, tmp_path: Path) -> None:
    result = verify(TWINS[library](tmp_path / "twin"), dtype=dtype)
    assert result.equal and result.first_difference is None, result.verdict
    assert result.library == library and result.verdict.startswith(f"equal to {library}")
    names = [one.name for one in result.checked]
    assert names[:4] == ["pixels", "layer 0", "layer 1", "layer 2"]
    assert {"tokens", "output", "pooled"} & set(names[4:])
    assert 0 < result.checked[1].tolerance < (1e-4 if dtype == "float32" else 2e-6)


@pytest.mark.parametrize("library", TWINS)
def test_the_library_may_be_named(library: str, tmp_path: Path) -> None:
    source = TWINS[library](tmp_path / "twin")
    named = CliRunner().invoke(app, ["verify", f"{library}:{source}", "--json"])
    assert named.exit_code == 0, named.stderr
    assert json.loads(named.stdout)["library"] == library
    other = next(one for one in TWINS if one != library)
    wrong = CliRunner().invoke(app, ["verify", f"{other}:{source}"])
    assert wrong.exit_code == 2 and other in wrong.stderr


def test_an_architecture_has_no_weights_to_compare() -> None:
    told = CliRunner().invoke(app, ["verify", "timm:resnet50"])
    assert told.exit_code == 2 and "timm:resnet50: is an architecture" in told.stderr


@pytest.mark.parametrize("library", TWINS)
def test_a_wrong_eps_is_found_where_it_begins(library: str, tmp_path: Path) -> None:
    result = verify(TWINS[library](tmp_path / "twin"), set={"encoder.norm_eps": 0.01})
    layers = {one.name: one.equal for one in result.checked}
    first = "layer 1" if library == "transformers" else "layer 0"  # CLIP has a norm before
    assert result.first_difference == first and not result.equal and layers["pixels"]
    assert result.verdict.startswith("not equal") and f"{first} is the first" in result.verdict


NAFLEX = {"patch_size": 8, "max_num_patches": 16}
QWEN = {"patch_size": 8, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 96 * 96}


@pytest.mark.parametrize(
    ("case", "processor", "settings"),
    [
        ("clip whole", "CLIPImageProcessor", {"size": {"shortest_edge": 32}}),
        ("clip with projection", "CLIPImageProcessor", {"size": {"shortest_edge": 32}}),
        ("siglip whole", "SiglipImageProcessor", {}),
        ("dinov2 registers", "BitImageProcessor", {"size": {"shortest_edge": 40}}),
        ("dinov3", "", {}),
        ("mae", "ViTImageProcessor", {}),
        ("mae pre-training", "ViTImageProcessor", {}),
        ("deit teacher", "DeiTImageProcessor", {}),
        ("ijepa", "ViTImageProcessor", {}),
        ("internvl whole", "GotOcr2ImageProcessor", {}),
        (
            "siglip 2 naflex whole",
            "Siglip2ImageProcessor",
            {"patch_size": 8, "max_num_patches": 16},
        ),
        ("qwen2-vl", "Qwen2VLImageProcessor", QWEN),
        ("qwen2.5-vl whole", "Qwen2VLImageProcessor", QWEN),
    ],
)
def test_every_way_a_library_calls_its_tower(
    case: str, processor: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    source = transformers_twin(tmp_path / "twin", case, "")
    if processor:
        given = settings if settings == QWEN else PROCESSOR | settings
        getattr(transformers, processor + "Pil")(**given).save_pretrained(source)
    else:
        transformers.DINOv3ViTImageProcessor(size=PROCESSOR["size"]).save_pretrained(source)
    result = verify(source, dtype="float64")
    assert result.equal, (result.verdict, result.checked)
    assert {"pixels", "layer 0", "layer 2"} <= {one.name for one in result.checked}


def test_kimis_patches_are_row_by_row(tmp_path: Path) -> None:
    """Of the tower and of the processor, on a grid that is not square."""
    randomized(TOWERS["kimi"].make()).float().save_pretrained(tmp_path)
    processor = {"size": {"max_height": 16, "max_width": 16}, "patch_size": 8, "merge_size": 2}
    transformers.Kimi_K25ImageProcessor(**processor).save_pretrained(tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (33, 50, 3), dtype=np.uint8)
    result = verify(tmp_path, picture, dtype="float64")
    assert result.equal, (result.verdict, result.checked)
    names = [one.name for one in result.checked]
    assert names == ["pixels", "layer 0", "layer 1", "layer 2", "tokens"]
    rows, columns = next(one.shape for one in result.checked if one.name == "pixels")[-2:]
    assert (rows, columns) == (48, 64)  # whole cells of 2 x 2 patches


@pytest.mark.parametrize(
    "name", ["video_llava", "shieldgemma2", "clipseg", "depth_anything", "pi0", "cohere2_vision"]
)
def test_the_tower_wherever_a_whole_model_has_it(name: str, tmp_path: Path) -> None:
    randomized(WHOLE[name].make()).float().save_pretrained(tmp_path)
    settings = [parse_setting(text) for text in SQUASH]
    pixels = {".".join(setting.path): setting.value for setting in settings}
    result = verify(tmp_path, dtype="float64", set=pixels)
    assert result.equal, (result.verdict, result.checked)
    assert {"layer 0", "layer 2"} <= {one.name for one in result.checked}


def test_other_pixels_are_said_first(tmp_path: Path) -> None:
    source = transformers_twin(tmp_path / "twin")
    result = verify(source, set={"preprocess.mean": [0.4, 0.5, 0.5]})
    assert result.first_difference == "pixels" and "255 levels" in result.verdict
    others = [one for one in result.checked if one.name != "pixels"]
    assert all(one.equal for one in others), "both read the library's pixels"


def test_a_hole_is_not_equal(tmp_path: Path) -> None:
    source = transformers_twin(tmp_path / "twin")
    file = Path(source) / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("layer.1.output.dense.bias"))
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, file, {"format": "pt"})
    result = verify(source)
    assert result.first_difference == "layer 2" and "not finite" in result.verdict


def test_exit_codes(tmp_path: Path) -> None:
    source = transformers_twin(tmp_path / "twin")
    run = lambda *arguments: CliRunner().invoke(app, ["verify", *arguments])  # noqa: E731
    done = run(source, "--json", "--plot", str(tmp_path / "layers.png"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["equal"] is True and (tmp_path / "layers.png").exists()
    assert run(source, "--set", "encoder.norm_eps=0.01").exit_code == 1
    vitcli.convert(vitcli.load(source), tmp_path / "ours")
    done = run(str(tmp_path / "ours"))
    assert done.exit_code == 2 and "no config of transformers, timm or open_clip" in done.stderr
    (Path(source) / "config.json").write_text('{"model_type": "vit"}')
    assert run(source).exit_code == 2


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = timm_twin(tmp_path / "twin")
    model = vitcli.load(source)
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(VitcliError, match="not installed") as caught:
        vitcli.commands.compare.verify.verify_model(model)
    assert "reference" in caught.value.hint and timm.__name__
