"""One process or many: plain DistributedDataParallel under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitcli.errors import VitcliError


@dataclass(frozen=True)
class World:
    """This process among all: the first alone prints and writes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` items; the parts follow each other."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank."""
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
    """This process's own GPU, where torchrun started several on a machine."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


@contextmanager
def world(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started; alone where there are none.

    Raises:
        VitcliError: the processes cannot meet.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise VitcliError(
            f"the {size} processes cannot meet: {reason}",
            "start them with torchrun --standalone --nproc-per-node N -m vitcli ...",
            exit_code=1,
        ) from error
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
