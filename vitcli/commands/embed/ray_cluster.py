"""The parts of a job by Ray Data: actors that hold the encoder and decode beside it."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import socket
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch

from vitcli.checkpoints.weights import weights_digest
from vitcli.commands.embed.analysis import Share, Work, decode_pool, partial_rows
from vitcli.commands.embed.job import Job
from vitcli.commands.embed.parts import OK, Rows
from vitcli.commands.embed.result import FolderOptions, recalled, remembered
from vitcli.commands.embed.rows import PartEncoder
from vitcli.errors import VitcliError, install_extra
from vitcli.images.sources import Entry
from vitcli.loading import load_model
from vitcli.model import Model

_START = "ray start --head there, or leave out --address"
_STORE_BYTES = 512 * 2**20


class PartActor:
    """One encoder and its decoding processes, on one GPU or one group of cores."""

    def __init__(
        self,
        request: dict[str, Any],
        options: FolderOptions,
        threads: int,
        settings: dict[str, Any],
    ) -> None:
        torch.set_num_threads(threads)
        model = load_model(recalled(request), by_library=True)
        if weights_digest(model.encoder) != settings["weights_sha256"]:
            raise ValueError(f"{model.weights}: other weights on this machine")
        self.encoder = PartEncoder(model, options, settings["columns"], lambda *_: None)
        self.pool = decode_pool(model, options, options.workers or threads)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Fill the rows of a part that are not `ok` yet."""
        rows: Rows
        entries: list[Entry]
        rows, entries = pickle.loads(row["work"])
        pairs = zip(entries, rows.status, strict=True)
        todo = [entry for entry, status in pairs if status != OK]
        done = self.encoder.encode(rows, self.pool.decode(todo))
        return {"part": row["part"], "rows": pickle.dumps(done)}


def on_ray(address: str | None) -> Work:
    """How `encode_folder` has its parts made on a cluster: at `address`, or one of its own here.

    The images must be found at the same absolute paths on every machine; the output is written
    here. The part of an actor that dies is given to a new one.
    """

    def work(
        model: Model,
        job: Job,
        parts: Sequence[tuple[int, bool]],
        options: FolderOptions,
        share: Share,
    ) -> Generator[tuple[int, Rows], None, None]:
        if not parts:
            return
        ray = _connect(address)
        try:
            yield from _spread(ray, model, job, parts, options)
        finally:
            ray.shutdown()

    return work


def _spread(
    ray: Any,
    model: Model,
    job: Job,
    parts: Sequence[tuple[int, bool]],
    options: FolderOptions,
) -> Iterator[tuple[int, Rows]]:
    """One row of a Ray dataset a part, mapped by a pool of actors; rows come as they finish."""
    there = ray.cluster_resources()
    gpu = model.device.type == "cuda"
    places = int(there.get("GPU", 0) if gpu else there.get("CPU", 1) // job.threads)
    needs = {"num_gpus": 1} if gpu else {"num_cpus": min(job.threads, there.get("CPU", 1))}
    assert model.request is not None  # `encode_folder` has refused it
    same = remembered(dataclasses.replace(model.request, device=model.device.type))
    sent = dataclasses.replace(options, fail_fast=False)  # decided here, where rows arrive
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.max_errored_blocks = 0
    work = [{"part": part, "work": _packed(job, part, retry)} for part, retry in parts]
    dataset = ray.data.from_items(work, override_num_blocks=len(work)).map(
        PartActor,
        fn_constructor_args=(same, sent, job.threads, job.settings),
        compute=ray.data.ActorPoolStrategy(size=max(1, min(places, len(parts)))),
        **needs,
    )
    try:
        for row in dataset.iter_rows():
            yield row["part"], pickle.loads(row["rows"])
    except ray.exceptions.RayError as error:
        raise VitcliError(f"a worker failed: {_reason(error)}", exit_code=1) from error


def _packed(job: Job, part: int, retry: bool) -> bytes:
    """What an actor is sent of a part; Ray Data's blocks are Arrow, which has no such type."""
    return pickle.dumps((partial_rows(job, part, retry), job.inputs.read(part)))


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # auto, local
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise VitcliError(f"no Ray cluster at {address}: {error}", _START, exit_code=1) from error


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _connect(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its log files keep the rest
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise VitcliError("--cluster ray needs Ray", install_extra("ray")) from error
    if address:
        _check_reachable(address)
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        how |= {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(**how) if address is None else ray.init(address, **how)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise VitcliError(
            f"no Ray cluster at {address or 'this machine'}: {_reason(error)}",
            _START,
            exit_code=1,
        ) from error
    return ray
