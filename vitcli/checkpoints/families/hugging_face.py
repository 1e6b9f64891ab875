"""What the Hugging Face families share: config keys, activations, sizes."""

from __future__ import annotations

from typing import Any

from vitcli.checkpoints.family import To, only

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


def size(value: Any) -> tuple[int, int]:
    """(height, width) of `224`, `[224, 224]` or a mapping of both."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]]
    if isinstance(value, int):
        value = [value, value]
    height, width = value
    return int(height), int(width)


def side(value: Any) -> int:
    """One number, or two equal ones."""
    height, width = size(value)
    if height != width:
        raise ValueError("patches must be square")
    return height


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


IGNORED = (
    # what every PretrainedConfig holds
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "label2id",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "tie_word_embeddings",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "use_bfloat16",
    "use_cache",
    # what the language model and its processor read
    "image_mean",
    "image_seq_length",
    "image_std",
    "num_image_tokens",
    "projector_hidden_act",
    "vocab_size",
    # what transformers 4 wrote about text generation
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "diversity_penalty",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
    "prefix",
    "repetition_penalty",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "typical_p",
    # active while training only
    "attention_dropout",
    "attention_probs_dropout_prob",
    "drop_path_rate",
    "dropout",
    "hidden_dropout_prob",
    "projection_dropout",
)
"""Keys that do not change what an encoder computes in eval mode."""

BACKBONE = (
    "_out_features",
    "_out_indices",
    "apply_layernorm",
    "out_features",
    "out_indices",
    "reshape_hidden_states",
    "return_class_token",
    "stage_names",
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
