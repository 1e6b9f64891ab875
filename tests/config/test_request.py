from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vitcli.build import build_meta
from vitcli.config.request import ModelRequest, config_yaml, load_config, read_saved_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import known_keys, parse_setting
from vitcli.config.training import ImagesRun
from vitcli.config.yaml import parse_value, read_yaml
from vitcli.errors import VitcliError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str, *sets: str, preset: str | None = None) -> ModelConfig:
    settings = [parse_setting(s) for s in sets]
    return load_config(ModelConfig, preset, write(tmp_path, text), settings)


def complaint(tmp_path: Path, text: str, *sets: str, preset: str | None = None) -> str:
    with pytest.raises(VitcliError) as caught:
        load(tmp_path, text, *sets, preset=preset)
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2e+3", -2e3),
        ("1.5e-6", 1.5e-6),
        ("6", 6),
        ("null", None),
        ("[384, 512]", [384, 512]),
        ("cls+mean", "cls+mean"),
        ("e3", "e3"),
    ],
)
def test_values_are_yaml_with_yaml_1_2_floats(text: str, value: Any) -> None:
    parsed = parse_value(text, "test")
    assert parsed == value and type(parsed) is type(value)


def test_the_later_layer_wins(tmp_path: Path) -> None:
    text = "preset: vit-s16\nencoder: {depth: 5, registers: 2}"
    config = load(tmp_path, text, "encoder.registers=3", "encoder.attention.mask=causal")
    encoder = config.encoder
    assert (encoder.hidden, encoder.depth, encoder.registers) == (384, 5, 3)
    assert encoder.attention.mask == "causal"
    assert config.name == "mine"


def test_a_config_without_preset_starts_from_vit_b16(tmp_path: Path) -> None:
    assert load(tmp_path, "{}").encoder == load_config(ModelConfig, "vit-b16").encoder


@pytest.mark.parametrize(
    "text, expected",
    [
        ("encoder:\n  hiden: 96", ["mine.yaml:2", "encoder.hiden", "encoder.hidden"]),
        ("encoder:\n  attention:\n    maks: causal", ["mine.yaml:3", "encoder.attention.mask"]),
        ("depth: 3", ["mine.yaml:1", "depth", "encoder.depth"]),
        ("encoder:\n  hidden: 96\n  hidden: 64", ["mine.yaml:3", "encoder.hidden", "line 2"]),
        ("encoder:\n  depth: '12'", ["mine.yaml:2", "encoder.depth", "integer", "'12'"]),
        ("encoder:\n  depth: true", ["mine.yaml:2", "encoder.depth", "integer"]),
        ("encoder:\n  depth: 0", ["mine.yaml:2", "encoder.depth", "greater than or equal to 1"]),
        ("encoder:\n  position: rope", ["mine.yaml:2", "encoder.position", "rope2d"]),
        ("encoder:\n  hidden: 96\n  heads: 7", ["mine.yaml:2", "encoder.hidden", "heads = 7"]),
        (
            "encoder:\n  position: rope2d\n  hidden: 60\n  heads: 6",
            ["mine.yaml:2", "encoder.position", "multiple of 4"],
        ),
        ("encoder:\n  cls_token: false", ["mine.yaml:2", "encoder.pooling", "cls_token"]),
        ("encoder:\n  patch_size: 300", ["mine.yaml:2", "encoder.patch_size", "larger"]),
        ("encoder:\n  image_size: [1, 2, 3]", ["mine.yaml:2", "encoder.image_size"]),
        ("encoder:\n  head: linear", ["mine.yaml:2", "encoder.head_out", "linear"]),
        ("encoder:\n  heads: 5", ["mine.yaml:2", "encoder.hidden", "heads = 5"]),
        ("preset: dinov3-s16\nencoder:\n  heads: 64", ["mine.yaml:3", "encoder.position"]),
        ("encoder:\n  image_size: 8", ["mine.yaml:2", "encoder.patch_size", "8x8"]),
        ("encoder:\n  attention:\n    mask: window", ["mine.yaml:3", "attention.window"]),
        ("preprocess:\n  resize: none", ["mine.yaml:2", "preprocess.resize_size"]),
        ("preprocess:\n  mean: [0.5, 0.5]", ["mine.yaml:2", "preprocess.mean: too few", "2"]),
        ("encoder:\n  init_std: .inf", ["mine.yaml:2", "encoder.init_std", "finite"]),
        ("encoder:\n  layer_scale: .nan", ["mine.yaml:2", "encoder.layer_scale", "finite"]),
        ("encoder: 3", ["mine.yaml:1", "encoder"]),
        ("preprocess:\n  std: [0.5, 0.5, 0]", ["mine.yaml:2", "preprocess.std"]),
        ("preset: 7", ["preset"]),
        ("- a\n- b", ["mine.yaml", "list"]),
        ("encoder: {depth: 3", ["mine.yaml:1"]),
        ("a: &x [*x, b]", ["mine.yaml"]),
        ("encoder: !!python/object:os.system {}", ["mine.yaml:1"]),
        ("? [a, b]\n: 1", ["mine.yaml:1"]),
    ],
)
def test_errors_name_file_line_key_and_the_nearest_key(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    said = complaint(tmp_path, text)
    assert all(part in said for part in expected), said
    assert "\n" not in said


def test_errors_name_the_option_that_set_the_key(tmp_path: Path) -> None:
    assert "--set encoder.depht=3: encoder.depht: unknown" in complaint(
        tmp_path, "{}", "encoder.depht=3"
    )
    assert "--set depth" in complaint(tmp_path, "{}", "depth")
    twice = complaint(tmp_path, "encoder: {heads: 6}", "encoder.heads=5", "encoder.heads=7")
    assert "--set encoder.heads=7: encoder.hidden" in twice, "the last to speak is at fault"
    assert "encoder.depth is a value" in complaint(
        tmp_path, "encoder: {depth: 3}", "encoder.depth.x=3"
    )
    assert "did you mean vit-b16" in complaint(tmp_path, "{}", preset="vit-b61")
    assert "leave out --preset" in complaint(tmp_path, "preset: vit-s16", preset="vit-b16")


def test_words_have_a_nearest_and_presets_a_list(tmp_path: Path) -> None:
    assert "mine.yaml:2: 'vit-s61' is not a preset | did you mean vit-s16?" in complaint(
        tmp_path, "name: a\npreset: vit-s61"
    )
    assert complaint(tmp_path, "{}", preset="zzz").endswith("run `vitcli presets` for the list")
    assert "did you mean rope2d?" in complaint(tmp_path, "{}", "encoder.position=rope")
    assert "run `vitcli params --print-config` for valid values" in complaint(
        tmp_path, "{}", "encoder.norm_placement=middle"
    )


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(VitcliError, match="cannot read"):
            read_yaml(path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VitcliError, match="UTF-8"):
        read_yaml(binary)


@pytest.mark.parametrize("preset", ["vit-b16", "dinov3-s16plus", "qwen2.5-vl-7b", "siglip-b16-224"])
def test_a_printed_config_reads_back_to_the_same_model(tmp_path: Path, preset: str) -> None:
    setting = parse_setting("encoder.norm_eps=3e-7")
    config = load_config(ModelConfig, preset, None, [setting])
    again = load(tmp_path, config_yaml(config))
    assert again == config
    shapes = [
        {name: p.shape for name, p in build_meta(c.encoder).state_dict().items()}
        for c in (config, again)
    ]
    assert shapes[0] == shapes[1]


def test_known_keys_reach_into_sections() -> None:
    keys = known_keys(ModelConfig)
    assert {"encoder.attention.mask", "encoder.hidden", "preprocess.mean", "name"} <= set(keys)


def test_the_input_follows_a_changed_native_size(tmp_path: Path) -> None:
    assert load(tmp_path, "encoder: {image_size: 64}").preprocess.output_size == (64, 64)
    own = load(tmp_path, "preprocess: {resize_size: 224}", "encoder.image_size=64")
    assert own.preprocess.output_size == (224, 224), "what is given is kept"
    assert load(tmp_path, "preset: dinov2-s14").preprocess.output_size == (224, 224)


def test_image_size_is_the_input_and_not_the_table() -> None:
    config = ModelRequest(preset="vit-b16", image_size=(384, 512)).fresh_config()
    assert config.preprocess.output_size == (384, 512)
    assert config.encoder == load_config(ModelConfig, "vit-b16").encoder
    with pytest.raises(VitcliError, match="smaller than a patch"):
        ModelRequest(preset="vit-b16", image_size=(8, 512)).fresh_config()


def test_the_heads_width_has_a_name_of_its_own(tmp_path: Path) -> None:
    """`head_dim` is hidden / heads everywhere in the field; the output head's width is head_out."""
    assert load_config(ModelConfig, "vit-b16").encoder.head_dim == 64
    for text, settings in [("encoder: {head_dim: 3}", ()), ("{}", ("encoder.head_dim=3",))]:
        with pytest.raises(VitcliError, match=r"head_dim: is encoder\.head_out now") as refused:
            load(tmp_path, text, *settings)
        assert "head_out" in refused.value.hint


def test_a_config_that_the_first_release_saved_is_read_in_its_own_words(tmp_path: Path) -> None:
    """It wrote head_dim and `centred`, and counted blocks and heads from 0."""
    saved = tmp_path / "config.yaml"
    saved.write_text(
        "name: old\n"
        "encoder:\n"
        "  head: linear\n  head_dim: 7\n  position: rope2d\n  rope: {coordinates: centred}\n"
        "  attention: {mask: window, window: 2, full_blocks: [0, 11]}\n"
        'train: {lora: {heads: ["11:2", "0:0"]}}\n'
    )
    config = load_config(ImagesRun, start=read_saved_config(saved))
    assert config.encoder.head_out == 7
    assert config.encoder.rope.coordinates == "centered"
    assert config.encoder.attention.full_blocks == (1, 12)
    assert config.train.lora.heads == ("12:3", "1:1")
    assert config.train.lora.places() == ((11, 2), (0, 0))
    saved.write_text(config_yaml(config))
    assert load_config(ImagesRun, start=read_saved_config(saved)) == config
