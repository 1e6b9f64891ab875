"""Each timm family gives timm's own numbers, from its directories and from bare state dicts."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import GluMlp, SwiGLU
from timm.models import deit, eva, save_for_hf, vision_transformer

from tests.checkpoints.parity.compare import EXACT, assert_close, images, ours, randomized
from tests.checkpoints.parity.timm_models import CASES, outputs
from tests.checkpoints.sources import PUBLISHED, sparse
from vitcli.checkpoints.families.timm import architectures, from_timm
from vitcli.checkpoints.weights import load_weights, plan_weights
from vitcli.commands.params.analysis import model_costs
from vitcli.config.request import load_config, preset_names
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_equals_timm(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = randomized(case.make())
    save_for_hf(model, tmp_path, safe_serialization="both")
    loaded = load_weights(str(tmp_path / "model.safetensors"), dtype=torch.float64)
    assert loaded.report.family == case.family
    for size in case.sizes:
        pixels = images(*size)
        with torch.no_grad():
            theirs = outputs(model, pixels)
        turned = getattr(model, "rope", None) is not None  # in float32
        resized = size != case.sizes[0] or turned
        tolerance = case.tolerance if resized else EXACT
        assert_close(theirs, ours(loaded.encoder, pixels), tolerance)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("vit_base_patch16_siglip_224", ("heads", "norm_eps", "activation", "position")),
        (
            "vit_base_patch14_reg4_dinov2",
            ("heads", "norm_eps", "activation", "pooling", "position"),
        ),
    ],
)
def test_a_bare_state_dict_needs_what_tensors_do_not_tell(
    architecture: str, keys: tuple[str, ...], tmp_path: Path
) -> None:
    case = next(c for c in CASES.values() if c.architecture == architecture)
    model = randomized(case.make())
    file = tmp_path / "model.pt"
    torch.save(model.state_dict(), file)
    with pytest.raises(VitcliError) as error:
        load_weights(str(file))
    for key in keys:
        assert f"--set encoder.{key}=VALUE" in error.value.hint
    told = {
        "heads": 2,
        "norm_eps": 1e-6,
        "activation": "gelu",
        "pooling": "cls",
        "position": "learned",
    }
    settings = [Setting(("encoder", key), told[key], f"--set {key}") for key in keys]
    loaded = load_weights(str(file), overrides=settings, dtype=torch.float64)
    pixels = images(40, 40)
    with torch.no_grad():
        theirs = outputs(model, pixels)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


def test_a_bare_state_dict_with_a_preset(tmp_path: Path) -> None:
    """The preset gives heads, eps, activation, pooling and, said so, the preprocessing."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=12)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    preset = load_config(ModelConfig, "vit-ti16-timm")
    loaded = load_weights(str(tmp_path / "model.pt"), preset=preset)
    assert loaded.config.encoder.heads == 3
    assert loaded.config.encoder.position_table.resize == "bicubic_antialias"
    assert loaded.report.preprocess_by == "preset vit-ti16-timm"


def test_the_config_of_a_directory_brings_its_preprocessing(tmp_path: Path) -> None:
    case = CASES["vit_base_patch16_clip_224 dynamic_img_size"]
    save_for_hf(case.make(), tmp_path)
    loaded = load_weights(str(tmp_path))
    assert loaded.report.preprocess_by == "config.json"
    assert loaded.config.preprocess.crop_rounding == "round"


def test_an_architecture_that_is_built_otherwise_is_refused(tmp_path: Path) -> None:
    tiny = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    model = timm.create_model("eva02_enormous_patch14_clip_224", num_classes=0, **tiny)
    save_for_hf(model, tmp_path)
    with pytest.raises(VitcliError, match="eva02_enormous_patch14_clip_224"):
        load_weights(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(VitcliError, match=r"nor a config give .*norm_placement"):
        load_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "arguments", "why"),
    [
        ("vit_relpos_base_patch16_224", {}, "relative positions by an MLP"),
        ("vit_srelpos_small_patch16_224", {}, "relative positions by an MLP"),
        ("vit_relpos_small_patch16_rpn_224", {}, "norms of what is added to the sum"),
        ("eva02_enormous_patch14_clip_224", {}, "norms of what is added to the sum"),
        ("qwen3_vit_88m", {"img_size": 32}, "a classifier without the parameters of its norm"),
        ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}, "use_shared_rel_pos_bias"),
        ("beit_base_patch16_224", {"use_abs_pos_emb": True}, "use_abs_pos_emb"),
    ],
)
def test_what_timm_computes_otherwise_is_named(
    architecture: str, arguments: dict[str, Any], why: str, tmp_path: Path
) -> None:
    tiny = {"depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 0, **arguments}
    save_for_hf(timm.create_model(architecture, **tiny), tmp_path, model_args=tiny)
    with pytest.raises(VitcliError, match=why):
        load_weights(str(tmp_path))


EVA02 = {
    "timm-eva02_base_patch14_448.mim_in22k_ft_in22k": ((16, 16), "learned+rope2d", 12, "squash"),
    "timm-eva02_large_patch14_224.mim_in22k": ((16, 16), "learned+rope2d", 16, "shortest"),
    "timm-eva02_large_patch14_448.mim_in22k_ft_in1k": ((16, 16), "learned+rope2d", 16, "shortest"),
    "SmilingWolf-wd-eva02-large-tagger-v3": ((32, 32), "learned+rope2d", 16, "shortest"),
    "deepghs-idolsankaku-eva02-large-tagger-v1": ((48, 48), "rope2d", 16, "shortest"),
}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published configs beside the project")
@pytest.mark.parametrize("name", EVA02)
def test_published_eva_02(name: str, tmp_path: Path) -> None:
    """The real shapes over a sparse file; parameters are timm's own count."""
    config = json.loads((PUBLISHED / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = {"num_classes": config["num_classes"], **config.get("model_args", {})}
    with torch.device("meta"):
        model = timm.create_model(config["architecture"], **arguments)
    plan = plan_weights(str(sparse(tmp_path, model)))
    reference, position, heads, resize = EVA02[name]
    encoder = plan.config.encoder
    assert (encoder.rope.reference_grid, encoder.position) == (reference, position)
    assert (encoder.heads, encoder.activation, encoder.norm_eps) == (heads, "silu", 1e-6)
    assert (encoder.rope.theta, encoder.rope.layout) == (10000.0, "interleaved")
    assert plan.config.preprocess.resize == resize
    costs = model_costs(plan.config)
    assert costs.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("eva02-b14", "eva02_base_patch14_224"), ("eva02-l14-448", "eva02_large_patch14_448")],
)
def test_presets_of_eva_02_are_timms(name: str, architecture: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=0)
    cfg = timm.get_pretrained_cfg(architecture).to_dict()
    config = {"architecture": architecture, "num_classes": 0, "pretrained_cfg": cfg}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_weights(str(sparse(tmp_path, model)))
    preset = load_config(ModelConfig, name)
    assert plan.config.encoder == preset.encoder.model_copy(
        update={"position_table": plan.config.encoder.position_table}
    )
    assert plan.config.preprocess == preset.preprocess


def test_a_bare_eva_02_is_asked_for_its_rotations(tmp_path: Path) -> None:
    model = CASES["eva02_base_patch14_224 dynamic_img_size"].make()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(VitcliError) as error:
        load_weights(str(tmp_path / "model.pt"))
    for key in ("heads", "position", "rope.theta", "rope.layout", "rope.reference_grid"):
        assert f"--set encoder.{key}=VALUE" in error.value.hint


def test_norms_that_a_file_has_lost_are_missed(tmp_path: Path) -> None:
    model = CASES["eva02_base_patch16_clip_224 dynamic_img_size"].make()
    save_for_hf(model, tmp_path, safe_serialization=True)
    whole = load_file(tmp_path / "model.safetensors")
    for lost in ("mlp.norm", "attn.norm"):
        rest = {name: tensor for name, tensor in whole.items() if lost not in name}
        save_file(rest, tmp_path / "model.safetensors")
        with pytest.raises(VitcliError, match="_norm = True"):
            load_weights(str(tmp_path))


def _arguments(module: Any, cls: type, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What timm builds each architecture of a module with, none of them built."""
    built: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def remember(made: type, variant: str, pretrained: bool, **arguments: Any) -> None:
        if issubclass(made, cls):
            built[variant] = arguments
        raise Stop

    monkeypatch.setattr(module, "build_model_with_cfg", remember)
    for name in timm.list_models(module=module.__name__.rsplit(".", 1)[-1]):
        with pytest.raises(Stop):
            timm.create_model(name)
    return built


def _name(layer: Any) -> str:
    return "gelu" if layer is None else getattr(layer, "__name__", layer).lower()


def _gated(layer: Any) -> bool:
    """Whether a feed-forward that timm names is one of two halves, the gate first."""
    made = None if layer is None else layer(8, 16)
    return isinstance(made, SwiGLU) or (isinstance(made, GluMlp) and not made.gate_last)


def _eps(layer: Any) -> float:
    return layer.keywords["eps"] if isinstance(layer, partial) else 1e-6


def _default(cls: type, key: str) -> Any:
    return inspect.signature(cls).parameters[key].default


def test_the_table_of_vision_transformers_is_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = vision_transformer.VisionTransformer
    built = _arguments(vision_transformer, cls, monkeypatch) | _arguments(deit, cls, monkeypatch)
    for name, mine in architectures("vision_transformers").items():
        theirs = built[name]
        norm = theirs.get("embed_norm_layer")
        unbiased = {"proj_bias": False} if not theirs.get("proj_bias", True) else {}
        assert mine == {
            **unbiased,
            **({} if norm is None else {"patch_norm": True}),
            "num_heads": theirs.get("num_heads", _default(cls, "num_heads")),
            "act_layer": _name(theirs.get("act_layer")),
            "norm_eps": _eps(theirs.get("norm_layer")),
            "global_pool": theirs.get("global_pool", _default(cls, "global_pool")),
            "reg_tokens": theirs.get("reg_tokens", 0),
            "position": "learned" if theirs.get("pos_embed", "learn") == "learn" else "none",
            "mlp": "gated" if _gated(theirs.get("mlp_layer")) else "plain",
        }, name
        assert norm is None or _eps(norm) == mine["norm_eps"]
        assert not {"block_fn", "attn_layer", "scale_mlp_norm"} & set(theirs), name


def test_the_table_of_evas_is_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    built = _arguments(eva, eva.Eva, monkeypatch)
    for name, mine in architectures("evas").items():
        theirs = built[name]
        rope = theirs.get("use_rot_pos_emb", _default(eva.Eva, "use_rot_pos_emb"))
        expected = {
            "num_heads": theirs["num_heads"],
            "norm_eps": _eps(theirs.get("norm_layer")),
            "global_pool": theirs.get("global_pool", _default(eva.Eva, "global_pool")),
            "reg_tokens": theirs.get("num_reg_tokens", 0),
            "use_abs_pos_emb": theirs.get("use_abs_pos_emb", True),
            "use_rot_pos_emb": rope,
        }
        expected |= {k: theirs[k] for k in ("scale_mlp", "scale_attn_inner") if k in theirs}
        if rope:
            expected["class_token"] = theirs.get("class_token", True)
            expected["rope_type"] = theirs.get("rope_type", "cat")
            expected["rope_temperature"] = theirs.get("rope_temperature", 10000.0)
            half = theirs.get("rope_rotate_half", False)
            expected["rope_layout"] = "half" if half else "interleaved"
        if expected.get("rope_type") == "cat" and theirs.get("ref_feat_shape") is None:
            assert theirs["attn_type"] == "rope", name
            expected |= {"rope_type": "index", "rope_grid_indexing": theirs["rope_grid_indexing"]}
        if expected.get("rope_type") == "cat":
            expected["ref_feat_shape"] = list(theirs["ref_feat_shape"])
        if expected.get("rope_type") == "mixed":  # trained rotations, in timm's one layout
            del expected["rope_layout"]
            expected["rope_grid_indexing"] = theirs["rope_grid_indexing"]
        assert mine == expected, name
        others = {"qk_norm", "use_post_norm"}
        if expected.get("rope_type") not in ("index", "mixed"):
            others |= {"attn_type", "rope_grid_indexing"}
        assert not others & set(theirs)


def test_the_table_of_perception_encoders_is_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    built = _arguments(eva, eva.Eva, monkeypatch)
    encoders = architectures("perception_encoders")
    assert set(encoders) == {name for name in built if name.startswith("vit_pe_")}
    for name, mine in encoders.items():
        theirs = built[name]
        pool = theirs.get("global_pool", _default(eva.Eva, "global_pool"))
        expected = {
            "num_heads": theirs["num_heads"],
            "norm_eps": _eps(theirs["norm_layer"]),
            "global_pool": pool,
            "reg_tokens": 0,
            "class_token": theirs.get("class_token", True),
            "rope_type": "cat",
            "rope_temperature": _default(eva.Eva, "rope_temperature"),
            "rope_layout": "interleaved",
            "ref_feat_shape": list(theirs["ref_feat_shape"]),
            "rope_grid_offset": theirs.get("rope_grid_offset", 0.0),
            "rope_grid_indexing": theirs["rope_grid_indexing"],
        }
        if pool == "map":
            expected["attn_pool_num_heads"] = theirs["attn_pool_num_heads"]
        assert mine == expected, name
        assert theirs["attn_type"] == "rope" and theirs["use_rot_pos_emb"], name
        others = {"scale_mlp", "qk_norm", "rope_type", "swiglu_mlp", "rope_rotate_half"}
        assert not others & set(theirs), name


TIMM_PRESETS = {
    "vit-ti16": "vit_tiny_patch16_224",
    "vit-s16": "vit_small_patch16_224",
    "vit-s32": "vit_small_patch32_224",
    "vit-b16": "vit_base_patch16_224",
    "vit-b32": "vit_base_patch32_224",
    "vit-l16": "vit_large_patch16_224",
    "vit-b16-384": "vit_base_patch16_384",
    "vit-l16-384": "vit_large_patch16_384",
    "siglip-b16-224": "vit_base_patch16_siglip_224",
    "siglip-b16-256": "vit_base_patch16_siglip_256",
    "siglip-b16-384": "vit_base_patch16_siglip_384",
    "siglip-b16-512": "vit_base_patch16_siglip_512",
    "siglip-l16-256": "vit_large_patch16_siglip_256",
    "siglip-l16-384": "vit_large_patch16_siglip_384",
    "siglip-so400m14-224": "vit_so400m_patch14_siglip_224",
    "siglip-so400m14-384": "vit_so400m_patch14_siglip_384",
    "dinov2-s14": "vit_small_patch14_dinov2",
    "dinov2-b14": "vit_base_patch14_dinov2",
    "dinov2-l14": "vit_large_patch14_dinov2",
    "dinov2-g14": "vit_giant_patch14_dinov2",
    "dinov2-s14-reg": "vit_small_patch14_reg4_dinov2",
    "dinov2-b14-reg": "vit_base_patch14_reg4_dinov2",
    "dinov2-l14-reg": "vit_large_patch14_reg4_dinov2",
    "dinov2-g14-reg": "vit_giant_patch14_reg4_dinov2",
}


PERCEPTION_PRESETS = {
    "pe-core-t16": "vit_pe_core_tiny_patch16_384",
    "pe-core-s16": "vit_pe_core_small_patch16_384",
    "pe-core-b16": "vit_pe_core_base_patch16_224",
    "pe-core-l14": "vit_pe_core_large_patch14_336",
    "pe-core-g14": "vit_pe_core_gigantic_patch14_448",
    "pe-lang-l14": "vit_pe_lang_large_patch14_448",
    "pe-lang-g14": "vit_pe_lang_gigantic_patch14_448",
    "pe-spatial-t16": "vit_pe_spatial_tiny_patch16_512",
    "pe-spatial-s16": "vit_pe_spatial_small_patch16_512",
    "pe-spatial-b16": "vit_pe_spatial_base_patch16_512",
    "pe-spatial-l14": "vit_pe_spatial_large_patch14_448",
    "pe-spatial-g14": "vit_pe_spatial_gigantic_patch14_448",
}


@pytest.mark.parametrize("name", PERCEPTION_PRESETS)
def test_presets_are_timms_perception_encoders(name: str, tmp_path: Path) -> None:
    """The directory that timm would write, its values a hole, reads as the preset."""
    architecture = PERCEPTION_PRESETS[name]
    theirs = timm.get_pretrained_cfg(architecture)
    with torch.device("meta"):
        model = timm.create_model(architecture, num_classes=theirs.num_classes)
    config = {"architecture": architecture, "pretrained_cfg": theirs.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config, default=list))
    plan = plan_weights(str(sparse(tmp_path, model)))
    preset = load_config(ModelConfig, name)
    read, wanted = (dotted(c.encoder.model_dump()) for c in (plan.config, preset))
    apart = {key for key in wanted if read.get(key) != wanted[key]}
    assert apart <= {"layer_scale", "position_table.prefix_rows", "final_norm"}, apart
    # What LayerScale began at leaves no trace; null stands for the rows of CLS and for the norm.
    assert plan.config.encoder.has_final_norm == preset.encoder.has_final_norm
    assert (read["layer_scale"] is None) == (wanted["layer_scale"] is None)
    assert plan.config.encoder.table_prefix_rows == preset.encoder.table_prefix_rows
    assert plan.config.preprocess == preset.preprocess


def test_every_timm_preset_is_compared() -> None:
    assert {f"{name}-timm" for name in TIMM_PRESETS} == {
        name for name in preset_names() if name.endswith("-timm")
    }


@pytest.mark.parametrize("name", TIMM_PRESETS)
def test_presets_are_what_timms_names_stand_for(name: str) -> None:
    architecture = TIMM_PRESETS[name]
    config = load_config(ModelConfig, f"{name}-timm")
    encoder, table = config.encoder, architectures("vision_transformers")[architecture]
    assert encoder.heads == table["num_heads"]
    assert encoder.activation == table["act_layer"]
    assert encoder.norm_eps == table["norm_eps"]
    assert encoder.pooling == {"token": "cls", "map": "map"}[table["global_pool"]]
    assert encoder.position_table.resize == "bicubic_antialias"
    theirs = timm.get_pretrained_cfg(architecture).to_dict()
    assert config.preprocess == from_timm(theirs)
    assert encoder.image_size == theirs["input_size"][1:]
