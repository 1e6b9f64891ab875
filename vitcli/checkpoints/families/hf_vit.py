"""ViT, DeiT, ViT-MAE, I-JEPA and BEiT as transformers stores them, and what its families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.families.hf_processors import processor
from vitcli.checkpoints.family import (
    Family,
    Renames,
    To,
    Variant,
    flag,
    fused,
    only,
    rows,
    side,
    size,
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
SETTINGS = {
    "hidden_size": To("hidden"),
    "num_hidden_layers": To("depth", default=12),
    "num_attention_heads": To("heads", default=12),
    "image_size": To("image_size", size),
    "patch_size": To("patch_size", side),
    "num_channels": To("channels"),
    "hidden_act": To("activation", ACTIVATIONS, default="gelu"),
}
VIT_SETTINGS = {
    **SETTINGS,
    "intermediate_size": To("mlp_hidden"),
    "layer_norm_eps": To("norm_eps", float, default=1e-12),
    "qkv_bias": To("attention.qkv_bias", {True: "qkv", False: "none"}),
    "pooler_act": only("tanh"),
}
TABLE_IN_MODEL_DTYPE = {"position_table.resize": "bicubic", "position_table.resize_dtype": "model"}
"""How these models resize their table where `interpolate_pos_encoding` is asked for."""
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
RENAMES: Renames = {
    "front_end.projection": "embeddings.patch_embeddings.projection",
    "front_end.position.table": rows("embeddings.position_embeddings"),
    "vit.blocks.{i}.norm1": BLOCK + "layernorm_before",
    "vit.blocks.{i}.attention.qkv": fused(
        BLOCK + "attention.attention.query",
        BLOCK + "attention.attention.key",
        BLOCK + "attention.attention.value",
    ),
    "vit.blocks.{i}.attention.proj": BLOCK + "attention.output.dense",
    "vit.blocks.{i}.norm2": BLOCK + "layernorm_after",
    "vit.blocks.{i}.feed_forward.fc1": BLOCK + "intermediate.dense",
    "vit.blocks.{i}.feed_forward.fc2": BLOCK + "output.dense",
    "vit.norm": "layernorm",
}
CLS: Renames = {"front_end.prefix.cls": rows("embeddings.cls_token")}
MASK_TOKEN = r"embeddings\.mask_token"
SIGNATURE = (BLOCK + "layernorm_before.weight", BLOCK + "attention.attention.query.weight")
# intermediate_size counts; I-JEPA's converter writes mlp_ratio beside it.
TASK_IGNORED = (*IGNORED, "encoder_stride", "mlp_ratio", "pooler_output_size")
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
    ignored=TASK_IGNORED,
    decides={**TABLE_IN_MODEL_DTYPE, "pooling": "cls"},
    variants=(CLASSIFIER, POOLER),
)
DEIT = Family(
    name="hf-deit",
    library=LIBRARY,
    verified=TINY,
    model_types=("deit",),
    preprocess=processor("DeiTImageProcessor"),
    signature=(*SIGNATURE, "embeddings.cls_token", "embeddings.distillation_token"),
    prefixes=("", "deit."),
    aliases=ALIASES,
    renames={
        **RENAMES,
        **CLS,
        "front_end.prefix.dist": rows("embeddings.distillation_token"),
    },
    drops=(MASK_TOKEN, r"decoder\.0\.(weight|bias)"),
    settings=VIT_SETTINGS,
    ignored=TASK_IGNORED,
    decides={**TABLE_IN_MODEL_DTYPE, "pooling": "cls"},
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
MAE = Family(
    name="hf-mae",
    library=LIBRARY,
    verified=TINY + "; without masking and shuffling",
    model_types=("vit_mae",),
    preprocess=processor("ViTImageProcessor"),
    signature=(*SIGNATURE, "embeddings.cls_token"),
    absent=("embeddings.distillation_token", "pooler.dense", "classifier", BLOCK + "lambda_1"),
    distinguished_by=("position", "sincos2d"),
    prefixes=("", "vit."),
    aliases=ALIASES,
    renames={**RENAMES, **CLS},
    drops=(r"decoder\..*", MASK_TOKEN),
    settings=VIT_SETTINGS,
    ignored=(
        *IGNORED,
        *("decoder_hidden_size", "decoder_intermediate_size", "decoder_num_attention_heads"),
        *("decoder_num_hidden_layers", "mask_ratio", "norm_pix_loss"),
    ),
    decides={**TABLE_IN_MODEL_DTYPE, "position": "sincos2d", "pooling": "none"},
)
IJEPA = Family(
    name="hf-ijepa",
    library=LIBRARY,
    verified=TINY,
    model_types=("ijepa",),
    preprocess=processor("ViTImageProcessor"),
    signature=SIGNATURE,
    absent=("embeddings.cls_token",),
    prefixes=("", "ijepa."),
    aliases=ALIASES,
    renames=RENAMES,
    drops=(MASK_TOKEN,),
    settings=VIT_SETTINGS,
    ignored=TASK_IGNORED,
    decides={**TABLE_IN_MODEL_DTYPE, "position": "sincos2d", "pooling": "none"},
    variants=(
        Variant(
            when=("classifier",),
            settings={"pooling": "mean", "head": "linear"},
            renames={"head.linear": "classifier"},
        ),
    ),
)


def _square(value: Any) -> tuple[int, int]:
    height, width = size(value)
    if height != width:  # the library swaps the axes of such a table
        raise ValueError("the table's own image must be square")
    return height, width


def _position(found: Mapping[str, Any]) -> str:
    kinds = {
        (True, False): "learned",
        (False, True): "relative2d",
        (False, False): "none",
    }
    return kinds[found["_absolute"], found["_relative"]]


RELATIVE = BLOCK + "attention.attention.relative_position_bias."
QUERY, KEY, VALUE = (f"{BLOCK}attention.attention.{part}" for part in ("query", "key", "value"))
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
        (
            r"^layers\.(\d+)\.relative_position_bias\.",
            r"encoder.layer.\1.attention.attention.relative_position_bias.",
        ),
        *ALIASES,
    ),
    renames={
        **{k: v for k, v in RENAMES.items() if k != "vit.blocks.{i}.attention.qkv"},
        **CLS,
        "vit.blocks.{i}.attention.qkv.weight": fused(*(f"{p}.weight" for p in (QUERY, KEY, VALUE))),
        "vit.blocks.{i}.attention.qkv.q_bias": QUERY + ".bias",
        "vit.blocks.{i}.attention.qkv.v_bias": VALUE + ".bias",
        "vit.blocks.{i}.scale1.gamma": BLOCK + "lambda_1",
        "vit.blocks.{i}.scale2.gamma": BLOCK + "lambda_2",
        "front_end.position.tables.{i}": RELATIVE + "relative_position_bias_table",
    },
    drops=(
        MASK_TOKEN,
        r"encoder\.layer\.\d+\.attention\.attention\.relative_position_bias"
        r"\.relative_position_index",
        r"lm_head\.(weight|bias)",
    ),
    settings={
        **{key: to for key, to in VIT_SETTINGS.items() if key not in ("qkv_bias", "pooler_act")},
        "image_size": To("image_size", _square),
        "use_absolute_position_embeddings": To("_absolute", flag),
        "use_relative_position_bias": To("_relative", flag),
        "use_shared_relative_position_bias": only(False),
        "layer_scale_init_value": To("layer_scale", float),
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
        "position_table.resize": lambda found: {"learned": "bicubic"}.get(
            found["position"], "bilinear"
        ),
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
        Variant(
            when=("classifier",), settings={"head": "linear"}, renames={"head.linear": "classifier"}
        ),
    ),
)
FAMILIES = (VIT, DEIT, MAE, IJEPA, BEIT)
