"""Whole vision-language models, saved by transformers: the tower gives the library's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.parity.compare import assert_close, images, ours, randomized
from tests.checkpoints.parity.vlms import WHOLE
from tests.checkpoints.sources import same_weights
from vitcli.checkpoints.tower import LAYER_KEYS
from vitcli.checkpoints.weights import load_weights
from vitcli.errors import VitcliError
from vitcli.loading import load

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


LAYERED = {
    *("llava", "llava, SigLIP", "llava, DINOv3", "llava, ViT-MSN", "llava_next", "vipllava"),
    *("llava_next_video", "llava_onevision", "video_llava", "aya_vision", "InternVLModel"),
}
"""Those whose config says which layers of the tower the language model reads."""


@pytest.mark.parametrize("name", WHOLE)
def test_the_tower_equals_transformers(name: str, tmp_path: Path) -> None:
    case = WHOLE[name]
    model = randomized(case.make())
    model.save_pretrained(tmp_path)
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    assert loaded.report.family == case.family
    tower = model.get_submodule(case.tower)
    for size in case.sizes:
        pixels = images(*size)
        with torch.no_grad():
            theirs = case.run(tower, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)
    saved = json.loads((tmp_path / "config.json").read_text())
    named = {key: saved[key] for key in LAYER_KEYS if key in saved}
    assert bool(named) == (name in LAYERED)
    for key, value in named.items():
        layers = value if isinstance(value, list) else [value]
        shown = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
        assert f"the language model reads {shown} ({key})" in loaded.report.notes
        kept = load(tmp_path, dtype="float64").features(pixels, layers=layers).layers
        for layer in layers:
            patches, theirs_there = kept[layer].patches.flatten(1, 2), theirs.blocks[layer]
            apart = patches - theirs_there[:, -patches.shape[1] :]
            assert apart.abs().max() <= 1e-5 * theirs_there.abs().max()
    if name not in ("vit_msn", "vit_msn classifier"):
        beside = [note for note in loaded.report.notes if note.endswith("not read")]
        counted = sum(int(note.split(": ")[1].split()[0]) for note in beside)
        stored = len(load_file(tmp_path / "model.safetensors"))
        report = loaded.report
        assert counted + report.tensors_used + len(report.tensors_dropped) == stored


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    randomized(WHOLE["llava"].make()).float().save_pretrained(tmp_path / "llava")
    return tmp_path / "llava"


def rewritten(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    tensors = edit(load_file(folder / "model.safetensors"))
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def test_the_report_says_what_was_left_out_and_which_layer_is_read(llava: Path) -> None:
    notes = load_weights(str(llava)).report.notes
    assert "vision tower under vision_tower." in notes
    assert "language model: 12 tensors, not read" in notes
    assert "the language model reads layer -2 (vision_feature_layer)" in notes


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint32, torch.int8, torch.complex64])
def test_what_lies_outside_the_tower_is_no_reason_to_refuse(kind: torch.dtype, llava: Path) -> None:
    wanted = load_weights(str(llava)).encoder

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        strange = torch.zeros(2, 3).to(kind)
        return tensors | {
            "language_model.model.layers.0.mlp.up_proj.weight": strange,
            "mtp.layers.0.weight": strange,
            "score.weight": strange,
            "custom_text_proj.weight": strange,
        }

    assert same_weights(wanted, load_weights(str(rewritten(llava, edit))).encoder)


@pytest.mark.parametrize(
    "before",
    [
        "module.",
        "_orig_mod.",
        "module._orig_mod.",
        "_orig_mod.module.",
        "model.",
        "backbone.",
        "encoder.",
        "teacher.backbone.",
        "student.",
        "base.vision.",
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_prefixes_that_trainers_write(before: str, form: str, llava: Path) -> None:
    wanted = load_weights(str(llava)).encoder
    rewritten(llava, lambda tensors: {before + n: t for n, t in tensors.items()})
    if form == "bin":
        file = llava / "model.safetensors"
        torch.save(load_file(file), llava / "pytorch_model.bin")
        file.unlink()
    assert same_weights(wanted, load_weights(str(llava)).encoder)


def test_checkpointing_wrappers_within_names(llava: Path) -> None:
    wanted = load_weights(str(llava)).encoder

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        inside = "vision_tower._orig_mod.encoder.layers.0._checkpoint_wrapped_module."
        return {
            name.replace("vision_tower.encoder.layers.0.", inside): t for name, t in tensors.items()
        }

    assert same_weights(wanted, load_weights(str(rewritten(llava, edit))).encoder)


def test_two_towers_of_one_kind(llava: Path) -> None:
    """A teacher is read before its student; of others the user says which."""
    wanted = load_weights(str(llava)).encoder
    tensors = load_file(llava / "model.safetensors")
    tower = {n.removeprefix("vision_tower."): t for n, t in tensors.items() if "vision_tower" in n}
    config = T.CLIPVisionConfig(**json.loads((llava / "config.json").read_text())["vision_config"])
    (llava / "config.json").write_text(json.dumps(config.to_dict()))

    def both(first: str, second: str) -> Path:
        copies = {first + n: t.clone() for n, t in tower.items()}
        copies |= {second + n: t * 2 for n, t in tower.items()}
        save_file(copies, llava / "model.safetensors")
        return llava

    assert same_weights(wanted, load_weights(str(both("teacher.", "student."))).encoder)
    with pytest.raises(VitcliError, match=r"2 vision towers, under the prefixes a\. .* b\."):
        load_weights(str(both("a.", "b.")))
    for prefix in ("a", "a."):
        assert same_weights(wanted, load_weights(str(llava), prefix=prefix).encoder)
    with pytest.raises(VitcliError, match=r"no supported family matches under the prefix 'c'"):
        load_weights(str(llava), prefix="c")


def test_a_tower_that_is_not_supported_is_named(llava: Path) -> None:
    config = json.loads((llava / "config.json").read_text())
    config["vision_config"]["model_type"] = "blip_vision_model"
    (llava / "config.json").write_text(json.dumps(config))
    with pytest.raises(VitcliError) as caught:
        load_weights(str(llava))
    assert (
        "a llava checkpoint whose tower (vision_config blip_vision_model, 39 tensors under "
        "vision_tower.) is not supported" in caught.value.message
    )


def test_defaults_that_the_library_would_take_must_agree_with_the_tensors(llava: Path) -> None:
    """A vision_config that leaves the width out is 768 wide to the library: it is of another."""
    config = json.loads((llava / "config.json").read_text())
    del config["vision_config"]["hidden_size"]
    (llava / "config.json").write_text(json.dumps(config))
    with pytest.raises(VitcliError, match="default that transformers has for hidden_size"):
        load_weights(str(llava))


def test_only_the_shards_that_hold_the_tower_are_needed(llava: Path) -> None:
    """Whatever shards are called; the index says which holds what."""
    wanted = load_weights(str(llava))
    tensors = load_file(llava / "model.safetensors")
    (llava / "model.safetensors").unlink()
    shards = [f"model.safetensors-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    shard_of = {n: shards[0 if "language" in n else 1 + ("layers.1" in n)] for n in sorted(tensors)}
    for shard in shards[1:]:
        save_file({n: t for n, t in tensors.items() if shard_of[n] == shard}, llava / shard)
    (llava / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    again = load_weights(str(llava))
    assert same_weights(wanted.encoder, again.encoder)
    assert [Path(file).name for file in again.report.files] == shards[1:]
    assert again.report.notes == wanted.report.notes
    (llava / shards[2]).unlink()
    with pytest.raises(VitcliError, match=f"{shards[2]} is missing, and the vision tower is in it"):
        load_weights(str(llava))
