"""Fresh weights from a seed: the same on every run and every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitcli.nn.attention import QueryValueBiasLinear
from vitcli.nn.block import LayerScale
from vitcli.nn.encoder import VisionEncoder, VisionFrontEnd
from vitcli.nn.pooling import MapPooling
from vitcli.nn.positions import LearnedPosition

Scheme = Callable[[Tensor, float, torch.Generator], object]


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
def initialize(encoder: VisionEncoder, scheme: str, std: float, seed: int) -> None:
    """Draw every parameter of a CPU encoder in module order from one generator.

    Matrices follow `scheme` (a fused q, k, v projection is one matrix, as in
    `torch.nn.MultiheadAttention`), tokens and tables a truncated normal of `std`; biases are 0,
    norms 1 and 0, LayerScale its initial value.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = SCHEMES[scheme]
    for module in encoder.modules():
        match module:
            case nn.Linear() | nn.Conv2d() | QueryValueBiasLinear():
                draw(module.weight, std, generator)
                for name, parameter in module.named_parameters(recurse=False):
                    if name != "weight":
                        parameter.zero_()
            case nn.LayerNorm() | nn.RMSNorm():
                module.reset_parameters()
            case LayerScale():
                module.gamma.fill_(module.initial)
            case LearnedPosition():
                module.table.copy_(module.initial_table(std, generator))
            case VisionFrontEnd():
                for tokens in module.prefix.values():
                    trunc_normal(tokens, std, generator)
            case MapPooling():
                trunc_normal(module.probe, std, generator)
            case nn.ParameterDict():
                pass  # the front end that owns it has drawn it
            case _:
                assert not list(module.parameters(recurse=False)), type(module)
