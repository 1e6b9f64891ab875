"""Names to parts, the tower's config to a section, and what is left over."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from vitcli.build import build_meta
from vitcli.checkpoints.encoder_settings import resolve_settings
from vitcli.checkpoints.family import Family, Variant, fused
from vitcli.checkpoints.match import assign, check, foreign_names
from vitcli.checkpoints.tensors import lazy
from vitcli.checkpoints.tower import detect, summary, tower_config
from vitcli.checkpoints.weights import plan_weights
from vitcli.config.schema import EncoderConfig
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError

TOY = Family(
    "toy",
    "a toy",
    "nothing",
    signature=("block.{i}.q.weight",),
    model_types=("toy",),
    prefixes=("", "toy."),
    renames={
        "vit.blocks.{i}.attention.qkv": fused(*(f"block.{{i}}.{part}" for part in "qkv")),
        "vit.norm": "norm",
    },
    drops=(r"counter",),
    decides={"pooling": "cls"},
    variants=(Variant(when=("extra",), settings={"pooling": "mean"}, unproven=("pooling",)),),
)


def tensors(*names: str, before: str = "") -> dict[str, torch.Tensor]:
    return {before + name: torch.zeros(4, 4) for name in names}


BLOCK = ("block.0.q.weight", "block.0.k.weight", "block.0.v.weight", "norm.weight")


def test_assign_sorts_every_name() -> None:
    given = lazy(tensors(*BLOCK, "counter", "stranger", "beside"))
    spelled = {name: name for name in given}
    match = assign(given, TOY, "", spelled, set(spelled) - {"beside"})
    assert match.used == set(BLOCK)
    assert (match.dropped, match.left, match.outside) == ({"counter"}, {"stranger"}, {"beside"})
    part = match.parts["vit.blocks.0.attention.qkv.weight"]
    assert part.complete and part.try_shape() == (12, 4)
    assert foreign_names("vit.blocks.5.attention.qkv.bias", match) == [
        f"block.5.{part}.bias" for part in "qkv"
    ]
    assert foreign_names("nothing", match) == []


def test_a_part_of_which_a_tensor_is_lost_is_incomplete() -> None:
    given = lazy(tensors(*BLOCK[:2], "norm.weight"))
    match = assign(given, TOY, "", {name: name for name in given})
    assert not match.parts["vit.blocks.0.attention.qkv.weight"].complete


def test_variants_apply_where_their_names_are() -> None:
    given = lazy(tensors(*BLOCK, "extra"))
    match = assign(given, TOY, "", {name: name for name in given})
    assert match.settings()["pooling"] == "mean" and match.unproven() == ["pooling"]


def test_check_lists_both_sides() -> None:
    config = EncoderConfig(hidden=16, depth=1, heads=2, mlp_hidden=8, image_size=(32, 32))
    given = lazy(tensors(*BLOCK, "stranger"))
    match = assign(given, TOY, "", {name: name for name in given})
    with pytest.raises(VitcliError) as caught:
        check(build_meta(config), match.parts, match, given)
    told = caught.value.message
    assert "1 unexpected: stranger" in told
    assert "vit.blocks.0.attention.qkv.weight is 48x16, from block.0.q.weight 4x4" in told
    assert "missing" in told


@pytest.mark.parametrize(
    ("config", "kind", "where"),
    [
        ({"model_type": "vit"}, "vit", ""),
        ({"model_type": "clip", "vision_config": {}}, "clip", "vision_config"),
        (
            {"model_type": "llava", "vision_config": {"model_type": "toy"}},
            "toy",
            "vision_config",
        ),
        (
            {"thinker_config": {"vision_config": {"model_type": "toy"}}},
            "toy",
            "thinker_config.vision_config",
        ),
        ({"vlm_config": {"model_type": "a", "vision_config": {}}}, "a", "vlm_config.vision_config"),
        ({"backbone_config": {"model_type": "dinov2"}}, "dinov2", "backbone_config"),
        ({"vision_config": "none"}, None, ""),
    ],
)
def test_where_a_towers_config_is(config: dict[str, object], kind: str | None, where: str) -> None:
    assert tower_config(config)[1:] == (kind, where)


@pytest.mark.parametrize(
    ("before", "prefix"),
    [("", ""), ("toy.", "toy."), ("a.b.toy.", "a.b.toy."), ("module._orig_mod.x.", "x.")],
)
def test_detect_finds_the_prefix(before: str, prefix: str) -> None:
    names = tensors(*BLOCK, before=before) | tensors("other.layers.0.weight")
    configs = {"config.json": {"model_type": "toy"}}
    tower = detect(lazy(names), [TOY], configs, {}, "file")
    assert tower.prefix == prefix and set(BLOCK) <= set(tower.spelled)
    with pytest.raises(VitcliError, match="an other checkpoint whose tower"):
        detect(lazy(names), [TOY], {"config.json": {"model_type": "other"}}, {}, "file")


def test_settle_says_who_decided_and_asks_for_the_rest() -> None:
    given = lazy(tensors(*BLOCK, "extra"))
    match = assign(given, TOY, "", {name: name for name in given})
    shapes = {"front_end.projection.weight": (16, 3, 8, 8), "vit.norm.weight": (16,)}
    with pytest.raises(
        VitcliError,
        match="neither the tensors nor a config give heads, norm_eps, activation, pooling",
    ):
        resolve_settings(match, shapes, None, None, [])
    chosen = ("heads=2", "norm_eps=1e-5", "activation=gelu", "pooling=mean", "mlp_hidden=8")
    given_settings = [parse_setting(f"encoder.{text}") for text in chosen]
    given_settings += [parse_setting("encoder.position=none"), parse_setting("encoder.depth=1")]
    with pytest.raises(VitcliError, match=r"encoder\.depth=1 says depth = 1, the tensors say 0"):
        resolve_settings(match, shapes, None, None, given_settings)


def test_parts_beside_the_tower_are_counted_by_what_they_are() -> None:
    names = [f"model.language_model.layers.{i}.w" for i in range(3)]
    names += ["lm_head.weight", "model.layers.0.mlp.w", "mtp.x", "score.weight"]
    names += ["model.multi_modal_projector.w", "audio_tower.layers.0.w"]
    assert summary(names) == (
        "language model: 7 tensors, not read",
        "multi_modal_projector: 1 tensor, not read",
        "audio_tower: 1 tensor, not read",
    )


def test_a_plan_of_a_published_shape_reads_headers_alone(tmp_path: Path) -> None:
    """CLIP-L/14-336 in LLaVA, as a sparse file: a header and a hole."""
    vision = {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    }
    config = {"model_type": "llava", "vision_config": vision, "vision_feature_layer": -2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    import transformers as T

    with torch.device("meta"):
        model = T.CLIPVisionModel(T.CLIPVisionConfig(**vision))
    header, at = {}, 0
    for name, tensor in model.state_dict().items():
        name = f"vision_tower.vision_model.{name.removeprefix('vision_model.')}"
        end = at + 2 * tensor.numel()
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    plan = plan_weights(str(tmp_path))
    assert (plan.config.encoder.heads, plan.config.encoder.activation) == (16, "quick_gelu")
    assert plan.config.encoder.image_size == (336, 336)
    assert sum(t.numel() for t in plan.encoder.state_dict().values()) == 303_507_456
    assert (
        "the language model reads layer -2 (vision_feature_layer)"
        in plan.report(torch.float32).notes
    )
