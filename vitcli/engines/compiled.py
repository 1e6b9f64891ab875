"""torch.compile, on a CPU with the parameters frozen into the code."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch
from torch import Tensor
from torch._inductor import config as inductor

from vitcli.engines.engine import Engine
from vitcli.engines.graph import Graph, plain_copy
from vitcli.engines.onednn import accelerate
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, VisionEncoder


def prepare(
    encoder: VisionEncoder, images: Tensor, layers: bool, batches: Collection[int]
) -> Engine:
    """Compiled for one image and for any larger batch, as far as `batches` need them.

    Raises:
        VitcliError: this machine or this encoder cannot be compiled.
    """
    start = time.perf_counter()
    frozen = images.device.type == "cpu"
    graph = Graph(plain_copy(encoder), images, layers)
    accelerate(graph.encoder.vit)
    compiled = torch.compile(graph, fullgraph=True)

    @torch.no_grad()
    def run(images: Tensor) -> tuple[EncoderOutput, list[Tensor]]:
        if images.shape[0] > 1:
            torch._dynamo.mark_dynamic(images, 0)
        # as an option of torch.compile it comes too late: tracing asks for it as well
        with inductor.patch(freezing=frozen):
            return graph.read(compiled(images))

    try:
        for size in sorted({min(batch, 2) for batch in batches}):
            run(images[:1].expand(size, -1, -1, -1).contiguous())
    except Exception as error:  # whatever the compiler chain raises: its causes are the machine's
        raise VitcliError(
            f"--engine compile: {type(error).__name__}: {error}".splitlines()[0],
            "torch.compile needs a C++ compiler on the CPU; --engine eager and onnx do not",
            exit_code=1,
        ) from error
    note = "torch.compile" + (", parameters frozen" if frozen else "")
    return Engine("compile", run, torch.__version__, time.perf_counter() - start, note)
