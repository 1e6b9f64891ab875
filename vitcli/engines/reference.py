"""A source run by the library that wrote it, with the interface of vitcli's own encoder.

B images; T tokens, of which P prefix tokens come first; D channels; a feature map (B, D, h, w) is
read as its h w tokens, row by row. Values are the library's, only their order is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitcli.config.request import split_library
from vitcli.engines.backbone import Backbone, input_errors, library_errors, source_config
from vitcli.engines.timm_networks import fresh_network, open_open_clip, open_timm, timm_backbone
from vitcli.engines.transformers_towers import transformers_backbone
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, VisionEncoder
from vitcli.nn.pooling import ClsPooling, MeanPooling

CLS = ("cls_token", "class_token", "class_embedding", "cls_embedding")
DIST = ("dist_token", "distillation_token")
REGISTERS = ("reg_token", "register_tokens", "registers", "storage_tokens")
"""What libraries call the parameters of prefix tokens."""


@dataclass(frozen=True)
class LibraryShape:
    """What is known of an encoder of another library; a subset of `EncoderConfig`'s names.

    Raises:
        VitcliError: for any other setting of an encoder.
    """

    named: str
    hidden: int
    """Width of the last layer's tokens."""
    depth: int
    """Blocks, or stages of an encoder that has several widths."""
    heads: int | None
    image_size: tuple[int, int]
    patch_size: int
    """Pixels between two tokens of the last layer."""
    cls_token: bool
    dist_token: bool
    registers: int
    pooling: str
    """What gives a layer's vector: `cls`, `mean`, or `map` where only the end has one."""
    head: str
    layers: tuple[str, ...] = field(default=())
    deepstack: tuple[int, ...] = ()
    channels: int = 3

    @property
    def prefix_tokens(self) -> int:
        return int(self.cls_token) + int(self.dist_token) + self.registers

    def grid_at(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the last layer for images of this (height, width)."""
        return math.ceil(size[0] / self.patch_size), math.ceil(size[1] / self.patch_size)

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        return {**vars(self), "layers": list(self.layers), "image_size": list(self.image_size)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise VitcliError(
            f"{self.named}: is run by its own library, so its {name} is not known here",
            "use --tokens, embed, neighbors or probe, which ask for vectors alone",
        )


@dataclass(frozen=True)
class LibraryConfig:
    """In place of a `ModelConfig`."""

    name: str
    encoder: LibraryShape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise VitcliError(
            f"{self.name}: is run by its own library, so it has no vitcli config",
            "leave out what needs one",
        )


class _Grid:
    """In place of a front end: where its tokens come from in an image."""

    def __init__(self, encoder: LibraryEncoder) -> None:
        self.encoder = encoder

    def grid(self, images: Tensor) -> tuple[int, int]:
        """(rows, columns) of the last layer's tokens."""
        size = tuple(images.shape[-2:])
        if size not in self.encoder.grids:
            with torch.inference_mode():
                self.encoder(images[:1])
        return self.encoder.grids[size]

    @property
    def patch_size(self) -> int:
        return self.encoder.stride

    @property
    def prefix(self) -> dict[str, range]:
        """A range per kind of prefix token, as long as it has tokens."""
        return {kind: range(count) for kind, count in self.encoder.parts.items() if count}


class LibraryEncoder(VisionEncoder):
    """A backbone as commands ask an encoder: tokens, pooled vector, output; layers by hooks.

    Raises:
        VitcliError: its output is neither tokens nor a feature map.
    """

    def __init__(self, backbone: Backbone, size: tuple[int, int]) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.library = backbone.module
        self.grids: dict[tuple[int, ...], tuple[int, int]] = {}
        self.layer_grids: dict[int, tuple[int, int]] = {}
        self.points = nn.ModuleList(nn.Identity() for _ in range(len(backbone.blocks) + 2))
        self.front_end = cast(Any, _Grid(self))
        self.parts: Mapping[str, int] = {}
        """How many tokens of each kind precede the patches; empty until one image has passed."""
        self.stride = 1
        for number, block in enumerate(backbone.blocks):
            if number == 0:
                block.register_forward_pre_hook(lambda _, given: self._see(0, given))
            block.register_forward_hook(lambda _, __, out, n=number: self._see(n + 1, out))
        self._sizes: set[tuple[int, ...]] = set()
        image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
        self._pixels = image.to(backbone.device, backbone.dtype)
        with input_errors(backbone, size), torch.inference_mode():
            tokens, pooled, output, *_ = backbone.forward(self._pixels)
        values, grid = self._tokens(tokens)
        parts = {kind: _count(backbone.module, names) for kind, names in PREFIX.items()}
        if grid is None:
            self.parts, self.stride = _prefix(parts, values.shape[1], size)
        else:  # a feature map has patches alone
            self.parts, self.stride = dict.fromkeys(parts, 0), round(size[0] / grid[0])
        first = self._output(values, grid, pooled, output)
        self.gives_pooled = pooled is not None
        self.has_blocks = self._sizes == {tuple(values.shape[1:])} and grid is None
        """Every layer has the last one's tokens, as the blocks of a ViT; else they are stages."""
        kind = self._kind(first)
        self.pooling = ClsPooling() if kind == "cls" else MeanPooling()
        self.shape = LibraryShape(
            named=f"{backbone.library}:{backbone.name}",
            hidden=first.tokens.shape[-1],
            depth=len(backbone.blocks),
            heads=_heads(backbone),
            image_size=size,
            patch_size=self.stride,
            cls_token=bool(self.parts["cls"]),
            dist_token=bool(self.parts["dist"]),
            registers=self.parts["registers"],
            pooling=kind,
            head="none" if output is None else "linear",
            layers=tuple(backbone.layers),
        )

    @property
    def prefix_tokens(self) -> int:
        return sum(self.parts.values())

    @property
    def layer_points(self) -> list[tuple[str, nn.Module]]:
        """The input of the first layer, each layer, and the end, after the final norm.

        Blocks are counted; stages have the library's names.
        """
        blocks = [f"block {i}" for i in range(1, len(self.backbone.blocks) + 1)]
        names = (*blocks, "norm") if self.has_blocks else (*self.backbone.layers, "features")
        return list(zip(("input", *names), self.points, strict=True))

    def forward(self, images: Tensor, attn_mask: Tensor | None = None) -> EncoderOutput:
        """(B, 3, height, width) -> EncoderOutput. The pooled vector is the library's; where it
        gives none, the mean of the patches."""
        self._pixels = images
        tokens, pooled, output, *_ = self.backbone.forward(images)
        values, grid = self._tokens(tokens)
        self.points[-1](values)
        return self._output(values, grid, pooled, output)

    def attention(self, images: Tensor) -> list[Tensor]:
        """Each block's attention weights as the library returns them, (B, heads, T, T).

        The tokens of each layer pass its point meanwhile.

        Raises:
            VitcliError: the library returns none, or none between all tokens.
        """
        self._pixels, attend = images, self.backbone.attend
        found = list(attend(images)) if attend else []
        if not found:
            raise VitcliError(
                f"{self.shape.named}: its library returns no attention weights", WITHOUT_ATTENTION
            )
        rows, columns = self.front_end.grid(images)
        tokens = self.prefix_tokens + rows * columns
        for block, weights in enumerate(found, start=1):
            if tuple(weights.shape[-2:]) != (tokens, tokens) or len(weights) != len(images):
                raise VitcliError(
                    f"{self.shape.named}: its attention is not between all tokens (got "
                    f"{tuple(weights.shape)} in block {block}, expected "
                    f"({len(images)}, heads, {tokens}, {tokens}))",
                    WITHOUT_ATTENTION,
                )
        return found

    def _output(
        self,
        values: Tensor,
        grid: tuple[int, int] | None,
        pooled: Tensor | None,
        output: Tensor | None,
    ) -> EncoderOutput:
        prefix, shape = self.prefix_tokens, self._pixels.shape
        self.grids[tuple(shape[-2:])] = grid or _grid(values.shape[1] - prefix, shape, self.stride)
        pooled = values[:, prefix:].mean(1) if pooled is None else pooled.flatten(1)
        return EncoderOutput(values, values, pooled, output)

    def _tokens(self, value: Any) -> tuple[Tensor, tuple[int, int] | None]:
        """(B, T, D) of tokens or of a map; the grid of a map."""
        if isinstance(value, Tensor) and value.ndim == 3:
            return value, None
        if isinstance(value, Tensor) and value.ndim == 4:
            value = value if self._channels_last(value) else value.permute(0, 2, 3, 1)
            return value.flatten(1, 2), (int(value.shape[1]), int(value.shape[2]))
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise VitcliError(
            f"{self.backbone.library}:{self.backbone.name}: gives neither tokens nor a feature map "
            f"(got {got}, expected (B, T, D) or (B, D, h, w))",
            "use another encoder",
        )

    def _channels_last(self, value: Tensor) -> bool:
        """Where the D of a map is: as the library says, unless only the other shape is an image's.

        Some encoders keep maps one way between stages and the other way inside them.
        """
        last = self.backbone.channels_last
        _, a, b, c = value.shape
        height, width = self._pixels.shape[-2:]
        off = {True: a * width / (b * height), False: b * width / (c * height)}
        fits = {last: 2 / 3 < ratio < 3 / 2 for last, ratio in off.items()}
        return not last if fits[not last] and not fits[last] else last

    def _see(self, layer: int, value: Any) -> None:
        """Give a layer's tokens to whoever watches its point."""
        if self.parts and not self.points[layer]._forward_hooks:
            return
        while isinstance(value, tuple | list):
            value = value[0]
        tokens, grid = self._tokens(self.backbone.arrange(value, self._pixels))
        if not self.parts:  # the first image of all
            self._sizes.add(tuple(tokens.shape[1:]))
            return
        count, area = tokens.shape[1] - self.prefix_tokens, math.prod(self._pixels.shape[-2:])
        stride = max(1, round(math.sqrt(area / max(1, count))))
        self.layer_grids[layer] = grid or _grid(count, self._pixels.shape, stride)
        size = (int(self._pixels.shape[-2]), int(self._pixels.shape[-1]))
        if self.prefix_tokens and (grid or not _fits(count, size, self.stride)):
            raise VitcliError(
                f"{self.shape.named}: layer {layer} has other tokens than the last one (got "
                f"{tokens.shape[1]}), so its prefix tokens are not known",
                "ask for the end of the encoder, without layers",
            )
        self.points[layer](tokens)

    def _kind(self, found: EncoderOutput) -> str:
        """The pooling that gives a layer's vector; `map` where only the end has one."""
        pooled, tokens = found.pooled, found.tokens
        assert pooled is not None
        if not self.prefix_tokens:
            return "mean"
        cls = self.parts["cls"] and pooled.shape == tokens[:, 0].shape
        return "cls" if cls and torch.equal(pooled, tokens[:, 0]) else "map"


WITHOUT_ATTENTION = "vitcli attn-entropy --preset timm:vit_tiny_patch16_224"
PREFIX = {"cls": CLS, "dist": DIST, "registers": REGISTERS}


def _count(module: nn.Module, names: tuple[str, ...]) -> int:
    """Tokens in the parameters of these names: (.., tokens, D), or (D,) of one."""
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in names:
            return int(parameter.shape[-2]) if parameter.ndim > 1 else 1
    return 0


def _prefix(
    parts: Mapping[str, int], tokens: int, size: tuple[int, int]
) -> tuple[dict[str, int], int]:
    """Which of its prefix tokens are among the T, and pixels between two of the others."""
    for known in (dict(parts), dict.fromkeys(parts, 0)):
        patches = tokens - sum(known.values())
        stride = round(math.sqrt(size[0] * size[1] / patches)) if patches > 0 else 0
        if stride and _fits(patches, size, stride):
            return known, stride
    return dict.fromkeys(parts, 0), max(size)


def _fits(patches: int, size: tuple[int, int], stride: int) -> bool:
    whole = (size[0] // stride) * (size[1] // stride)
    return patches in (whole, math.ceil(size[0] / stride) * math.ceil(size[1] / stride))


def _grid(patches: int, shape: torch.Size, stride: int) -> tuple[int, int]:
    """(rows, columns) of the patches of images (B, 3, height, width); one row where unknown."""
    height, width = shape[-2:]
    for rows, columns in (
        (height // stride, width // stride),
        (math.ceil(height / stride), math.ceil(width / stride)),
    ):
        if rows * columns == patches:
            return rows, columns
    return 1, patches


def _heads(backbone: Backbone) -> int | None:
    """Attention heads of each block; None where there is no one number."""
    found = getattr(getattr(backbone.module, "config", None), "num_attention_heads", None)
    if found is None and backbone.blocks:
        found = getattr(getattr(backbone.blocks[-1], "attn", None), "num_heads", None)
    return found if isinstance(found, int) else None


def open_reference(
    source: str,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    image_size: tuple[int, int] | None = None,
) -> Backbone:
    """The encoder of a directory or hub id, by the library that its config names.

    Args:
        source: `timm:`, `transformers:` or `open_clip:` before it names the library.
        image_size: (height, width) of the images, for an encoder that is built for one size.

    Raises:
        VitcliError: the library is not installed, does not know the source or cannot read it.
    """
    library, source = split_library(source)
    library = library or library_of(source)
    opened = {"transformers": transformers_backbone, "timm": open_timm, "open_clip": open_open_clip}
    with library_errors(library, source, "check that the directory is as the library writes it"):
        return opened[library](source, device or torch.device("cpu"), dtype, image_size)


def fresh_reference(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    image_size: tuple[int, int] | None = None,
) -> Backbone:
    """An architecture of timm in eval mode, see `fresh_network`."""
    model = fresh_network(name, seed, image_size)
    where = device or torch.device("cpu")
    return timm_backbone(model, split_library(name)[1], where, dtype)


def library_of(source: str) -> str:
    """transformers, timm or open_clip, by the config of a directory or hub id."""
    if source_config(source, "open_clip_config.json"):
        return "open_clip"
    config = source_config(source, "config.json")
    if "architecture" in config and config.get("model_type") != "timm_wrapper":
        return "timm"
    if "model_type" in config:
        return "transformers"
    raise VitcliError(
        f"{source}: no config of transformers, timm or open_clip found",
        "give a directory that one of them wrote, or a hub id",
    )
