"""The towers of today's vision-language models give their library's numbers, at three sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers as T
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import nn
from transformers.models.gemma4.configuration_gemma4 import Gemma4VisionConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6VisionConfig
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6VisionModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.tipsv2.modeling_tipsv2 import Tipsv2VisionModel
from typer.testing import CliRunner

from tests.checkpoints.parity import timm_models
from tests.checkpoints.parity.compare import (
    Outputs,
    assert_close,
    differences,
    images,
    ours,
    randomized,
)
from tests.checkpoints.parity.hf import SMALL, qwen_outputs
from tests.checkpoints.parity.originals import moonvit
from tests.checkpoints.parity.towers import TOWERS, radio
from tests.checkpoints.sources import PUBLISHED, edited, reconfigured, sparse
from vitcli.build import build_meta
from vitcli.checkpoints.tower import COMPUTED_OTHERWISE
from vitcli.checkpoints.weights import load_weights, plan_weights
from vitcli.cli import app
from vitcli.commands.compare.verify import verify
from vitcli.commands.encode.analysis import encode
from vitcli.config.schema import EncoderConfig
from vitcli.config.settings import Setting
from vitcli.config.yaml import dotted
from vitcli.engines.reference import LibraryEncoder, open_reference
from vitcli.errors import VitcliError
from vitcli.loading import load

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", TOWERS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    case = TOWERS[name]
    model = randomized(case.make())
    model.save_pretrained(tmp_path)
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    assert loaded.report.family == case.family
    for size in case.sizes:
        pixels = images(*size)
        with torch.no_grad():
            theirs = case.outputs(model, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)
    # What LLaVA and its like read: the layer before the last, as the library counts them.
    layer = theirs.blocks[-2]
    kept = load(tmp_path, dtype="float64").features(pixels, layers=[-2]).layers[-2]
    patches = kept.patches.flatten(1, 2)
    assert_close(Outputs(tokens=layer[:, -patches.shape[1] :]), Outputs(tokens=patches), 1e-5)
    assert kept.cls is None or torch.allclose(kept.cls, layer[:, 0], rtol=1e-5, atol=1e-5)


# In memory TIPS v2 has DINOv2's names and RADIO its own; the tables have those of the files.
RENAMED = ("tipsv2", "radio")


@pytest.mark.parametrize(
    "name", [n for n in TOWERS if "whole" not in n and not n.startswith(RENAMED)]
)
def test_a_bare_state_dict_needs_no_more_than_a_preset(name: str, tmp_path: Path) -> None:
    model = randomized(TOWERS[name].make())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    known = load_weights(str(tmp_path)).config
    (tmp_path / "config.json").unlink()
    loaded = load_weights(str(tmp_path), preset=known)
    # Without a config the names of Idefics are SigLIP's; the preset says how they differ.
    wanted = "hf-siglip" if name.startswith("idefics") else TOWERS[name].family
    assert loaded.report.family == wanted
    assert loaded.config.encoder == known.encoder


QWEN3_KEYS = {
    "image_size": 768,
    "patch_size": 16,
    "hidden": 1152,
    "depth": 27,
    "heads": 16,
    "mlp_hidden": 4304,
    "head_out": 4096,
    "activation": "gelu_tanh",
    "position": "learned+rope2d",
    "rope.theta": 10000.0,
    "norm_eps": 1e-6,
}
DEEPSTACK = QWEN3_KEYS | {"deepstack": [9, 17, 25]}
PUBLISHED_TOWERS: dict[str, tuple[Callable[[Any], nn.Module], str, dict[str, Any]]] = {
    "Qwen-Qwen3.5-9B": (
        lambda c: Qwen3_5VisionModel(T.Qwen3_5Config(**c).vision_config),
        "model.visual.",
        QWEN3_KEYS | {"deepstack": []},
    ),
    "community-Qwen3-VL-Embedding": (
        lambda c: T.Qwen3VLVisionModel(T.Qwen3VLConfig(**c).vision_config),
        "visual.",
        DEEPSTACK,
    ),
    "timm-vit_pe_core_base_patch16_224.fb": (
        lambda c: timm.create_model(c["architecture"], num_classes=c["num_classes"]),
        "",
        {
            "image_size": 224,
            "heads": 12,
            "norm_eps": 1e-5,
            "position": "learned+rope2d",
            "rope.offset": 1.0,
            "rope.first_axis": "columns",
            "rope.reference_grid": 14,
            "pooling": "map",
            "pool_heads": 8,
            "pool_prefix": True,
            "head_out": 1024,
        },
    ),
    "community-nvidia-reason2": (
        lambda c: T.Qwen3VLVisionModel(T.Qwen3VLConfig(**c).vision_config),
        "model.visual.",
        DEEPSTACK,
    ),
}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published configs beside the project")
@pytest.mark.parametrize("name", PUBLISHED_TOWERS)
def test_published_configs_are_read_as_the_library_reads_them(name: str, tmp_path: Path) -> None:
    make, prefix, expected = PUBLISHED_TOWERS[name]
    for file in (PUBLISHED / name).glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    with torch.device("meta"):
        model = make(json.loads((tmp_path / "config.json").read_text()))
    plan = plan_weights(str(sparse(tmp_path, model, prefix)))
    told = dotted(plan.config.encoder.model_dump(mode="python"))
    assert {key: told[key] for key in expected} == expected
    assert not prefix or f"vision tower under {prefix}" in plan.notes


SMART = {"patch_size": 8, "merge_size": 2, "min_pixels": 32 * 32, "max_pixels": 96 * 96}
SIDE = {"height": 40, "width": 40}
EDGES = {"shortest_edge": 24, "longest_edge": 64}
TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
WITHIN = {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}}
CROP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
GLM = {"patch_size": 8, "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 96 * 96}}
VERIFIED: dict[str, tuple[str, dict[str, Any]]] = {
    "pixtral": ("PixtralImageProcessorPil", WITHIN),
    "mistral 3 whole": ("PixtralImageProcessorPil", WITHIN),
    "aimv2 at 32": ("CLIPImageProcessorPil", CROP),
    "tipsv2 whole": ("Tipsv2ImageProcessor", {"size": SIDE}),
    "radio": ("CLIPImageProcessorPil", CROP | {"do_normalize": False}),
    "glm4v whole": ("Glm4vImageProcessorPil", GLM),
    "qwen3-vl": ("Qwen2VLImageProcessorPil", SMART),
    "qwen3-vl whole": ("Qwen2VLImageProcessorPil", SMART),
    "idefics2 whole": ("Idefics2ImageProcessorPil", {"size": EDGES, "do_image_splitting": True}),
    "idefics3 whole": ("Idefics3ImageProcessorPil", TILES),
    "smolvlm whole": ("SmolVLMImageProcessorPil", TILES),
    "beit classifier": ("BeitImageProcessorPil", {"size": SIDE, "do_center_crop": False}),
    "beit CLS": ("BeitImageProcessorPil", {"size": SIDE, "do_center_crop": False}),
    "data2vec": ("BeitImageProcessorPil", {"size": SIDE, "do_center_crop": False}),
    "perception_lm whole": ("PerceptionLMImageProcessor", {"tile_size": 32, "max_num_tiles": 2}),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_proves_it(name: str, tmp_path: Path) -> None:
    processor, settings = VERIFIED[name]
    randomized(TOWERS[name].make()).float().save_pretrained(tmp_path)
    getattr(T, processor)(**settings).save_pretrained(tmp_path)
    result = verify(str(tmp_path), dtype="float64")
    assert result.equal, (result.verdict, result.checked)
    names = {one.name for one in result.checked}
    assert {"pixels", "layer 0", "layer 2"} <= names and {"tokens", "output"} & names
    assert ("deepstack" in names) == name.startswith("qwen3-vl")


def test_qwen3_omnis_tower_within_its_thinker(tmp_path: Path) -> None:
    """The whole model keeps its vision config within the thinker's, and a talker beside it."""
    case = TOWERS["qwen3-omni"]
    model = randomized(case.make())
    tensors = {f"thinker.visual.{name}": t.clone() for name, t in model.state_dict().items()}
    tensors["talker.model.layers.0.mlp.gate.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    inner = {"model_type": "qwen3_omni_moe_thinker", "vision_config": model.config.to_dict()}
    config = {"model_type": "qwen3_omni_moe", "thinker_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    assert "vision tower under thinker.visual." in loaded.report.notes
    assert loaded.config.encoder.deepstack == (1, 2)
    pixels = images(*case.sizes[2])
    with torch.no_grad():
        theirs = case.outputs(model, pixels)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


@pytest.fixture
def qwen3_vl(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A tiny Qwen3-VL on disk, with its processor."""
    model = randomized(TOWERS["qwen3-vl"].make()).float()
    model.save_pretrained(tmp_path)
    T.Qwen2VLImageProcessorPil(**SMART).save_pretrained(tmp_path)
    return tmp_path, model


def test_encode_and_embed_give_deepstack(qwen3_vl: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """(images, mergers, cells, width), for pictures that are not square and for folders."""
    folder, model = qwen3_vl
    photos = tmp_path / "photos"
    photos.mkdir()
    picture = np.random.default_rng(0).integers(0, 256, (48, 96, 3), np.uint8)
    Image.fromarray(picture).save(photos / "a.png")
    loaded = load(folder)
    pixels = loaded.transform(picture)
    assert pixels.shape == (1, 3, 48, 96)
    with torch.no_grad():
        wanted = qwen_outputs(model, pixels).deepstack
    assert wanted is not None and wanted.shape == (1, 2, 3 * 6, 24)
    tolerance = {"rtol": 1e-4, "atol": 1e-4 * float(wanted.abs().max())}
    found = loaded.features(picture).deepstack
    assert found is not None and torch.allclose(found, wanted, **tolerance)
    _, vectors = encode(loaded, picture, ["deepstack"])
    assert np.allclose(vectors["deepstack"], wanted, **tolerance)

    run = ["embed", str(photos), "--weights", str(folder), "--tokens", "deepstack"]
    run += ["--out", str(tmp_path / "vectors"), "--format", "safetensors"]
    refused = CliRunner().invoke(app, run)
    assert refused.exit_code == 2 and "--image-size" in refused.stderr
    done = CliRunner().invoke(app, [*run, "--image-size", "48x96"])
    assert done.exit_code == 0, done.output
    (part,) = (tmp_path / "vectors").glob("*.safetensors")
    assert np.allclose(load_file(part)["vector"], wanted, **tolerance)


def test_deepstack_is_only_where_it_is_said(
    qwen3_vl: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    """Another encoder has none; tensors without their blocks' numbers, or the other way round."""
    with pytest.raises(VitcliError, match=r"deepstack: .* does not have such tokens"):
        encode("vit-ti16", tokens=["deepstack"])
    folder, _ = qwen3_vl
    with pytest.raises(VitcliError, match=r"unexpected: deepstack_merger_list\.1"):
        load_weights(str(reconfigured(folder, deepstack_visual_indexes=[0])), dtype=torch.float64)
    with pytest.raises(VitcliError, match="count from 1 to 3, in order"):
        load_weights(str(reconfigured(folder, deepstack_visual_indexes=[1, 0])))
    reconfigured(folder, deepstack_visual_indexes=[0, 1])
    none = Setting(("encoder", "head"), "none", "--set encoder.head=none")
    assert load_weights(str(folder), overrides=[none]).config.encoder.deepstack == ()
    known = load_weights(str(folder)).config
    (folder / "config.json").unlink()
    without = known.encoder.model_copy(update={"deepstack": ()})
    with pytest.raises(VitcliError, match="deepstack"):
        load_weights(str(folder), preset=known.model_copy(update={"encoder": without}))
    edited(folder, lambda t: [t.pop(name) for name in [*t] if "merger_list.1" in name])
    with pytest.raises(VitcliError, match=r"missing: deepstack\.1"):
        load_weights(str(folder), preset=known)


def test_verify_proves_timms_perception_encoder(tmp_path: Path) -> None:
    case = timm_models.Case("timm-pe", "vit_pe_core_base_patch16_224")
    sizes = {"embed_dim": 32, "ref_feat_shape": (4, 4)}
    model: Any = randomized(case.make(**sizes)).float()
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32)}
    arguments = timm_models.SMALL | sizes
    save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
    result = verify(str(tmp_path), dtype="float64")
    assert result.equal, (result.verdict, result.checked)
    assert {"pixels", "layer 2", "tokens", "pooled", "output"} <= {c.name for c in result.checked}


def test_a_small_smolvlm_nests_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    """As SmolVLM-256M and 500M are published: depth and MLP width are the class's own."""
    section = {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "smolvlm_vision",
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
        "tie_word_embeddings": False,
        "use_base_siglip": False,
    }
    config = {"model_type": "smolvlm", "scale_factor": 4, "vision_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = T.SmolVLMVisionTransformer(T.SmolVLMConfig(vision_config=section).vision_config)
    plan = plan_weights(str(sparse(tmp_path, model, "model.vision_model.")))
    encoder = plan.config.encoder
    assert (encoder.image_size, encoder.depth, encoder.heads) == ((512, 512), 12, 12)
    assert encoder.position_table.resize == "buckets" and encoder.norm_eps == 1e-6
    counted = sum(p.numel() for p in plan.encoder.parameters())
    assert counted == sum(p.numel() for p in model.parameters()) == 86_433_024


# What the library's own defaults, which are the published sizes, are in our words.
SIZES: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {
    "tipsv2": (
        lambda: Tipsv2VisionModel(T.Tipsv2VisionConfig()),
        86_315_520,
        {"image_size": 448, "patch_size": 14, "registers": 1},
    ),
    "radio": (  # C-RADIOv4-H, whose files have no LayerScale
        lambda: T.RadioModel(T.RadioConfig()),
        651_645_440,
        {"image_size": 2048, "patch_size": 16, "hidden": 1280, "depth": 32, "heads": 16}
        | {"mlp_hidden": 5120, "registers": 9, "layer_scale": None},
    ),
    "kimi": (  # Kimi K2.5
        lambda: Kimi_K25VisionModel(T.Kimi_K25VisionConfig()),
        416_866_032,
        {"image_size": 896, "patch_size": 14, "hidden": 1152, "depth": 27, "heads": 16}
        | {"mlp_hidden": 4304},
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_at_the_published_size_are_the_librarys(name: str, tmp_path: Path) -> None:
    make, count, sizes = SIZES[name]
    TOWERS[name].make().save_pretrained(tmp_path)
    tiny = load_weights(str(tmp_path)).config
    base = {"hidden": 768, "depth": 12, "heads": 12, "mlp_hidden": 3072}
    encoder = EncoderConfig.model_validate({**tiny.encoder.model_dump(), **base, **sizes})
    with torch.device("meta"):
        theirs = make().named_parameters()
    beside = ("mask_token", "layer_scale") if encoder.layer_scale is None else ("mask_token",)
    assert sum(p.numel() for n, p in theirs if not any(word in n for word in beside)) == count
    assert sum(p.numel() for p in build_meta(encoder).parameters()) == count


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_shared_relative_position_bias": True}, "use_shared_relative_position_bias"),
        ({"use_relative_position_bias": True, "image_size": (32, 48)}, "square"),
        (
            {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
            "position",
        ),
    ],
)
def test_what_of_beit_is_computed_otherwise_is_refused(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    T.BeitModel(T.BeitConfig(**(SMALL | settings))).save_pretrained(tmp_path)
    with pytest.raises(VitcliError, match=told):
        load_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: T.SamVisionModel(T.SamVisionConfig(**SMALL)), "sam_vision_model.*zeros"),
        (
            lambda: T.VJEPA2Model(
                T.VJEPA2Config(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
            ),
            "vjepa2.*frame, row and column",
        ),
    ],
    ids=["sam", "vjepa2"],
)
def test_a_tower_that_is_computed_otherwise_is_refused_by_what_it_is(
    make: Callable[[], Any], told: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(VitcliError, match=told) as refused:
        load_weights(str(tmp_path))
    assert "--engine reference" in refused.value.hint


@pytest.mark.parametrize("kind", ["gemma4_vision", "minicpmv4_6_vision"])
def test_towers_of_whole_models_are_refused_by_what_they_are(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind.removesuffix("_vision"), "vision_config": {"model_type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {"model.vision_tower.layers.0.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(VitcliError, match=COMPUTED_OTHERWISE[kind]) as refused:
        load_weights(str(tmp_path))
    assert "--engine reference" in refused.value.hint


MISTAKES: dict[str, list[tuple[str, Any]]] = {
    "pixtral": [
        ("rope.alternate", False),
        ("rope.theta", 9000.0),
        ("rope.layout", "interleaved"),
        ("rope.first_axis", "columns"),
        ("norm_eps", 1e-6),
        ("activation", "gelu"),
    ],
    "glm4v": [
        ("rope.theta", 100.0),
        ("rope.layout", "interleaved"),
        ("position", "learned"),
        ("position_table.resize", "bilinear"),
        ("norm_eps", 1e-6),
        ("activation", "gelu"),
    ],
    "llama4 at 48": [
        ("rope.offset", 0.0),
        ("rope.first_axis", "rows"),
        ("rope.layout", "half"),
        ("rope.theta", 100.0),
        ("position", "learned"),
        ("norm_eps", 1e-6),
        ("activation", "gelu_tanh"),
    ],
    "aimv2 at 48": [("norm_eps", 1e-6), ("activation", "gelu"), ("heads", 4), ("pool_heads", 4)],
    "qwen3-vl": [
        ("rope.theta", 9000.0),
        ("rope.layout", "interleaved"),
        ("position", "learned"),
        ("position_table.resize", "bilinear"),
        ("norm_eps", 1e-5),
        ("activation", "gelu"),
        ("deepstack", [1, 3]),
    ],
    "tipsv2": [
        ("position_table.resize", "bicubic_antialias"),
        ("norm_eps", 1e-5),
        ("activation", "gelu_tanh"),
        ("pooling", "mean"),
    ],
    "radio of one CLS": [
        ("position_table.resize", "bilinear"),
        ("norm_eps", 1e-5),
        ("activation", "gelu_tanh"),
        ("pooling", "mean"),
    ],
    "kimi whole": [
        ("rope.in_turns", False),
        ("rope.theta", 9000.0),
        ("rope.layout", "half"),
        ("rope.first_axis", "rows"),
        ("position", "learned"),
        ("position_table.resize", "bilinear"),
        ("norm_eps", 1e-3),
        ("activation", "gelu"),
    ],
    "idefics3": [("position_table.resize", "bicubic"), ("norm_eps", 1e-5)],
    "beit classifier": [
        ("position_table.resize", "bilinear_align_corners"),
        ("position", "none"),
        ("norm_eps", 1e-6),
        ("pooling", "cls"),
    ],
    "perception_lm whole": [
        ("rope.theta", 9000.0),
        ("rope.offset", 0.0),
        ("rope.first_axis", "rows"),
        ("rope.layout", "half"),
        ("rope.reference_grid", [5, 5]),
        ("position_table.resize", "bicubic"),
    ],
}


@pytest.mark.parametrize(
    ("name", "key", "wrong"), [(name, *one) for name, many in MISTAKES.items() for one in many]
)
def test_a_mistake_in_a_setting_is_seen(name: str, key: str, wrong: Any, tmp_path: Path) -> None:
    case = TOWERS[name]
    model = randomized(case.make())
    model.save_pretrained(tmp_path)
    pixels = images(*case.sizes[-1])
    with torch.no_grad():
        theirs = case.outputs(model, pixels)
    setting = Setting(("encoder", *key.split(".")), wrong, f"--set encoder.{key}")
    loaded = load_weights(str(tmp_path), overrides=[setting], dtype=torch.float64)
    apart = max(differences(theirs, ours(loaded.encoder, pixels)).values())
    assert apart > 10 * case.tolerance


def test_radio_as_its_own_code_configures_it(tmp_path: Path) -> None:
    """No model_type; heads follow from the name of timm's ViT, all else is a training run's."""
    args = {
        "model": "vit_small_patch16_224",
        "cpe_max_size": 32,
        "register_multiple": 5,
        "cls_token_per_teacher": True,
        "teachers": [{"name": "clip"}, {"name": "sam", "use_summary": False}],
        "lr": 0.001,
    }
    made = T.RadioConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        patch_size=8,
        max_img_size=32,
        num_cls_tokens=2,
        num_registers=3,
        summary_idxs=[0],
    )
    model = randomized(T.RadioModel(made))
    model.save_pretrained(tmp_path)
    config = {"args": args, "patch_size": 8, "max_resolution": 32, "vitdet_window_size": None}
    config |= {"auto_map": {"AutoModel": "hf_model.RADIOModel"}, "version": "radio_v2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    for size in ((32, 32), (40, 40), (48, 24)):
        pixels = images(*size)
        with torch.no_grad():
            theirs = radio(model, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), 1e-6)
    for changes in ({"vitdet_window_size": 4}, {"args": args | {"model": "eradio"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(VitcliError, match=r"vitdet_window_size|eradio"):
            load_weights(str(tmp_path))


KIMI_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
KIMI_SIZES |= {"hidden_size": 16}
KIMIS_OWN: dict[str, dict[str, Any]] = {
    "moonvit": {
        "model_type": "kimi_vl",
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": 8,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
            "merge_kernel_size": [2, 2],
            **KIMI_SIZES,
        },
    },
    "K2.5": {
        "model_type": "kimi_k25",
        "vision_config": {
            "patch_size": 8,
            "init_pos_emb_height": 4,
            "init_pos_emb_width": 4,
            "init_pos_emb_time": 4,
            "pos_emb_type": "divided_fixed",
            "video_attn_type": "spatial_temporal",
            "merge_type": "sd2_tpool",
            "merge_kernel_size": [2, 2],
            "mm_projector_type": "patchmerger",
            "mm_hidden_size": 16,
            "projector_ln_eps": 1e-5,
            "text_hidden_size": 32,
            **{f"vt_{key}": value for key, value in KIMI_SIZES.items()},
        },
    },
}


@pytest.mark.parametrize("name", KIMIS_OWN)
def test_kimi_as_its_own_code_stores_it(name: str, tmp_path: Path) -> None:
    """q, k and v in one, each head's pairs next to each other, where the library has halves."""
    model = randomized(TOWERS["kimi"].make())
    tensors = {f"vision_tower.{key}": tensor for key, tensor in moonvit(model).items()}
    tensors["language_model.model.norm.weight"] = torch.ones(4)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(KIMIS_OWN[name]))
    pixels_file = {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 400,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "in_patch_limit_each_frame": 4096,
        "sample_fps": 2.0,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    file = {"auto_map": {}, "media_proc_cfg": pixels_file}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    assert loaded.report.family == "hf-kimi"
    prepared = loaded.config.preprocess
    assert (prepared.resize, prepared.max_patches, prepared.fill) == ("shrink", 400, 28)
    for size in TOWERS["kimi"].sizes:
        pixels = images(*size)
        with torch.no_grad():
            theirs = TOWERS["kimi"].outputs(model, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), TOWERS["kimi"].tolerance)


def _gemma4() -> tuple[nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    """Patches (row, column, channel) and their (x, y), as its processor gives them."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 8}

    def call(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        found = []
        for image in pixels:
            channels, height, width = image.shape
            p = image.reshape(channels, height // 8, 8, width // 8, 8).permute(1, 3, 2, 4, 0)
            x, y = torch.meshgrid(
                torch.arange(width // 8), torch.arange(height // 8), indexing="xy"
            )
            at = torch.stack([x, y], dim=-1).reshape(1, -1, 2)
            found.append(model(p.reshape(1, -1, 8 * 8 * 3), at).last_hidden_state)
        return torch.stack(found)

    return Gemma4VisionModel(Gemma4VisionConfig(**sizes)), call


def _minicpm() -> tuple[nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    """Image by image, its patches from left to right in one row."""
    config = MiniCPMV4_6VisionConfig(**SMALL, insert_layer_id=0)

    def call(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        found = []
        for image in pixels:
            grid = torch.tensor([[side // 8 for side in image.shape[1:]]], dtype=torch.int32)
            strips = [row for band in image.split(8, dim=1) for row in band.split(8, dim=2)]
            found.append(model(torch.cat(strips, dim=2)[None], grid).last_hidden_state[0])
        return torch.stack(found)

    return MiniCPMV4_6VisionModel(config), call


def _vjepa2() -> tuple[nn.Module, Callable[[nn.Module, torch.Tensor], torch.Tensor]]:
    sizes = {"patch_size": 8, "crop_size": 48, "frames_per_clip": 2, "hidden_size": 24}
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2, "pred_hidden_size": 24}
    sizes |= {"pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}

    def call(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        twice = pixels[:, None].expand(-1, 2, -1, -1, -1)  # a frame for each of its two
        return model(twice, skip_predictor=True).last_hidden_state

    return T.VJEPA2Model(T.VJEPA2Config(**sizes)), call


@pytest.mark.parametrize("make", [_gemma4, _minicpm, _vjepa2])
def test_what_is_refused_runs_by_its_own_library(make: Callable[[], Any], tmp_path: Path) -> None:
    """The hint of the refusal, and the tokens of a batch beside direct calls."""
    model, call = make()
    model = randomized(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(VitcliError, match="is not supported: ") as caught:
        plan_weights(str(tmp_path))
    assert "--engine reference" in caught.value.hint
    pixels = images(48, 48)
    backbone = open_reference(str(tmp_path), dtype=torch.float64)
    with torch.no_grad():
        theirs = call(model, pixels)
        found = backbone.run(pixels)
    assert found.tokens is not None
    assert_close(Outputs(tokens=theirs), Outputs(tokens=found.tokens), 1e-6)
    encoder = LibraryEncoder(open_reference(str(tmp_path)), (48, 48))
    assert encoder(pixels.float()).pooled.shape == (2, theirs.shape[-1])
