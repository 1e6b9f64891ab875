"""One process or many: plain DistributedDataParallel under torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitcli.config.training import launched
from vitcli.errors import VitcliError


@dataclass(frozen=True)
class World:
    """This process among all: the first alone prints and writes."""

    rank: int = 0
    size: int = 1
    device: str | torch.device = "cpu"
    """Where the backend's collectives work: NCCL has none for tensors on the CPU."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` items; the parts follow each other."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place, on whatever device `values` is."""
        if self.size > 1:
            there = values.to(self.device)
            dist.all_reduce(there)
            if there is not values:
                values.copy_(there)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank; over this process's own device, see `world`."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        if self.size == 1:
            return model
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)


def local_device(device: torch.device) -> torch.device:
    """This process's own GPU, where torchrun started several on a machine.

    Raises:
        VitcliError: one GPU is named for several processes, or there are too few.
    """
    launch = launched()
    if device.type != "cuda" or launch.size == 1:
        return device
    if device.index is not None:
        raise VitcliError(
            f"--device {device}: {launch.size} processes cannot share one GPU", "use --device cuda"
        )
    if launch.local_rank >= torch.cuda.device_count():
        raise VitcliError(
            f"process {launch.rank} has no GPU (got {torch.cuda.device_count()} on this machine)",
            "torchrun --nproc-per-node the number of GPUs",
        )
    return torch.device("cuda", launch.local_rank)


@contextmanager
def world(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started; alone where there are none.

    `device` is this process's own, from `local_device`.

    Raises:
        VitcliError: the processes cannot meet.
    """
    size = launched().size
    if size == 1:
        yield World()
        return
    on_gpu = device.type == "cuda"
    if on_gpu:  # object collectives and DDP's buffers use the current device
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise VitcliError(
            f"the {size} processes cannot connect: {reason}",
            "PYTHONSAFEPATH=1 torchrun --standalone --nproc-per-node N -m vitcli ...",
            exit_code=1,
        ) from error
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device if on_gpu else "cpu")
    finally:
        dist.destroy_process_group()
