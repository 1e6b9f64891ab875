"""Twins of models whose authors ship no library: timm and transformers compute, and the state
dict is written with the authors' names and layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.ndimage import zoom
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checkpoints.parity.timm_models import Case

State = dict[str, Tensor]
Resize = Callable[[Tensor, tuple[int, int]], Tensor]
"""A (rows, columns, D) table for another grid."""


def renamed(state: State, *rules: tuple[str, str]) -> State:
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _interpolated(table: Tensor, **how: Any) -> Tensor:
    square = table.permute(2, 0, 1)[None]
    return F.interpolate(square, mode="bicubic", **how)[0].permute(1, 2, 0)


def plain_bicubic(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """DeiT's and MAE's loading code."""
    return _interpolated(table, size=grid)


def offset_bicubic(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """DINOv2 without registers, in float32."""
    scale = [(n + 0.1) / m for n, m in zip(grid, table.shape[:2], strict=True)]
    return _interpolated(table.float(), scale_factor=scale).to(table.dtype)


def zoomed(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """vision_transformer's and big_vision's loading code."""
    factors = [n / m for n, m in zip(grid, table.shape[:2], strict=True)]
    return torch.from_numpy(zoom(table.numpy(), (*factors, 1), order=1))


def at_size(case: Case, model: nn.Module, size: tuple[int, int], resize: Resize) -> nn.Module:
    """The same weights in a model made for another size, its table resized by `resize`."""
    other = case.make(img_size=size).double().eval()
    state = dict(model.state_dict())
    old, new = (m.patch_embed.grid_size for m in (model, other))
    table = state["pos_embed"][0]
    prefix = len(table) - old[0] * old[1]
    patches = table[prefix:].unflatten(0, old)
    if old != new:
        patches = resize(patches, new)
    state["pos_embed"] = torch.cat([table[:prefix], patches.flatten(0, 1)])[None]
    other.load_state_dict(state)
    return other


def dinov2(model: nn.Module) -> State:
    """timm folds the CLS row of a model with registers into its CLS token: unfolded here."""
    state = renamed(model.state_dict(), (r"^reg_token", "register_tokens"))
    width = state["cls_token"].shape[-1]
    if "register_tokens" in state:
        row = torch.randn(1, 1, width, dtype=torch.float64)
        state["cls_token"] = state["cls_token"] - row
        state["pos_embed"] = torch.cat([row, state["pos_embed"]], dim=1)
    if isinstance(model.blocks[0].mlp.act, nn.SiLU):
        state = renamed(state, (r"mlp\.fc1", "mlp.w12"), (r"mlp\.fc2", "mlp.w3"))
    return state | {"mask_token": torch.randn(1, width)}


def dinov3(model: nn.Module) -> State:
    """Periods as the twin has them; the k part of a masked bias holds anything."""
    state = renamed(
        model.state_dict(),
        (r"^reg_token", "storage_tokens"),
        (r"gamma_(\d)", r"ls\1.gamma"),
        (r"mlp\.fc1_g", "mlp.w1"),
        (r"mlp\.fc1_x", "mlp.w2"),
    )
    if any(".w1." in name for name in state):
        state = renamed(state, (r"mlp\.fc2", "mlp.w3"))
    width = state["cls_token"].shape[-1]
    for name in [n for n in state if n.endswith("q_bias")]:
        block = name.removesuffix("q_bias")
        q, v = state.pop(name), state.pop(block + "v_bias")
        state[block + "qkv.bias"] = torch.cat([q, torch.randn(width, dtype=q.dtype), v])
        mask = torch.ones(3, width)
        mask[1] = 0
        state[block + "qkv.bias_mask"] = mask.flatten()
    state["rope_embed.periods"] = model.rope.periods.clone()
    state["mask_token"] = torch.randn(1, width)
    state["local_cls_norm.weight"] = torch.randn(width)
    state["local_cls_norm.bias"] = torch.randn(width)
    return state


def internvit(model: nn.Module) -> State:
    """OpenGVLab's names of a transformers InternVLVisionModel."""
    state = renamed(
        model.state_dict(),
        (r"embeddings\.patch_embeddings\.projection", "embeddings.patch_embedding"),
        (r"embeddings\.cls_token", "embeddings.class_embedding"),
        (r"embeddings\.position_embeddings", "embeddings.position_embedding"),
        (r"encoder\.layer\.", "encoder.layers."),
        (r"layernorm_before", "norm1"),
        (r"layernorm_after", "norm2"),
        (r"attention\.projection_layer", "attn.proj"),
        (r"attention\.", "attn."),
        (r"lambda_", "ls"),
    )
    for name in [n for n in state if ".q_proj." in n]:
        parts = [state.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        state[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return state


def perception(model: nn.Module) -> State:
    """Facebook's names of a Perception Encoder by timm: the inverse of timm's own conversion."""
    state = model.state_dict()
    if "attn_pool.q.weight" in state:
        for part in ("weight", "bias"):
            joined = torch.cat([state.pop(f"attn_pool.{name}.{part}") for name in ("q", "kv")])
            state[f"attn_pool.attn.in_proj_{part}"] = joined
        state = renamed(
            state,
            (r"^attn_pool\.proj\.", "attn_pool.attn.out_proj."),
            (r"^attn_pool\.norm\.", "attn_pool.layernorm."),
            (r"^attn_pool\.latent", "attn_pool.probe"),
        )
    if "head.weight" in state:
        state["proj"] = state.pop("head.weight").T
        del state["head.bias"]
    if "cls_token" in state:
        state["class_embedding"] = state.pop("cls_token").flatten()
    state["positional_embedding"] = state.pop("pos_embed")[0]
    return renamed(
        state,
        (r"^patch_embed\.proj", "conv1"),
        (r"^norm_pre", "ln_pre"),
        (r"^norm\.", "ln_post."),
        (r"^blocks\.", "transformer.resblocks."),
        (r"\.norm", ".ln_"),
        (r"\.gamma_(\d)", r".ls_\1.gamma"),
        (r"attn\.qkv\.", "attn.in_proj_"),
        (r"resblocks\.(\d+)\.attn\.proj", r"resblocks.\1.attn.out_proj"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
    )


def flax(model: nn.Module, heads: int, style: str) -> dict[str, np.ndarray]:
    """A timm model as Google's parameters: `old` numbering, `new`, or blocks `stacked`."""
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    old = style == "old"
    names = {
        "norm1": "LayerNorm_0",
        "norm2": "LayerNorm_2" if old else "LayerNorm_1",
        "attn": f"MultiHeadDotProductAttention_{int(old)}",
        "mlp": "MlpBlock_3" if old else "MlpBlock_0",
    }
    kernel = state["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    out = {"embedding/kernel": kernel, "embedding/bias": state["patch_embed.proj.bias"]}
    table = "Transformer/posembed_input/pos_embedding" if old else "pos_embedding"
    out[table] = state["pos_embed"]
    if "cls_token" in state:
        out["cls"] = state["cls_token"]
    out |= _norm("Transformer/encoder_norm", state, "norm")

    def attention(path: str, q: str, kv: list[tuple[str, int]], proj: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        parts = {"query": (q, 0), "key": kv[0], "value": kv[1]}
        for part, (source, index) in parts.items():
            width = state[source + ".weight"].shape[1]
            rows = slice(index * width, (index + 1) * width)
            weight, bias = state[source + ".weight"][rows], state[source + ".bias"][rows]
            made[f"{path}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
            made[f"{path}/{part}/bias"] = bias.reshape(heads, -1)
        weight = state[proj + ".weight"]
        made[f"{path}/out/kernel"] = weight.T.reshape(heads, -1, len(weight))
        made[f"{path}/out/bias"] = state[proj + ".bias"]
        return made

    blocks: list[dict[str, Any]] = []
    for i in range(len(model.blocks)):
        at = f"blocks.{i}."
        block = _norm(names["norm1"], state, at + "norm1")
        block |= _norm(names["norm2"], state, at + "norm2")
        qkv = at + "attn.qkv"
        block |= attention(names["attn"], qkv, [(qkv, 1), (qkv, 2)], at + "attn.proj")
        block |= _dense(names["mlp"] + "/Dense_0", state, at + "mlp.fc1")
        block |= _dense(names["mlp"] + "/Dense_1", state, at + "mlp.fc2")
        blocks.append(block)
    for key in blocks[0]:
        if style == "stacked":
            out[f"Transformer/encoderblock/{key}"] = np.stack([block[key] for block in blocks])
        else:
            for i, block in enumerate(blocks):
                out[f"Transformer/encoderblock_{i}/{key}"] = block[key]
    if "attn_pool.latent" in state:
        out["MAPHead_0/probe"] = state["attn_pool.latent"]
        path = "MAPHead_0/MultiHeadDotProductAttention_0"
        kv = [("attn_pool.kv", 0), ("attn_pool.kv", 1)]
        out |= attention(path, "attn_pool.q", kv, "attn_pool.proj")
        out |= _norm("MAPHead_0/LayerNorm_0", state, "attn_pool.norm")
        out |= _dense("MAPHead_0/MlpBlock_0/Dense_0", state, "attn_pool.mlp.fc1")
        out |= _dense("MAPHead_0/MlpBlock_0/Dense_1", state, "attn_pool.mlp.fc2")
    if "head.weight" in state:
        out |= _dense("head", state, "head")
    return out


def _norm(path: str, state: dict[str, Any], source: str) -> dict[str, Any]:
    return {f"{path}/scale": state[source + ".weight"], f"{path}/bias": state[source + ".bias"]}


def _dense(path: str, state: dict[str, Any], source: str) -> dict[str, Any]:
    return {f"{path}/kernel": state[source + ".weight"].T, f"{path}/bias": state[source + ".bias"]}


MOONVIT = (
    (r"^layers\.(\d+)\.norm1\.", r"encoder.blocks.\1.norm0."),
    (r"^layers\.(\d+)\.norm2\.", r"encoder.blocks.\1.norm1."),
    (r"^layers\.(\d+)\.attn\.proj\.", r"encoder.blocks.\1.wo."),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.blocks.\1.mlp.fc0."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.blocks.\1.mlp.fc1."),
    (r"^final_layernorm\.", "encoder.final_layernorm."),
    (r"^patch_embed\.pos_emb\.position_embeddings$", "patch_embed.pos_emb.weight"),
)


def moonvit(model: Any) -> dict[str, Tensor]:
    """Kimi's tower as its own code stores it: q, k and v in one, pairs next to each other."""
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        for pattern, replacement in MOONVIT:
            key = re.sub(pattern, replacement, key)
        tensors[key] = tensor
    heads = model.config.num_attention_heads
    for block in range(model.config.num_hidden_layers):
        for suffix in ("weight", "bias"):
            parts = []
            for part in "qkv":
                stored = tensors.pop(f"layers.{block}.attn.{part}_proj.{suffix}")
                by_head = stored.unflatten(0, (heads, -1))  # (H, d, ..)
                if part != "v":
                    by_head = by_head.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
                parts.append(by_head.flatten(0, 1))
            tensors[f"encoder.blocks.{block}.wqkv.{suffix}"] = torch.cat(parts)
    return tensors
