"""A vision encoder of another library, unchanged, and what is common to the libraries' sources.

B images, T tokens of which prefix tokens come first, D channels. Nothing here depends on vitcli's
own encoder; no library is allowed to run code that comes with a checkpoint.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitcli.config.variants import Cost
from vitcli.config.yaml import read_json
from vitcli.errors import VitcliError, install_extra


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
    """A picture to (3, height, width); None where the source gives none."""
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
                {layer: self.arrange(first_tensor(given if out is None else out), pixels)}
            )

        hooks = [self.blocks[i - 1].register_forward_hook(keep(i)) for i in layers if i > 0]
        if 0 in layers:
            hooks.append(self.blocks[0].register_forward_pre_hook(keep(0)))
        try:
            with no_warnings():
                found = self.forward(pixels)
        finally:
            for hook in hooks:
                hook.remove()
        return Seen(kept, *found)


def first_tensor(value: Any) -> Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    found: Tensor = value.detach()
    return found


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def library_errors(library: str, source: str, hint: str) -> Iterator[None]:
    """What a library raises, in one line."""
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise VitcliError(
            f"{source}: needs {library}, which is not installed", install_extra("reference")
        ) from error
    try:
        with no_warnings():
            yield
    except VitcliError:
        raise
    except Exception as error:  # each library raises its own many errors
        lines = str(error).strip().splitlines() or [""]
        raise VitcliError(
            f"{source}: {library} cannot load it ({type(error).__name__}: {lines[0]})", hint
        ) from error


@contextmanager
def input_errors(backbone: Backbone, size: tuple[int, int]) -> Iterator[None]:
    """What a library raises at images of a (height, width) that it does not run, in one line."""
    try:
        with no_warnings():
            yield
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise VitcliError(
            f"{backbone.library}:{backbone.name}: {backbone.library} cannot run an input of "
            f"{size[0]}x{size[1]} px ({lines[0]})",
            "leave out --image-size",
        ) from error


def source_config(source: str, name: str) -> dict[str, Any]:
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


def source_place(source: str) -> tuple[str, dict[str, Any]]:
    """A directory, or a hub id and its revision, as `from_pretrained` takes them."""
    path = Path(source)
    if path.exists():
        return str(path if path.is_dir() else path.parent), {}
    repo, _, revision = source.partition("@")
    return repo, {"revision": revision} if revision else {}


@dataclass(frozen=True)
class ModuleCost:
    """A part of a module by its own name."""

    name: str
    cost: Cost
    is_layer: bool


def module_costs(backbone: Backbone, size: tuple[int, int]) -> list[ModuleCost]:
    """Parameters and multiply-accumulates of each layer and of each part beside them, in order.

    Multiply-accumulates are half of what torch's FlopCounterMode counts while the library runs one
    image of this (height, width). The costs sum to the module's.
    """
    module = backbone.module
    names = {id(part): name for name, part in module.named_modules()}
    layers = [names[id(block)] for block in backbone.blocks]
    tops = [name for name, _ in module.named_children()]

    def owner(name: str) -> str:
        inside = (one for one in layers if f"{name}.".startswith(f"{one}."))
        return next(inside, name.partition(".")[0])

    parts = dict.fromkeys(owner(name) for name, _ in module.named_modules() if name)
    counts = {name: [0, 0, 0] for name in parts}
    for name, parameter in module.named_parameters():
        one = counts.setdefault(owner(name), [0, 0, 0])
        one[0] += parameter.numel()
        one[1] += parameter.numel() if name.endswith("bias") and parameter.ndim == 1 else 0
    image = torch.zeros(1, 3, *size, device=backbone.device, dtype=backbone.dtype)
    watched = list(dict.fromkeys([*layers, *tops]))
    with _counted(module) as counter, ExitStack() as hooks:
        began: dict[str, int] = {}
        for name in watched:
            part = module.get_submodule(name)

            def start(*_: Any, name: str = name) -> None:
                began[name] = counter.get_total_flops()

            def end(*_: Any, name: str = name) -> None:
                spent = counter.get_total_flops() - began.pop(name)
                counts.setdefault(name, [0, 0, 0])[2] += spent
                outer = name.partition(".")[0]
                if outer in began:  # it is running, and counts this too
                    counts[outer][2] -= spent

            hooks.callback(part.register_forward_pre_hook(start).remove)
            hooks.callback(part.register_forward_hook(end).remove)
        (backbone.once or backbone.forward)(image)
        total = counter.get_total_flops()
    rest = total - sum(flops for *_, flops in counts.values())
    if rest:
        counts["outside of these"] = [0, 0, rest]
    return [
        ModuleCost(name, Cost(parameters, biases, flops // 2), name in layers)
        for name, (parameters, biases, flops) in counts.items()
        if parameters or flops or name in layers
    ]


@contextmanager
def _counted(module: nn.Module) -> Iterator[FlopCounterMode]:
    """Counts operations; a fused attention is not one that torch counts on a CPU."""
    trained = [p for p in module.parameters() if p.requires_grad]
    try:
        for parameter in trained:  # the counter asks each input for its gradient's function
            parameter.requires_grad_(False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as found:
            yield found
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def macs_per_image(backbone: Backbone, size: tuple[int, int]) -> int:
    """Multiply-accumulates of one image of this (height, width), by torch's counter."""
    return sum(one.cost.macs for one in module_costs(backbone, size))
