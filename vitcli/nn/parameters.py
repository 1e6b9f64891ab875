"""What a module says of its own parameters: how they start, and which of them are matrices.

A module of the encoder with parameters of its own is a `Part`. The rules for torch's own layers are
here; no other place knows a module by its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

Scheme = Callable[[Tensor, float, torch.Generator], object]


class Part(nn.Module):
    """A module that says how its own parameters start and which of them decay."""

    matrices: ClassVar[tuple[str, ...]] = ()
    """Parameters of linear maps: drawn by the config's scheme and decayed. All others are not."""

    def reset(self, std: float, generator: torch.Generator) -> None:
        """Fresh values of the parameters that are not matrices; zeros unless a class says more."""
        for name, parameter in self.named_parameters(recurse=False):
            if name not in self.matrices:
                parameter.zero_()


def trunc_normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal of mean 0, drawn again where it falls outside [-2, 2].

    The distribution of `nn.init.trunc_normal_` at a quarter of its time: no inverse error function.
    """
    weight.normal_(std=std, generator=generator)
    while weight.numel() and max(abs(edge.item()) for edge in weight.aminmax()) > 2:
        outside = weight.abs() > 2
        weight[outside] = weight.new_empty(int(outside.sum())).normal_(std=std, generator=generator)


def xavier_uniform(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Glorot and Bengio 2010, equation 16; a convolution counts as the linear map of a patch."""
    nn.init.xavier_uniform_(weight.flatten(1), generator=generator)


SCHEMES: dict[str, Scheme] = {"trunc_normal": trunc_normal, "xavier_uniform": xavier_uniform}


@torch.no_grad()
def initialize(encoder: nn.Module, scheme: str, std: float, seed: int) -> None:
    """Draw every parameter of a CPU encoder in module order from one generator.

    Matrices follow `scheme` (a fused q, k, v projection is one matrix, as in
    `torch.nn.MultiheadAttention`); a Part resets the rest of its own. Of torch's layers biases
    are 0, norms 1 and 0.

    Raises:
        TypeError: a module with parameters of its own that is neither a Part nor a linear map,
            a convolution or a norm.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = SCHEMES[scheme]
    for module in encoder.modules():
        for name in matrices(module):
            draw(module.get_parameter(name), std, generator)
        if isinstance(module, Part):
            module.reset(std, generator)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.ParameterDict | nn.ParameterList):
            continue  # the module that owns it has reset it
        elif list(module.parameters(recurse=False)):
            raise TypeError(f"{type(module).__name__}: not a Part, so nothing says its start")


def matrices(module: nn.Module) -> tuple[str, ...]:
    """The module's own parameters that are linear maps."""
    if isinstance(module, Part):
        return module.matrices
    return ("weight",) if isinstance(module, nn.Linear | nn.Conv2d) else ()


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay is for: matrices, and nothing else.

    So norms, biases, LayerScale, tokens, probes and position tables have none, and neither has a
    parameter that no class has called a matrix.
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in matrices(module)
    }
