"""A source run by the library that wrote it, unchanged: transformers, timm or open_clip.

B images, T tokens of which prefix tokens come first, D channels. Nothing here depends on vitcli's
own encoder; no library is allowed to run code that comes with a checkpoint.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitcli.config.load import split_library
from vitcli.config.schema import PreprocessConfig
from vitcli.config.yaml import read_json
from vitcli.errors import VitcliError, install_extra
from vitcli.nn.encoder import EncoderOutput

TOWERS = (
    *("vision_tower", "image_tower", "visual", "vision_model", "vision_encoder", "image_encoder"),
    "backbone",
)
"""What libraries call the image half of a larger model."""
FIRST_VIEW = ("LlavaNext", "LlavaOnevision", "PerceptionLM")
"""Processors whose view of the whole picture comes before its tiles."""


@dataclass(frozen=True)
class Seen:
    """What a backbone makes of a batch. Token tensors are (B, T, D), feature maps (B, C, h, w)."""

    layers: Mapping[int, Tensor]
    """0 is the input of the first block, i the output of block i."""
    tokens: Tensor | None = None
    """After the final norm."""
    pooled: Tensor | None = None
    output: Tensor | None = None
    deepstack: Tensor | None = None


@dataclass
class Backbone:
    """A vision encoder of another library, in eval mode."""

    library: str
    name: str
    module: nn.Module
    blocks: Sequence[nn.Module]
    device: torch.device
    dtype: torch.dtype
    processor: Callable[[Image.Image], Tensor] | None
    """A picture to (3, height, width); None where the source tells none."""
    forward: Callable[[Tensor], tuple[Tensor | None, ...]]
    """Images to tokens, pooled and output, and DeepStack's where it has them; each may be None."""
    arrange: Callable[[Tensor, Tensor], Tensor] = field(default=lambda tokens, pixels: tokens)
    """A block's tokens in raster order, (B, T, D)."""
    once: Callable[[Tensor], object] | None = None
    """What the library itself computes for images, where `forward` asks it for more."""
    attend: Callable[[Tensor], Sequence[Tensor]] | None = None
    """Images to each block's attention weights, (B, heads, T, T); None where none are returned."""
    layers: Sequence[str] = ()
    """What the library calls each of `blocks`."""
    channels_last: bool = False
    """Feature maps are (B, h, w, C), else (B, C, h, w)."""
    input_size: tuple[int, int] | None = None
    """(height, width) of the images it was built for; None where it follows the image."""
    prepared_by: Mapping[str, Any] = field(default_factory=dict)
    """The library's settings of its preprocessing, as it writes them."""

    @property
    def version(self) -> str:
        found: str = importlib.import_module(self.library).__version__
        return found

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def prepare(self, picture: Image.Image) -> Tensor | None:
        """(1, 3, height, width) as the library prepares an RGB picture, or None."""
        if self.processor is None:
            return None
        return self.processor(picture)[None].to(self.device, self.dtype)

    @torch.inference_mode()
    def run(self, pixels: Tensor, layers: Sequence[int] = ()) -> Seen:
        """Images (B, 3, height, width) to the layers asked for and what the library returns."""
        kept: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda _, given, out=None: kept.update(
                {layer: self.arrange(_first(given if out is None else out), pixels)}
            )

        hooks = [self.blocks[i - 1].register_forward_hook(keep(i)) for i in layers if i > 0]
        if 0 in layers:
            hooks.append(self.blocks[0].register_forward_pre_hook(keep(0)))
        try:
            with _quiet():
                found = self.forward(pixels)
        finally:
            for hook in hooks:
                hook.remove()
        return Seen(kept, *found)


def _first(value: Any) -> Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    found: Tensor = value.detach()
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    make = {"transformers": _transformers, "timm": _timm, "open_clip": _open_clip}[library]
    with _errors_of(library, source, "check that the directory is as the library writes it"):
        return make(source, device or torch.device("cpu"), dtype, image_size)


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
    return _timm_backbone(model, split_library(name)[1], where, dtype)


def fresh_network(
    name: str, seed: int, image_size: tuple[int, int] | None = None, **more: Any
) -> Any:
    """A model of timm with the weights that timm draws after `torch.manual_seed(seed)`.

    Args:
        name: `timm:NAME`, as `timm.create_model` takes NAME; `more` are its other arguments.

    Raises:
        VitcliError: timm is not installed or does not know the architecture.
    """
    library, architecture = split_library(name)
    if library != "timm":
        raise VitcliError(
            f"--preset {name}: {library} builds nothing by name (expected timm:ARCHITECTURE)",
            f"--weights {library}:SOURCE",
        )
    with _errors_of(library, name, "--preset timm:resnet50"):
        timm: Any = importlib.import_module("timm")
        if not timm.is_model(architecture):
            near = difflib.get_close_matches(architecture, timm.list_models(), 1)
            raise VitcliError(
                f"--preset {name}: timm {timm.__version__} does not have this architecture",
                f"--preset timm:{near[0] if near else 'resnet50'}",
            )
        published = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
        fixed = published is not None and published.fixed_input_size
        if image_size and fixed and image_size != tuple(published.input_size[-2:]):
            more["img_size"] = image_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return timm.create_model(architecture, **more)


class TimmNetwork(nn.Module):
    """A fresh network of timm with a classifier, for training: (B, 3, height, width) to logits."""

    def __init__(self, name: str, seed: int, size: tuple[int, int], classes: int) -> None:
        super().__init__()
        self.net = fresh_network(name, seed, size, num_classes=classes)
        self.arguments = {"img_size": size} if self.net.pretrained_cfg["fixed_input_size"] else {}

    def forward(self, images: Tensor) -> EncoderOutput:
        nothing = images.new_empty(0)
        return EncoderOutput(nothing, nothing, None, self.net(images))

    def config(self, preprocess: PreprocessConfig, classes: Sequence[str]) -> dict[str, Any]:
        """What timm's `config.json` says of it beside its weights; the preprocessing is the run's.

        Raises:
            VitcliError: a preprocessing that timm has no words for.
        """
        size, resized = preprocess.output_size, preprocess.resize_size
        if size is None or resized is None or preprocess.resize not in ("squash", "shortest"):
            raise VitcliError(
                f"preprocess.resize: {preprocess.resize}: timm has no such preprocessing",
                "--set preprocess.resize=squash",
            )
        pretrained = {
            "input_size": [3, *size],
            "fixed_input_size": bool(self.arguments),
            "interpolation": preprocess.filter,
            "crop_pct": size[0] / resized[0],
            "crop_mode": "squash" if preprocess.resize == "squash" else "center",
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "num_classes": len(classes),
            "label_names": list(classes),
        }
        return {
            "architecture": self.net.pretrained_cfg["architecture"],
            "num_classes": len(classes),
            "num_features": self.net.num_features,
            "model_args": self.arguments,
            "pretrained_cfg": pretrained,
        }


@contextmanager
def _errors_of(library: str, source: str, hint: str) -> Iterator[None]:
    """What a library raises, in one line."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise VitcliError(
            f"{source}: needs {library}, which is not installed", install_extra("reference")
        ) from error
    try:
        with _quiet():
            yield
    except VitcliError:
        raise
    except Exception as error:  # each library raises its own many errors
        lines = str(error).strip().splitlines() or [""]
        raise VitcliError(
            f"{source}: {library} cannot load it ({type(error).__name__}: {lines[0]})", hint
        ) from error


def library_of(source: str) -> str:
    """transformers, timm or open_clip, by the config of a directory or hub id.

    Raises:
        VitcliError: no config that one of them writes.
    """
    if _config(source, "open_clip_config.json"):
        return "open_clip"
    config = _config(source, "config.json")
    if "architecture" in config and config.get("model_type") != "timm_wrapper":
        return "timm"
    if "model_type" in config:
        return "transformers"
    raise VitcliError(
        f"{source}: no config of transformers, timm or open_clip found",
        "give a directory that one of them wrote, or a hub id",
    )


def _config(source: str, name: str) -> dict[str, Any]:
    """A JSON file of the source; empty where there is none."""
    if Path(source).exists():
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        file = folder / name
    else:
        try:
            from huggingface_hub import hf_hub_download

            repo, _, revision = source.partition("@")
            file = Path(hf_hub_download(repo, name, revision=revision or None))
        except Exception:  # not there, no network or no such library: no config in any case
            return {}
    return read_json(file, dict[str, Any]) if file.is_file() else {}


def _place(source: str) -> tuple[str, dict[str, Any]]:
    """A directory, or a hub id and its revision, as `from_pretrained` takes them."""
    path = Path(source)
    if path.exists():
        return str(path if path.is_dir() else path.parent), {}
    repo, _, revision = source.partition("@")
    return repo, {"revision": revision} if revision else {}


# transformers


def _transformers(
    source: str, device: torch.device, dtype: torch.dtype, image_size: tuple[int, int] | None
) -> Backbone:
    transformers: Any = importlib.import_module("transformers")
    place, more = _place(source)
    config = _config(source, "config.json")
    named, kind = (config.get("architectures") or [""])[0], config["model_type"]
    maker = getattr(transformers, named, None) or _unlisted(kind, named) or transformers.AutoModel
    with _silent_transformers():
        model = maker.from_pretrained(place, dtype=dtype, trust_remote_code=False, **more)
        model = model.to(device).eval()
        processor = _transformers_processor(place, more)
    tower = _tower(model)
    if hasattr(tower, "timm_model"):  # Perception LM's, which is timm's model
        inner = tower.timm_model
        layers, blocks = _timm_blocks(inner)
        return Backbone(
            "transformers",
            tower.config.architecture,
            inner,
            blocks,
            device,
            dtype,
            processor,
            lambda pixels: timm_outputs(inner, pixels),
            once=inner,
            attend=_timm_attention(inner, blocks),
            layers=layers,
            input_size=_timm_size(inner),
            prepared_by=_config(source, "preprocessor_config.json"),
        )
    config = tower.config
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
        model.config.mask_ratio = 0.0
    if hasattr(tower, "make_preprocessor_external"):  # RADIO normalizes within
        normalize, prepare = tower.make_preprocessor_external().cpu(), processor
        processor = prepare and (lambda picture: normalize(prepare(picture)))
    run = _TransformersForward(model, tower)
    layers, blocks = _transformers_blocks(tower)
    size = getattr(config, "image_size", None)
    return Backbone(
        "transformers",
        config.model_type,
        tower,
        blocks,
        device,
        dtype,
        processor,
        run,
        run.arrange,
        attend=run.attend if run.in_raster_order else None,
        layers=layers,
        input_size=(size, size) if isinstance(size, int) else None if size is None else tuple(size),
        prepared_by=_config(source, "preprocessor_config.json"),
    )


def _transformers_blocks(tower: Any) -> tuple[list[str], list[nn.Module]]:
    """The blocks of a tower, or the stages of one that has several, and their names."""
    config = tower.config
    depths = [
        getattr(config, key)
        for key in ("num_hidden_layers", "depth", "num_layers", "num_stages")
        if isinstance(getattr(config, key, None), int)
    ]
    stages = getattr(config, "depths", None)
    depths = [len(stages)] if isinstance(stages, list | tuple) else depths[:1]
    for name, module in tower.named_modules():
        if isinstance(module, nn.ModuleList) and [len(module)] == depths:
            return [f"{name}.{i}" for i in range(len(module))], list(module)
    raise VitcliError(
        f"transformers {config.model_type}: no list of its layers found",
        "report the architecture",
    )


def _unlisted(kind: str, architecture: str) -> Any:
    """A class that the library saves and does not list at its top, such as Qwen's bare towers."""
    for name in (kind, kind.removesuffix("_vision")):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            return getattr(module, architecture, None)
    return None


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without its progress bars and advice: stderr is for what vitcli says."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def _tower(model: Any) -> Any:
    """The image half of a model, the outermost of such names; the model itself where it has none.

    A model that holds two (Video-LLaVA) has the images' before the videos' in `TOWERS`.
    """
    halves = [
        (path.count("."), TOWERS.index(name), module)
        for path, module in model.named_modules()
        if (name := path.rpartition(".")[2]) in TOWERS and hasattr(module, "config")
    ]
    if halves:
        return min(halves, key=lambda half: half[:2])[2]
    for name in ("vit", "mae"):  # a pre-training model: its encoder
        if model.config.model_type == "vit_mae" and hasattr(model, name):
            return getattr(model, name)
    return model


JOINED_AFTER = {
    "glm4v_vision": "post_layernorm",
    "glm4v_moe_vision": "post_layernorm",
    "llama4_vision_model": "layernorm_post",
}
"""Towers that end by joining patches, and the norm of the tokens before that."""


class _TransformersForward:
    """Calls a tower with the arguments that its kind wants."""

    def __init__(self, model: Any, tower: Any) -> None:
        self.model, self.tower = model, tower
        self.takes = set(inspect.signature(tower.forward).parameters)
        self.patch = getattr(tower.config, "patch_size", 1)
        self.kind = tower.config.model_type
        self.normed: list[Tensor] = []
        if norm := JOINED_AFTER.get(self.kind):
            keep = self.normed.append
            getattr(tower, norm).register_forward_hook(lambda _, __, out: keep(out))

    @property
    def in_raster_order(self) -> bool:
        return "grid_thw" not in self.takes and self.kind != "llama4_vision_model"

    def attend(self, pixels: Tensor) -> Sequence[Tensor]:
        """Each block's attention weights, by the library's own explicit path."""
        before = self.tower.config._attn_implementation
        self.tower.set_attn_implementation("eager")
        try:
            pixels, given = self._given(pixels)
            found = self.tower(pixels, output_attentions=True, **given)
        finally:
            self.tower.set_attn_implementation(before)
        return getattr(found, "attentions", None) or ()

    def __call__(self, pixels: Tensor) -> tuple[Tensor | None, ...]:
        if "grid_thw" in self.takes:
            return self._cells(pixels)
        pixels, given = self._given(pixels)
        found = self.tower(pixels, **given)
        if self.normed:
            return self.arrange(self.normed.pop(), pixels), None, None
        pooled, output = getattr(found, "pooler_output", None), getattr(found, "logits", None)
        if hasattr(getattr(self.tower, "pooler", None), "dense"):
            pooled, output = None, pooled  # a head of its own stands after the pooling
        if pooled is not None and hasattr(self.model, "visual_projection"):
            output = self.model.visual_projection(pooled)
        return getattr(found, "last_hidden_state", None), pooled, output

    def _given(self, pixels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Pixels as the tower reads them, and its other arguments."""
        given: dict[str, Any] = {}
        if "spatial_shapes" in self.takes:
            pixels, given = self._flat(pixels)
        elif "interpolate_pos_encoding" in self.takes and not self._native(pixels):
            given["interpolate_pos_encoding"] = True
        if "noise" in self.takes:  # the order of its shuffle: none
            count = (pixels.shape[-2] // self.patch) * (pixels.shape[-1] // self.patch)
            given["noise"] = torch.arange(count, device=pixels.device).expand(len(pixels), -1)
        return pixels, given

    def arrange(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """(B, T, D), CLS first, in raster order; Qwen keeps one image's tokens cell by cell."""
        if self.kind == "llama4_vision_model":
            return tokens.roll(1, dims=1)
        if "grid_thw" not in self.takes:
            return tokens
        raster = torch.empty_like(tokens)
        raster[self._order(pixels)] = tokens
        return raster[None]

    def _native(self, pixels: Tensor) -> bool:
        size = getattr(self.tower.config, "image_size", None)
        return tuple(pixels.shape[-2:]) == ((size, size) if isinstance(size, int) else size)

    def _flat(self, pixels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Images of one size as rows of patches without padding, as NaFlex reads them."""
        p = pixels.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        rows, columns = p.shape[2:4]
        flat = p.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # (B, N, p p C)
        return flat, {
            "pixel_attention_mask": torch.ones(flat.shape[:2], dtype=torch.int64),
            "spatial_shapes": torch.tensor([[rows, columns]] * len(flat)),
        }

    def _merged(self, pixels: Tensor) -> Tensor:
        """The raster index of each token where 2 x 2 cells come one after another."""
        rows, columns = pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch
        merge = getattr(self.tower.config, "spatial_merge_size", 1)  # Kimi's are row by row
        cells = torch.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
        return cells.transpose(1, 2).flatten()

    def _order(self, pixels: Tensor) -> Tensor:
        """The raster index of each token as the blocks see them: by cell, and window by window."""
        order, merge = self._merged(pixels), getattr(self.tower.config, "spatial_merge_size", 1)
        window = getattr(self.tower.config, "window_size", 0) // merge // self.patch
        if window:
            rows, columns = (side // self.patch // merge for side in pixels.shape[-2:])
            at = torch.arange(rows * columns).reshape(rows, columns)
            tiles = [
                at[r : r + window, c : c + window].flatten()
                for r in range(0, rows, window)
                for c in range(0, columns, window)
            ]
            order = order.reshape(-1, merge * merge)[torch.cat(tiles)].flatten()
        return order

    def _cells(self, pixels: Tensor) -> tuple[Tensor | None, ...]:
        """One image through a tower that reads flat patches cell by cell (Qwen)."""
        if len(pixels) != 1:
            raise VitcliError("this tower reads one image at a time", "give one image")
        rows, columns = pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch
        p = pixels[0].unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        p = p.flatten(1, 2).transpose(0, 1)[self._merged(pixels)]  # (N, C, p, p)
        if times := getattr(self.tower.config, "temporal_patch_size", None):
            p = p.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1)
        found = self.tower(p, torch.tensor([[1, rows, columns]], device=pixels.device))
        if self.normed:
            return self.arrange(self.normed.pop(), pixels), None, None
        tokens = self.arrange(found.last_hidden_state, pixels)
        if not times:
            return tokens, None, None
        deep = getattr(found, "deepstack_features", None)
        return tokens, None, found.pooler_output[None], torch.stack(deep)[None] if deep else None


def _transformers_processor(
    place: str, more: Mapping[str, Any]
) -> Callable[[Image.Image], Tensor] | None:
    transformers: Any = importlib.import_module("transformers")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            place, backend="pil", trust_remote_code=False, **more
        )
    except (OSError, ValueError):
        return None

    def prepare(picture: Image.Image) -> Tensor:
        found = processor(picture, return_tensors="np")
        pixels = np.asarray(found["pixel_values"])
        if "image_grid_thw" in found:
            _, rows, columns = (int(n) for n in found["image_grid_thw"][0])
            merge, patch = processor.merge_size, processor.patch_size
            if pixels.ndim == 4:  # Kimi's patches, row by row
                merge = 1
            cells = pixels.reshape(
                rows // merge, columns // merge, merge, merge, 3, -1, patch, patch
            )[:, :, :, :, :, 0]
            pixels = cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        elif "spatial_shapes" in found:
            rows, columns = (int(n) for n in found["spatial_shapes"][0])
            patch = processor.patch_size
            cells = pixels[0, : rows * columns].reshape(rows, columns, patch, patch, 3)
            pixels = cells.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)
        else:
            tiles = pixels.reshape(-1, *pixels.shape[-3:])
            first = type(processor).__name__.startswith(FIRST_VIEW)
            pixels = tiles[0 if first else -1]  # the view of the whole picture
        return torch.from_numpy(np.ascontiguousarray(pixels))

    return prepare


# timm


def _timm(
    source: str, device: torch.device, dtype: torch.dtype, image_size: tuple[int, int] | None
) -> Backbone:
    place, more = _place(source)
    revision = f"@{more['revision']}" if more else ""
    kind = "local-dir" if Path(source).exists() else "hf-hub"
    timm: Any = importlib.import_module("timm")
    named = f"{kind}:{place}{revision}"
    model = timm.create_model(named, pretrained=True)
    published = model.pretrained_cfg
    if (
        image_size
        and published.get("fixed_input_size")
        and image_size != tuple(published["input_size"][-2:])
    ):
        model = timm.create_model(named, pretrained=True, img_size=image_size)
    name = model.pretrained_cfg.get("architecture") or type(model).__name__
    return _timm_backbone(model, name, device, dtype)


def _timm_backbone(model: Any, name: str, device: torch.device, dtype: torch.dtype) -> Backbone:
    model = model.to(device, dtype).eval()
    layers, blocks = _timm_blocks(model)

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return timm_outputs(model, pixels)

    height, width = _timm_size(model)
    return Backbone(
        "timm",
        name,
        model,
        blocks,
        device,
        dtype,
        _timm_processor(model),
        forward,
        once=model,
        attend=_timm_attention(model, blocks),
        layers=layers,
        channels_last=getattr(model, "output_fmt", "") == "NHWC",
        input_size=(height, width),
        prepared_by=model.pretrained_cfg,
    )


def _timm_size(model: Any) -> tuple[int, int]:
    patches = getattr(model, "patch_embed", None)
    size = getattr(patches, "img_size", None) or model.pretrained_cfg.get("input_size", (224, 224))
    height, width = tuple(size)[-2:]
    return int(height), int(width)


def _timm_blocks(model: Any) -> tuple[list[str], list[nn.Module]]:
    """The stages that timm names in `feature_info`, which are the blocks of a ViT."""
    features = getattr(model, "feature_info", None) or []
    names = [info["module"] for info in getattr(features, "info", features)]
    with contextlib.suppress(AttributeError):
        if names:
            return names, [model.get_submodule(name) for name in names]
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise VitcliError(
            f"timm {type(model).__name__}: names no layers", "use another architecture"
        )
    return [f"blocks.{i}" for i in range(len(blocks))], list(blocks)


def _timm_attention(
    model: Any, blocks: Sequence[nn.Module]
) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """By the blocks' explicit path, as `timm.utils.AttentionExtract` does; None without one."""
    modules: list[Any] = [getattr(block, "attn", None) for block in blocks]
    if not all(hasattr(m, "fused_attn") and hasattr(m, "attn_drop") for m in modules):
        return None

    def attend(pixels: Tensor) -> Sequence[Tensor]:
        found: list[Tensor] = []
        hooks, before = [], [module.fused_attn for module in modules]
        try:
            for module in modules:
                module.fused_attn = False
                keep = module.attn_drop.register_forward_hook(lambda _, __, out: found.append(out))
                hooks.append(keep)
            model.forward_features(pixels)
        finally:
            for module, fused in zip(modules, before, strict=True):
                module.fused_attn = fused
            for hook in hooks:
                hook.remove()
        return found

    return attend


def timm_outputs(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens or maps after the final norm, the pooled vector and the classifier's output."""
    tokens = model.forward_features(pixels)
    unpooled = hasattr(model, "head_dist") or getattr(model, "global_pool", None) == ""
    pooled = None if unpooled else model.forward_head(tokens, pre_logits=True)
    has_head = getattr(model, "num_classes", 0) > 0
    return tokens, pooled, model.forward_head(tokens) if has_head else None


def _timm_processor(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    data: Any = importlib.import_module("timm.data")
    transform: Callable[[Image.Image], Tensor] = data.create_transform(
        **data.resolve_model_data_config(model), is_training=False
    )
    return transform


# open_clip


def _open_clip(
    source: str, device: torch.device, dtype: torch.dtype, image_size: tuple[int, int] | None
) -> Backbone:
    open_clip: Any = importlib.import_module("open_clip")
    place, more = _place(source)
    if more:
        raise VitcliError(f"{source}: open_clip reads no revision", f"verify {place}")
    kind = "local-dir" if Path(source).exists() else "hf-hub"
    model, _, processor = open_clip.create_model_and_transforms(f"{kind}:{place}")
    model = model.to(device, dtype).eval()
    visual = model.visual
    trunk = getattr(visual, "trunk", None)
    if trunk is not None:
        layers, blocks = _timm_blocks(trunk)
    elif hasattr(visual, "transformer"):
        blocks = list(visual.transformer.resblocks)
        layers = [f"transformer.resblocks.{i}" for i in range(len(blocks))]
    else:  # its ResNet
        layers = [f"layer{i}" for i in range(1, 5)]
        blocks = [visual.get_submodule(name) for name in layers]

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if trunk is not None:
            tokens, pooled, output = timm_outputs(trunk, pixels)
            if visual.head:
                output = visual.head(trunk.forward_head(tokens))
            return tokens, pooled, output
        last: list[Tensor] = []
        hook = blocks[-1].register_forward_hook(lambda _, __, out: last.append(_first(out)))
        output = model.encode_image(pixels)
        hook.remove()
        if not hasattr(visual, "transformer"):
            return last[0], output, output
        tokens = last[0] if visual.final_ln_after_pool else visual.ln_post(last[0])
        return tokens, visual._pool(last[0])[0], output

    size = visual.image_size
    return Backbone(
        "open_clip",
        type(visual).__name__,
        visual,
        blocks,
        device,
        dtype,
        processor,
        forward,
        once=model.encode_image,
        layers=layers,
        channels_last=getattr(trunk, "output_fmt", "") == "NHWC",
        input_size=(size, size) if isinstance(size, int) else tuple(size),
        prepared_by=_config(source, "open_clip_config.json"),
    )
