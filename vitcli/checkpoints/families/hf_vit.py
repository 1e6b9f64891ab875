"""ViT, DeiT, ViT-MAE, I-JEPA and BEiT as transformers stores them, and what its families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.family import (
    Family,
    Renames,
    To,
    Variant,
    block,
    flag,
    fused,
    no_key_bias,
    only,
    rows,
    side,
    size,
    table_resize,
    without,
)

LIBRARY = "transformers"
TINY = "tiny random models, from files and from state_dict"
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
IGNORED = (
    # what every PretrainedConfig holds
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path"),
    *("architectures", "attn_implementation", "auto_map", "chunk_size_feed_forward", "dtype"),
    *("finetuning_task", "id2label", "initializer_factor", "initializer_range", "label2id"),
    *("model_type", "num_labels", "output_attentions", "output_hidden_states", "problem_type"),
    *("return_dict", "tie_word_embeddings", "torch_dtype", "torchscript", "transformers_version"),
    *("use_bfloat16", "use_cache"),
    # what the language model and its processor read
    *("image_mean", "image_seq_length", "image_std", "num_image_tokens", "projector_hidden_act"),
    "vocab_size",
    # what transformers 4 wrote about text generation
    *("begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "diversity_penalty"),
    *("encoder_no_repeat_ngram_size", "eos_token_id", "length_penalty", "max_length", "min_length"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences"),
    *("pad_token_id", "prefix", "repetition_penalty", "sep_token_id", "suppress_tokens"),
    *("temperature", "tokenizer_class", "top_k", "top_p", "typical_p"),
    # active while training only
    *("attention_dropout", "attention_probs_dropout_prob", "drop_path_rate", "dropout"),
    *("hidden_dropout_prob", "projection_dropout"),
)
"""Keys that do not change what an encoder computes in eval mode."""
BACKBONE = (
    *("_out_features", "_out_indices", "apply_layernorm", "out_features", "out_indices"),
    *("reshape_hidden_states", "return_class_token", "stage_names"),
)
"""What the backbone classes for detection and segmentation read."""


def rope_theta(kind: str) -> Callable[[Mapping[str, Any]], float]:
    """Reads theta out of `rope_parameters` that have this type and say nothing else."""

    def read(value: Mapping[str, Any]) -> float:
        if value.get("rope_type") not in (kind, None) or set(value) - {"rope_type", "rope_theta"}:
            raise ValueError(f"{kind}, with rope_theta alone")
        return float(value["rope_theta"])

    return read


BIAS = {True: "qkv", False: "none"}
GATED = {True: "gated", False: "plain"}
SETTINGS = {
    "hidden_size": To("hidden"),
    "num_hidden_layers": To("depth", default=12),
    "num_attention_heads": To("heads", default=12),
    "image_size": To("image_size", size),
    "patch_size": To("patch_size", side),
    "num_channels": To("channels"),
    "hidden_act": To("activation", ACTIVATIONS, default="gelu"),
}
"""Keys of nearly every config."""
_KEYS = {
    **SETTINGS,
    "intermediate_size": To("mlp_hidden"),
    "layer_norm_eps": To("norm_eps", float),
    "rms_norm_eps": To("norm_eps", float),
    "qkv_bias": To("attention.qkv_bias", BIAS),
    "layerscale_value": To("layer_scale", float),
    "layer_scale_init_value": To("layer_scale", float),
    "use_swiglu_ffn": To("mlp", GATED),
    "num_register_tokens": To("registers"),
    "rope_theta": To("rope.theta", float),
    "rope_parameters": To("rope.theta", rope_theta("axial")),
}


def keys(*names: str, **defaults: Any) -> dict[str, To]:
    """Keys of a config, some with the library's value where a nested config leaves them out."""
    listed = {**dict.fromkeys(names), **defaults}
    return {key: replace(_KEYS[key], default=value) for key, value in listed.items()}


VIT_SETTINGS = {
    **SETTINGS,
    **keys("intermediate_size", "qkv_bias"),
    "layer_norm_eps": To("norm_eps", float, default=1e-12, by_type={"vit_msn": 1e-6}),
    "pooler_act": only("tanh"),
}
TABLE_IN_MODEL_DTYPE = table_resize("bicubic", "model")
"""How these models resize their table where `interpolate_pos_encoding` is asked for."""
TABLE_IN_FLOAT32 = table_resize("bicubic", "float32")
# transformers 5 has other names in memory than in its files; the tables use those of the files.
ALIASES = (
    (r"^layers\.(\d+)\.attention\.q_proj\.", r"encoder.layer.\1.attention.attention.query."),
    (r"^layers\.(\d+)\.attention\.k_proj\.", r"encoder.layer.\1.attention.attention.key."),
    (r"^layers\.(\d+)\.attention\.v_proj\.", r"encoder.layer.\1.attention.attention.value."),
    (r"^layers\.(\d+)\.attention\.o_proj\.", r"encoder.layer.\1.attention.output.dense."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.(\d+)\.", r"encoder.layer.\1."),
)
BLOCK = "encoder.layer.{i}."
QKV = tuple(f"attention.attention.{part}" for part in ("query", "key", "value"))
QUERY, KEY, VALUE = (BLOCK + part for part in QKV)
RENAMES: Renames = {
    "front_end.projection": "embeddings.patch_embeddings.projection",
    "front_end.position.table": rows("embeddings.position_embeddings"),
    **block(
        BLOCK,
        norm1="layernorm_before",
        qkv=QKV,
        proj="attention.output.dense",
        norm2="layernorm_after",
        fc1="intermediate.dense",
        fc2="output.dense",
    ),
    "vit.norm": "layernorm",
}
CLS: Renames = {"front_end.prefix.cls": rows("embeddings.cls_token")}
MASK_TOKEN = r"embeddings\.mask_token"
SIGNATURE = (BLOCK + "layernorm_before.weight", QUERY + ".weight")
CLASSIFIER = Variant(
    when=("classifier",),
    settings={"head": "linear"},
    renames={"head.linear": "classifier"},
    drops=(r"pooler\.dense\.(weight|bias)",),
)
POOLER = Variant(
    when=("pooler.dense",),
    unless=("classifier", "cls_classifier"),
    settings={"head": "tanh", "head_out": None},
    renames={"head.linear": "pooler.dense"},
)
VIT = Family(
    name="hf-vit",
    library=LIBRARY,
    verified=TINY,
    model_types=("vit", "vit_msn"),
    preprocess=processor("ViTImageProcessor"),
    signature=(*SIGNATURE, "embeddings.cls_token"),
    absent=("embeddings.distillation_token", "decoder.mask_token", BLOCK + "lambda_1"),
    distinguished_by=("position", "learned"),
    prefixes=("", "vit."),
    aliases=ALIASES,
    renames={**RENAMES, **CLS},
    # ViTForMaskedImageModeling brings a mask token and a decoder.
    drops=(MASK_TOKEN, r"decoder\.0\.(weight|bias)"),
    settings=VIT_SETTINGS,
    # intermediate_size counts; I-JEPA's converter writes mlp_ratio beside it.
    ignored=(*IGNORED, "encoder_stride", "mlp_ratio", "pooler_output_size"),
    decides={**TABLE_IN_MODEL_DTYPE, "pooling": "cls"},
    variants=(CLASSIFIER, POOLER),
)
DEIT = replace(
    VIT,
    name="hf-deit",
    model_types=("deit",),
    preprocess=processor("DeiTImageProcessor"),
    signature=(*VIT.signature, "embeddings.distillation_token"),
    absent=(),
    distinguished_by=None,
    prefixes=("", "deit."),
    renames={**VIT.renames, "front_end.prefix.dist": rows("embeddings.distillation_token")},
    variants=(
        CLASSIFIER,
        POOLER,
        Variant(
            when=("cls_classifier", "distillation_classifier"),
            settings={"head": "distilled"},
            renames={"head.cls": "cls_classifier", "head.dist": "distillation_classifier"},
        ),
    ),
)
MAE = replace(
    VIT,
    name="hf-mae",
    verified=TINY + "; without masking and shuffling",
    model_types=("vit_mae",),
    absent=("embeddings.distillation_token", "pooler.dense", "classifier", BLOCK + "lambda_1"),
    distinguished_by=("position", "sincos2d"),
    drops=(r"decoder\..*", MASK_TOKEN),
    ignored=(
        *IGNORED,
        *("decoder_hidden_size", "decoder_intermediate_size", "decoder_num_attention_heads"),
        *("decoder_num_hidden_layers", "mask_ratio", "norm_pix_loss"),
    ),
    decides={**TABLE_IN_MODEL_DTYPE, "position": "sincos2d", "pooling": "none"},
    variants=(),
)
IJEPA = replace(
    VIT,
    name="hf-ijepa",
    model_types=("ijepa",),
    signature=SIGNATURE,
    absent=("embeddings.cls_token",),
    distinguished_by=None,
    prefixes=("", "ijepa."),
    renames=RENAMES,
    drops=(MASK_TOKEN,),
    decides=MAE.decides,
    variants=(replace(CLASSIFIER, settings={"pooling": "mean", "head": "linear"}, drops=()),),
)


def _square(value: Any) -> tuple[int, int]:
    height, width = size(value)
    if height != width:  # the library swaps the axes of such a table
        raise ValueError("the table's own image must be square")
    return height, width


def _position(found: Mapping[str, Any]) -> str:
    kinds = {(True, False): "learned", (False, True): "relative2d", (False, False): "none"}
    return kinds[found["_absolute"], found["_relative"]]


def _resize(found: Mapping[str, Any]) -> str:
    return "bicubic" if found["position"] == "learned" else "bilinear"


RELATIVE = "attention.attention.relative_position_bias."
# BEiT, DiT and data2vec: LayerScale, no bias on keys, positions as biases of pairs in each block.
BEIT = Family(
    name="hf-beit",
    library=LIBRARY,
    verified=TINY + "; also data2vec-vision",
    model_types=("beit", "data2vec-vision"),
    preprocess=processor("BeitImageProcessor"),
    signature=(*SIGNATURE, "embeddings.cls_token", BLOCK + "lambda_1"),
    prefixes=("", "beit.", "data2vec_vision."),
    aliases=(
        (r"^layers\.(\d+)\.relative_position_bias\.", rf"encoder.layer.\1.{RELATIVE}"),
        *ALIASES,
    ),
    renames={
        **RENAMES,
        **CLS,
        **no_key_bias(
            fused(*(f"{part}.weight" for part in (QUERY, KEY, VALUE))),
            *(f"{part}.bias" for part in (QUERY, VALUE)),
        ),
        **block(BLOCK, scale1="lambda_1", scale2="lambda_2"),
        "front_end.position.tables.{i}": BLOCK + RELATIVE + "relative_position_bias_table",
    },
    drops=(MASK_TOKEN, r"encoder\..*\.relative_position_index", r"lm_head\.(weight|bias)"),
    settings={
        **without(VIT_SETTINGS, "qkv_bias", "pooler_act"),
        **keys("layer_scale_init_value"),
        "image_size": To("image_size", _square),
        "use_absolute_position_embeddings": To("_absolute", flag),
        "use_relative_position_bias": To("_relative", flag),
        "use_shared_relative_position_bias": only(False),
    },
    ignored=(
        *IGNORED,
        *BACKBONE,
        *("add_fpn", "auxiliary_channels", "auxiliary_concat_input", "auxiliary_loss_weight"),
        *("auxiliary_num_convs", "pool_scales", "semantic_loss_ignore_index"),
        *("use_auxiliary_head", "use_mask_token"),
        "use_mean_pooling",  # the norm's name shows it
    ),
    decides={
        "position": _position,
        "position_table.resize": _resize,
        "position_table.resize_dtype": "model",
    },
    needs=("heads", "norm_eps", "activation", "position", "image_size"),
    variants=(
        Variant(
            when=("pooler.layernorm",),
            settings={"pooling": "mean"},
            renames={"pool_norm": "pooler.layernorm"},
        ),
        Variant(when=("layernorm",), settings={"pooling": "cls"}),
        Variant(unless=("pooler.layernorm", "layernorm"), settings={"pooling": "none"}),
        Variant(when=("lm_head",), settings={"pooling": "none"}),
        replace(CLASSIFIER, drops=()),
    ),
)
FAMILIES = (VIT, DEIT, MAE, IJEPA, BEIT)
