"""One checkpoint, in each form it is passed around in, is the same encoder."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.sources import SQUASH, same_weights, vit_folder
from vitcli.checkpoints.weights import load_weights, plan_weights, save_snapshot
from vitcli.config.settings import parse_setting

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return vit_folder(tmp_path / "vit")


def as_torch(
    folder: Path, content: object, name: str = "pytorch_model.bin", **more: object
) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / name, **more)
    return folder


def test_every_form_of_a_state_dict(folder: Path, tmp_path: Path) -> None:
    wanted = load_weights(str(folder)).encoder
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: t.clone() for name, t in tensors.items()}
    contents: dict[str, object] = {
        "plain": tensors,
        "model": {"model": tensors, "optimizer": {"state": {}}, "epoch": 3},
        "lightning": {"state_dict": tensors, "hyper_parameters": {"lr": 0.1}},
        "data parallel": {"model": {f"module.{n}": t for n, t in tensors.items()}},
        "compiled": {f"_orig_mod.{n}": t for n, t in tensors.items()},
        "averaged": {
            **{f"module.{n}": t for n, t in tensors.items()},
            "n_averaged": torch.ones(()),
        },
        "with arguments": {
            "model": tensors,
            "args": argparse.Namespace(lr=1),
            "best": np.float64(1),
        },
    }
    for label, content in contents.items():
        there = shutil.copytree(folder, tmp_path / label)
        as_torch(there, content)
        assert same_weights(wanted, load_weights(str(there)).encoder), label
    old = as_torch(
        shutil.copytree(folder, tmp_path / "old"), tensors, _use_new_zipfile_serialization=False
    )
    assert same_weights(wanted, load_weights(str(old)).encoder)
    for suffix in (".pt", ".pth"):
        named = shutil.copytree(folder, tmp_path / suffix)
        as_torch(named, tensors, f"weights{suffix}")
        assert same_weights(wanted, load_weights(str(named)).encoder)
        assert same_weights(wanted, load_weights(str(named / f"weights{suffix}")).encoder)


def test_shards(folder: Path) -> None:
    wanted = load_weights(str(folder))
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    names = sorted(tensors)
    shard_of = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for shard in set(shard_of.values()):
        save_file({n: tensors[n] for n in names if shard_of[n] == shard}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    for source in (folder, index):
        again = load_weights(str(source))
        assert same_weights(wanted.encoder, again.encoder)
        assert len(again.report.files) == 2


def test_hub_ids_come_from_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    repo = cache / "models--someone--tiny-vit"
    commit = "a" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repo / "snapshots" / commit)
    for source in ("someone/tiny-vit", "someone/tiny-vit@main", f"someone/tiny-vit@{commit}"):
        assert same_weights(load_weights(str(folder)).encoder, load_weights(source).encoder)


def test_stored_dtypes_are_read_as_asked(folder: Path) -> None:
    wide = load_weights(str(folder))
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / "model.safetensors")
    half = load_weights(str(folder))
    assert half.report.stored_dtypes == ("bfloat16",) and half.report.dtype == "float32"
    for name, value in half.encoder.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, wide.encoder.state_dict()[name].bfloat16().float())
    kept = load_weights(str(folder), dtype=torch.bfloat16)
    assert {p.dtype for p in kept.encoder.parameters()} == {torch.bfloat16}


def test_own_snapshots_are_bit_exact(folder: Path, tmp_path: Path) -> None:
    overrides = [parse_setting(text) for text in SQUASH]
    first = load_weights(str(folder), overrides=overrides)
    save_snapshot(tmp_path / "own", first.config, first.encoder)
    for source in (tmp_path / "own", tmp_path / "own" / "model.safetensors"):
        again = load_weights(str(source))
        assert again.config == first.config
        assert same_weights(first.encoder, again.encoder)
        assert again.report.family == "vitcli"
        assert again.report.preprocess_by == "config.yaml"
        assert again.report.preprocess == first.report.preprocess
    assert sorted(f.name for f in tmp_path.iterdir()) == ["own", "vit"]


def test_loaded_parameters_are_leaves_that_can_be_trained(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    encoder = load_weights(str(folder)).encoder
    assert not encoder.training
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1.0)
    encoder(torch.randn(1, 3, 32, 32)).output.sum().backward()
    optimizer.step()
    assert all(p.is_leaf and p.requires_grad for p in encoder.parameters())
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_plan_reads_no_values(folder: Path) -> None:
    plan = plan_weights(str(folder))
    assert all(t.is_meta for t in plan.encoder.state_dict().values())
    assert plan.config.encoder == load_weights(str(folder)).config.encoder


def test_the_report_says_who_settled_what(folder: Path) -> None:
    overrides = [parse_setting("encoder.norm_eps=1e-6")]
    report = load_weights(str(folder), overrides=overrides).report
    by = {settled.key: settled.by for settled in report.settled}
    assert by["hidden"] == "the tensors"
    assert by["heads"] == "config.json: num_attention_heads"
    assert by["norm_eps"] == "--set encoder.norm_eps=1e-6"
    assert by["position_table.resize"] == "family hf-vit"
    assert report.tensors_used == len(load_file(folder / "model.safetensors"))
