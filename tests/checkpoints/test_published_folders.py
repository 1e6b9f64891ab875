"""Every published config: loads over a sparse file of the library's shapes, or says what it is."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import transformers as T
from timm.models._hub import load_model_config_from_path
from timm.models._pretrained import PretrainedCfg
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from tests.checkpoints.parity.originals import internvit, moonvit
from tests.checkpoints.sources import PUBLISHED, sparse
from vitcli.checkpoints.weights import plan_weights
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIGS = ("config.json", "open_clip_config.json")
FOLDERS = sorted({file.parent.name for name in CONFIGS for file in PUBLISHED.glob(f"*/{name}")})

REFUSED = {
    "AXERA-gemma-4-E2B-it": "a gemma4 checkpoint whose tower (vision_config gemma4_vision, ",
    "THUDM-open_clip_pix2struct": "no supported family matches",
    "alibaba-Logics-Thinking-8B": "a logics checkpoint whose tower (model_type logics, ",
    "bifold-pathomics-MultiScale_Models": "num_reg_tokens = 4",
    "community-Andes_VL": "an andesvl-aimv2-qwen3 checkpoint whose tower (vision_config aimv2, ",
    "community-LocateAnything-3B": "image_processor_type: 'LocateAnythingImageProcessor'",
    "community-MiniCPM-V-2": "a minicpmv checkpoint whose tower (model_type minicpmv, ",
    "community-Molmo7B_D_NF4Quant": "a molmo checkpoint whose tower (model_type molmo, ",
    "community-Unlimited-OCR-NPU": "an unlimited-ocr checkpoint whose tower (vision_config vision",
    "community-dinov2-base": "a vit checkpoint whose tower (model_type vit, ",
    "community-sam-vit-huge": "a sam checkpoint whose tower (vision_config sam, ",
    "community-vit_base_patch16_224_in21k_ft_cifar100": "no supported family matches",
    "community-vlm-siglip": "settings that are not known in hf-siglip: resize_global",
    "community-ye-DeepSeek-OCR2": "a deepseek_vl_v2 checkpoint whose tower (vision_config vision",
    "inclusionAI-Ming-omni": "a bailingmm checkpoint whose tower (vision_config qwen2_5_vit, ",
    "laion-mscoco_finetuned_CoCa-ViT-L-14": "no supported family matches",
    "nvidia-Eagle-Block2A-2B-v2": "an eagle_3_vl checkpoint whose tower (vision_config siglip2_v",
}
"""What the message holds. Where no library builds the model by its own code, its tensors are made
up: what is said follows from the config."""
HAND_MADE = {
    "THUDM-open_clip_pix2struct",
    "community-dinov2-base",
    "community-vit_base_patch16_224_in21k_ft_cifar100",
    "laion-mscoco_finetuned_CoCa-ViT-L-14",
}
"""Configs that the library they name refuses too."""
MADE_UP = {
    "model.layers.0.mlp.up_proj.weight": torch.empty(4, 4, device="meta"),
    "vision_tower.layers.0.mlp.up_proj.weight": torch.empty(4, 4, device="meta"),
}
ACTIVATIONS = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "SiLU": "silu",
    "QuickGELU": "quick_gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "gelu": "gelu",
}
Told = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    file = PUBLISHED / name
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def of_open_clip(config: Told) -> tuple[dict[str, Tensor], Told]:
    model = config["model_cfg"]
    vision = dict(model["vision_cfg"])
    if named := vision.get("timm_model_name"):
        vision["timm_model_name"] = named.split(".")[0]
        vision["timm_model_pretrained"] = False
    tower = open_clip.model._build_vision_tower(
        model["embed_dim"], open_clip.model.CLIPVisionCfg(**vision), model.get("quick_gelu", False)
    )
    state = {f"visual.{key}": tensor for key, tensor in tower.state_dict().items()}
    if hasattr(tower, "trunk"):
        return state, timm_facts(tower.trunk)
    block = tower.transformer.resblocks[0]
    return state, {
        "heads": block.attn.num_heads,
        "norm_eps": block.ln_1.eps,
        "activation": ACTIVATIONS[type(block.mlp.gelu).__name__],
        "depth": len(tower.transformer.resblocks),
    }


def of_timm(folder: Path) -> tuple[dict[str, Tensor], Told]:
    told, architecture, arguments = load_model_config_from_path(folder)
    fields = {field.name for field in dataclasses.fields(PretrainedCfg)}
    told = {key: value for key, value in told.items() if key in fields}
    classes = told.get("num_classes", 1000)
    model = timm.create_model(
        architecture, pretrained_cfg=told, num_classes=classes, **(arguments or {})
    )
    return model.state_dict(), timm_facts(model)


def timm_facts(model: nn.Module) -> Told:
    block: Any = model.blocks[0]  # type: ignore[index]
    act = getattr(block.mlp, "act", None)
    return {
        "heads": block.attn.num_heads,
        "norm_eps": block.norm1.eps,
        **({"activation": ACTIVATIONS[type(act).__name__]} if act is not None else {}),
        "depth": len(model.blocks),  # type: ignore[arg-type]
    }


def of_transformers(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor], Told]:
    """The names and shapes that `save_pretrained` would write, and the tower's config."""
    kind, named = config["model_type"], (config.get("architectures") or [""])[0]
    if kind == "intern_vit_6b":
        return of_internvit(config)
    if kind == "locateanything":
        return of_moonvit(config["vision_config"])
    if config.get("num_register_tokens"):
        made = T.Dinov2WithRegistersConfig(**config)
        model = T.Dinov2WithRegistersModel(made)
    else:
        made = T.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        maker = getattr(T, named, None) or of_module(kind, named)
        whole = maker is None or "VisionTransformer" not in named
        inner = made if whole else made.vision_config
        model = maker(inner) if maker else T.AutoModel.from_config(made)
    tower = getattr(made, "vision_config", None) or getattr(made, "backbone_config", None) or made
    facts = {
        "heads": first(tower, "num_attention_heads", "num_heads"),
        "depth": first(tower, "num_hidden_layers", "depth"),
        "activation": ACTIVATIONS.get(getattr(tower, "hidden_act", "")),
        "norm_eps": getattr(tower, "layer_norm_eps", 1e-6),  # Qwen's is in its code
    }
    if getattr(tower, "use_swiglu_ffn", False):
        facts["activation"] = "silu"  # in DINOv2's code, whatever hidden_act says
    return revert_weight_conversion(model, model.state_dict()), facts


def of_module(kind: str, named: str) -> Any:
    """A class that transformers does not list at its top, such as Qwen's bare towers."""
    try:
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except ImportError:
        return None
    return getattr(module, named, None)


def first(config: Any, *keys: str) -> Any:
    return next(getattr(config, key) for key in keys if hasattr(config, key))


def of_internvit(config: dict[str, Any]) -> tuple[dict[str, Tensor], Told]:
    """The original's code is remote: transformers' own of the same tower, under its names."""
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    more = {key: config[key] for key in (*kept, "image_size", "patch_size")}
    more["norm_type"] = config.get("norm_type", "rms_norm")  # as the original's code
    model = T.InternVLVisionModel(
        T.InternVLVisionConfig(
            **more, attention_bias=config["qkv_bias"], use_qk_norm=config["qk_normalization"]
        )
    )
    facts = {
        "heads": config["num_attention_heads"],
        "depth": config["num_hidden_layers"],
        "activation": ACTIVATIONS[config["hidden_act"]],
        "norm_eps": config["layer_norm_eps"],
    }
    return internvit(model), facts


def of_moonvit(config: dict[str, Any]) -> tuple[dict[str, Tensor], Told]:
    """The original's code is remote: transformers' own of the same tower, under its names."""
    own = {key.replace("init_", ""): value for key, value in config.items()}
    model = Kimi_K25VisionModel(T.Kimi_K25VisionConfig(**own))
    return {f"vision_model.{key}": tensor for key, tensor in moonvit(model).items()}, {}


def built(name: str) -> tuple[dict[str, Tensor], Told]:
    folder, config = PUBLISHED / name, read(f"{name}/config.json")
    clip = read(f"{name}/open_clip_config.json") or (config if "model_cfg" in config else {})
    with torch.device("meta"):
        if clip:
            return of_open_clip(clip)
        if "architecture" in config:
            return of_timm(folder)
        return of_transformers(folder, config)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    T.logging.set_verbosity_error()
    yield


@pytest.mark.skipif(not FOLDERS, reason="the published configs are not beside the project")
@pytest.mark.parametrize("name", FOLDERS)
def test_every_published_config(name: str, tmp_path: Path) -> None:
    for file in (PUBLISHED / name).glob("*.json"):
        shutil.copy(file, tmp_path)
    if name in REFUSED:
        remote = "auto_map" in read(f"{name}/config.json") or name == "inclusionAI-Ming-omni"
        remote = remote and name != "community-LocateAnything-3B"
        state = MADE_UP if remote or name in HAND_MADE else built(name)[0]
        with pytest.raises(VitcliError) as caught:
            plan_weights(str(sparse(tmp_path, state)))
        assert REFUSED[name] in caught.value.message
        assert ("--engine reference" in caught.value.hint) == (name in BY_ITS_LIBRARY)
        return
    state, told = built(name)
    plan = plan_weights(str(sparse(tmp_path, state)))
    found = plan.config.encoder
    assert {key: getattr(found, key) for key in told} == told
    rows = {"vit.blocks.0.attention.qkv.weight": 3 * found.hidden}
    shapes = {key: part.try_shape() for key, part in plan.parts.items() if key in rows}
    assert {key: shape[0] for key, shape in shapes.items() if shape} == rows


BY_ITS_LIBRARY = {"AXERA-gemma-4-E2B-it", "community-sam-vit-huge"}
"""Those whose own library runs them without remote code."""
