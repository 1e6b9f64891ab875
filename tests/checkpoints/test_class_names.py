from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import vitcli
from vitcli.checkpoints.weights import class_names, load_weights, save_snapshot

NAMES = [f"kind, {i}" for i in range(12)]


def published(folder: Path, names: list[str] | None) -> str:
    """A tiny classifier as transformers saves it: `id2label` has the keys "0", "1", "10" ..."""
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=12,
        **({"id2label": dict(enumerate(names))} if names else {}),
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return str(folder)


def test_names_come_in_the_order_of_the_outputs_and_stay_with_the_weights(tmp_path: Path) -> None:
    loaded = load_weights(published(tmp_path / "hf", NAMES))
    assert loaded.config.classes == tuple(NAMES)
    save_snapshot(tmp_path / "own", loaded.config, loaded.encoder)
    assert load_weights(str(tmp_path / "own")).config.classes == tuple(NAMES)


def test_names_are_converted_and_a_users_own_go_first(tmp_path: Path) -> None:
    source = published(tmp_path / "hf", NAMES)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(source)
    vitcli.convert(source, tmp_path / "own")
    assert vitcli.load(tmp_path / "own").config.classes == tuple(NAMES)
    mine = [f"mine {i}" for i in range(12)]
    loaded = vitcli.load(source, set={"classes": mine})
    assert loaded.config.classes == tuple(mine)
    vitcli.convert(loaded, tmp_path / "mine")
    assert vitcli.load(tmp_path / "mine").config.classes == tuple(mine)


def test_placeholders_are_no_names(tmp_path: Path) -> None:
    assert load_weights(published(tmp_path / "hf", None)).config.classes is None


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"id2label": {"0": "a"}},
        {"id2label": {"1": "a", "2": "b"}},
        {"id2label": {"0": "a", "1": 3}},
        {"id2label": "ab"},
        {"id2label": [["a"], ["b"]]},
    ],
)
def test_names_that_do_not_fit_the_outputs_are_none(config: dict[str, object] | None) -> None:
    assert class_names(config, 2) is None


def test_timm_writes_a_list() -> None:
    assert class_names({"label_names": ["n01", "n02"]}, 2) == ("n01", "n02")
