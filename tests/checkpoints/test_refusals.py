"""What cannot be loaded whole and certain is refused, with the reason and what settles it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

from tests.checkpoints.parity.compare import randomized
from tests.checkpoints.parity.hf import SMALL
from tests.checkpoints.sources import BLOCK0, SQUASH, edited, reconfigured, vit_folder
from vitcli.checkpoints.weights import load_weights
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")


def refusal(source: Path | str, **more: Any) -> str:
    with pytest.raises(VitcliError) as caught:
        load_weights(str(source), **more)
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.exit_code == 2
    return f"{caught.value.message} | {caught.value.hint}"


def test_a_missing_tensor_names_both_sides(tmp_path: Path) -> None:
    name = BLOCK0 + "attention.attention.key.bias"
    told = refusal(edited(vit_folder(tmp_path), lambda t: t.pop(name)))
    assert "1 missing" in told
    assert "vit.blocks.0.attention.qkv.bias" in told
    assert name in told


def test_a_misspelled_tensor_names_its_nearest(tmp_path: Path) -> None:
    def misspell(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layernorm.wieght"] = tensors.pop("layernorm.weight")

    told = refusal(edited(vit_folder(tmp_path), misspell))
    assert "nearest there: layernorm.wieght" in told
    assert "1 unexpected: layernorm.wieght" in told


def test_an_extra_tensor_is_unexpected(tmp_path: Path) -> None:
    told = refusal(edited(vit_folder(tmp_path), lambda t: t.update(extra=torch.zeros(3))))
    assert "1 unexpected: extra" in told


def test_a_transposed_tensor_is_misshapen(tmp_path: Path) -> None:
    name = BLOCK0 + "intermediate.dense.weight"
    folder = edited(vit_folder(tmp_path), lambda t: t.update({name: t[name].T.contiguous()}))
    told = refusal(folder)
    assert "misshapen" in told
    assert f"{name} 16x40" in told
    assert "40x16" in told


@pytest.mark.parametrize("bare", [False, True])
def test_a_missing_patch_embedding(bare: bool, tmp_path: Path) -> None:
    name = "embeddings.patch_embeddings.projection.weight"
    edited(vit_folder(tmp_path), lambda t: t.pop(name))
    settings = []
    if bare:
        (tmp_path / "config.json").unlink()
        settings = ["encoder.heads=2", "encoder.norm_eps=1e-6", "encoder.activation=gelu"]
    told = refusal(tmp_path, overrides=[parse_setting(text) for text in settings])
    assert name in told


def test_a_patch_embedding_that_is_no_convolution(tmp_path: Path) -> None:
    name = "embeddings.patch_embeddings.projection.weight"
    edited(vit_folder(tmp_path), lambda t: t.update({name: t[name].flatten(1)}))
    assert "is a convolution, here its weight is 16x192" in refusal(tmp_path)


def test_a_block_too_many_contradicts_the_config(tmp_path: Path) -> None:
    told = refusal(reconfigured(vit_folder(tmp_path), num_hidden_layers=3))
    assert "config.json: num_hidden_layers says depth = 3, the tensors say 2" in told


def test_a_table_for_another_size_names_both_values(tmp_path: Path) -> None:
    told = refusal(reconfigured(vit_folder(tmp_path), image_size=64))
    assert "64x64" in told and "17 rows" in told


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "relu"), ("pooler_act", "gelu"), ("patch_size", [8, 4])],
)
def test_a_setting_that_is_not_supported_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    told = refusal(reconfigured(vit_folder(tmp_path), **{key: value}))
    assert key in told and "not supported in hf-vit" in told


def test_a_setting_that_is_not_known_is_refused(tmp_path: Path) -> None:
    told = refusal(reconfigured(vit_folder(tmp_path), use_swish_gate=True))
    assert "use_swish_gate = True" in told


def test_settings_that_are_off_or_of_the_library_pass(tmp_path: Path) -> None:
    reconfigured(vit_folder(tmp_path), use_swish_gate=False, torch_dtype="float16", top_k=50)
    assert load_weights(str(tmp_path)).report.family == "hf-vit"


def test_another_model_type_with_the_same_names_is_refused(tmp_path: Path) -> None:
    told = refusal(reconfigured(vit_folder(tmp_path), model_type="vit_hybrid"))
    assert "a vit_hybrid checkpoint whose tower (model_type vit_hybrid, " in told
    assert "is not supported" in told
    told = refusal(reconfigured(tmp_path, model_type="clip"))
    assert "config.json has model_type 'clip', the tensors of" in told and "as in hf-vit" in told


@pytest.mark.parametrize(
    ("gone", "key"),
    [
        ("num_attention_heads", "heads"),
        ("layer_norm_eps", "norm_eps"),
        ("hidden_act", "activation"),
    ],
)
def test_what_nothing_tells_names_the_option(gone: str, key: str, tmp_path: Path) -> None:
    told = refusal(reconfigured(vit_folder(tmp_path), **{gone: None}))
    assert f"give {key}" in told
    assert "--preset NAME" in told and f"--set encoder.{key}=VALUE" in told


def test_a_bare_file_is_settled_by_options(tmp_path: Path) -> None:
    vit_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    file = str(tmp_path / "model.safetensors")
    told = refusal(file)
    assert "heads" in told
    settings = ("encoder.heads=2", "encoder.norm_eps=1e-12", "encoder.activation=gelu")
    loaded = load_weights(file, overrides=[parse_setting(text) for text in settings])
    assert loaded.config.encoder.image_size == (32, 32)
    assert loaded.report.preprocess_by is None


@pytest.mark.parametrize(
    ("position", "family", "pooling"),
    [("learned", "hf-vit", "cls"), ("sincos2d", "hf-mae", "none")],
)
def test_a_bare_file_of_two_families_is_no_guess(
    position: str, family: str, pooling: str, tmp_path: Path
) -> None:
    """ViT without its pooler and ViT-MAE name every tensor alike."""
    model = randomized(T.ViTMAEModel(T.ViTMAEConfig(**SMALL))).float()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    settings = ["encoder.heads=2", "encoder.norm_eps=1e-12", "encoder.activation=gelu"]
    told = refusal(tmp_path, overrides=[parse_setting(text) for text in settings])
    assert "hf-vit and hf-mae have the same tensor names" in told
    choice = f"encoder.position={position}"
    assert f"--set {choice} ({family})" in told
    chosen = [parse_setting(text) for text in (*settings, choice)]
    loaded = load_weights(str(tmp_path), overrides=chosen)
    assert loaded.report.family == family
    assert (loaded.config.encoder.position, loaded.config.encoder.pooling) == (position, pooling)


def test_one_preprocessing_key_is_not_all_of_them(tmp_path: Path) -> None:
    vit_folder(tmp_path)
    told = refusal(tmp_path, overrides=[parse_setting("preprocess.resize_size=32")])
    assert "still unknown: resize, filter, resize_dtype, crop_size, mean, std" in told
    assert "--set preprocess.mean=VALUE" in told
    given = [parse_setting(text) for text in SQUASH]
    for index, setting in enumerate(given):
        told = refusal(tmp_path, overrides=given[:index] + given[index + 1 :])
        assert setting.path[1] in told.split("|")[0]
    assert load_weights(str(tmp_path), overrides=given).report.preprocess_by is not None
    cropped = [*given, parse_setting("preprocess.crop_size=30")]
    assert "still unknown: crop_rounding" in refusal(tmp_path, overrides=cropped)


def test_a_preset_of_another_shape_is_a_contradiction(tmp_path: Path) -> None:
    vit_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    told = refusal(tmp_path, preset=load_config(ModelConfig, "vit-b16"))
    assert "preset vit-b16 says hidden = 768, the tensors say 16" in told


def test_the_user_cannot_contradict_the_tensors(tmp_path: Path) -> None:
    told = refusal(vit_folder(tmp_path), overrides=[parse_setting("encoder.depth=5")])
    assert "--set encoder.depth=5 says depth = 5, the tensors say 2" in told
    assert "leave out --set encoder.depth=5" in told


def test_the_user_may_take_the_head_away(tmp_path: Path) -> None:
    overrides = [parse_setting("encoder.head=none"), parse_setting("encoder.pooling=mean")]
    loaded = load_weights(str(vit_folder(tmp_path)), overrides=overrides)
    assert loaded.config.encoder.head == "none"
    assert loaded.report.tensors_dropped == ("pooler.dense.bias", "pooler.dense.weight")


def test_unknown_keys_of_the_user_are_refused(tmp_path: Path) -> None:
    assert "encoder.hedas" in refusal(
        vit_folder(tmp_path), overrides=[parse_setting("encoder.hedas=2")]
    )
    assert "preproces" in refusal(tmp_path, overrides=[parse_setting("preproces.mean=1")])


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    name = BLOCK0 + "intermediate.dense.weight"
    folder = edited(
        vit_folder(tmp_path), lambda t: t.update({"layers.0.mlp.fc1.weight": t[name].clone()})
    )
    assert "two spellings" in refusal(folder)


def test_a_model_of_another_kind_fits_no_family(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(4, 3, 7, 7)}, tmp_path / "resnet.safetensors")
    assert "unrecognized checkpoint: no supported family matches (1 tensors" in refusal(
        tmp_path / "resnet.safetensors"
    )


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_safetensors_file(keep: int, tmp_path: Path) -> None:
    file = vit_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "truncated or not a safetensors file" in refusal(file)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.98])
def test_a_truncated_torch_file(part: float, tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    torch.save({"layernorm.weight": torch.zeros(4000)}, file)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * part)])
    told = refusal(file)
    assert "truncated" in told or "not a checkpoint" in told


def test_a_pickle_with_code_names_what_it_asked_for_and_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"layernorm.weight": torch.zeros(4), "evil": Evil()}, tmp_path / "evil.bin")
    told = refusal(tmp_path / "evil.bin")
    assert "touch" in told or "getattr" in told or "Path" in told
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    assert "torch.save" in refusal(tmp_path / "plain.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"hello", "file.pth: truncated or not a PyTorch checkpoint | "),
        (pickle.dumps({"a": 1}, protocol=4), "a pickle that torch.save did not write"),
        (b"PK\x03\x04" + b"x" * 99, "truncated or not a PyTorch checkpoint (File is not a zip"),
    ],
    ids=["text", "plain pickle", "broken zip"],
)
def test_reasons_are_whole_sentences_without_warnings(
    content: bytes, told: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "file.pth").write_bytes(content)
    assert told in refusal(tmp_path / "file.pth")
    assert not recwarn.list


def test_a_checkpoint_of_another_kind_is_named(tmp_path: Path) -> None:
    torch.save({"layer1.0.conv1.weight": torch.zeros(2)}, tmp_path / "resnet.pth")
    assert "resnet.pth: unrecognized checkpoint: no supported family matches" in refusal(
        tmp_path / "resnet.pth"
    )


def test_training_leftovers_name_their_class(tmp_path: Path) -> None:
    torch.save({"model": {}, "best": Fraction(1, 3)}, tmp_path / "run.pth")
    assert "asks for fractions.Fraction" in refusal(tmp_path / "run.pth")


def test_a_checkpoint_without_a_state_dict(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "run.pth")
    assert "no state dict inside (found epoch, lr)" in refusal(tmp_path / "run.pth")


def test_a_torchscript_archive_with_other_objects_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "clip.pt", "w") as archive:
        archive.writestr("clip/constants.pkl", b"")
        archive.writestr("clip/data.pkl", pickle.dumps(Path("x")))
    assert "asks for pathlib" in refusal(tmp_path / "clip.pt")
    (tmp_path / "clip.pt").write_bytes((tmp_path / "clip.pt").read_bytes()[:150])
    assert "truncated" in refusal(tmp_path / "clip.pt")


def test_an_npz_with_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", thing=np.array([{"a": 1}], dtype=object))
    assert "Python objects" in refusal(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04 no")
    assert "truncated" in refusal(tmp_path / "b.npz")


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "nowhere.bin")
    assert "no weights found" in refusal(tmp_path)
    (tmp_path / "weights.h5").write_bytes(b"x")
    assert "unknown kind of file" in refusal(tmp_path / "weights.h5")


def test_a_directory_with_several_checkpoints_asks_which(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    assert "several checkpoints: a.safetensors, b.safetensors" in refusal(tmp_path)


def test_hub_ids_offline_are_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "not in the hub's cache" in refusal("nobody-at-all/no-such-model")


def test_hub_ids_in_a_fresh_process(tmp_path: Path) -> None:
    """The hub library is imported lazily, part by part, which only a fresh process shows."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "vitcli", "params", "--weights", "no-one/no-such-model"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2
    assert "not in the hub's cache, and the hub cannot be reached" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_without_a_network_there_are_two_lines_and_no_second_try(tmp_path: Path) -> None:
    """Port 9 refuses at once; what was retried would be told on stderr."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "vitcli", "params", "--weights", "no-one/no-such-model"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert "the hub cannot be reached" in first and second.strip().startswith("try:")


def test_hub_ids_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert "[hub]" in refusal("nobody-at-all/no-such-model")


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    vit_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: invalid JSON" in refusal(tmp_path)


def test_an_index_without_its_shards(tmp_path: Path) -> None:
    names = list(load_file(vit_folder(tmp_path) / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    shard = "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    assert f"{shard} is missing, and the vision tower is in it" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    assert "no weight_map of names to files" in refusal(tmp_path)
    save_file({"b": torch.zeros(1)}, tmp_path / "m.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "m.safetensors"}}))
    assert "1 tensors of the index are missing, first a" in refusal(tmp_path)
