"""How much of the slower stage's speed `vitcli embed` keeps.

    python experiments/throughput.py [--images 144] [--size 4000x3000] [--rounds 3] [--workers 1 2]
    python experiments/throughput.py --images 6000 --size 500x375 --only decoding null

Decoding alone (Pillow's own open, convert and resize in as many processes, nothing behind them),
encoding alone (the same batches, nothing before them), `vitcli embed` with an encoder of one tiny
block, which costs nothing, and the whole job, one after the other, several rounds, on the same
JPEGs, which it draws itself. Prints images per second (medians over rounds), the null encoder's
share of decoding alone, the job's share of the slower stage, and its share of what the cores
allow: an image costs processes / decoding + threads / encoding seconds of a core, whatever
overlaps with what. Then the main process's own time per image with the null encoder: the images
per second that one core of it could pass on. Last, what `Model.transform` costs a core per image,
with its pixels as normalized floats, beside Pillow alone. `--only` leaves stages out; a job starts
its processes and lists its files, which decoding alone does not: many small images spread that.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

# As in every command: threads that spin between batches would take the decoders' cores.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"} | os.environ

import torch
from PIL import Image

import vitcli

sys.path.insert(0, str(Path(__file__).parent))
from embedding import draw

STAGES = ("decoding", "encoding", "null", "embed")
NULL = {"encoder.patch_size": 32, "encoder.hidden": 8, "encoder.depth": 1, "encoder.heads": 1}


def prepared(path: str, size: tuple[int, int]) -> tuple[int, int]:
    """What Pillow itself takes to open, decode and resize an image."""
    with Image.open(path) as image:
        return image.convert("RGB").resize(size, Image.Resampling.BILINEAR).size


def core_seconds(ours: bool, paths: list[str], size: tuple[int, int]) -> float:
    """Processor time per image, for a process of its own: `Model.transform` or Pillow alone."""
    model = vitcli.load(set=NULL | {"encoder.image_size": size}, device="cpu")

    def once() -> float:
        start = time.process_time()
        for path in paths:
            if ours:
                model.transform(path)
            else:
                prepared(path, size)
        return time.process_time() - start

    once()
    return min(once() for _ in range(3)) / len(paths)


def decoding_alone(paths: list[str], size: tuple[int, int], rounds: int) -> list[list[float]]:
    """Per round the processor time of an image: Pillow's, and that of `Model.transform`."""
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        for ours in (False, True):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[ours].append(pool.apply(core_seconds, (ours, paths, size)))
    return found


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=144)
    parser.add_argument("--size", default="4000x3000", help="width x height in pixels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=sorted({max(1, cores - 1), cores})
    )
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--preset", default="vit-ti16")
    asked = parser.parse_args()
    model = vitcli.load(asked.preset, device="cpu")
    null = vitcli.load(set={**NULL, "encoder.mlp_hidden": 8}, device="cpu")
    threads = torch.get_num_threads()
    main_s: list[float] = []

    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "jpegs", Path(name) / "out"
        source.mkdir()
        width, height = map(int, asked.size.split("x"))
        draw(source, asked.images, (width, height), "jpg", distinct=6)
        paths = sorted(map(str, source.iterdir()))
        size = model.input_size

        def decoding(workers: int) -> None:
            with multiprocessing.get_context("spawn").Pool(workers) as pool:
                pool.map(partial(prepared, size=size), paths[:workers])  # started and warm
                start.append(time.perf_counter())
                pool.map(partial(prepared, size=size), paths, chunksize=1)

        pixels = torch.randn(16, 3, *size)

        @torch.inference_mode()
        def encoding(workers: int) -> None:
            for first in range(0, len(paths), 16):
                model.encoder(pixels[: len(paths) - first])

        def job(encoder: vitcli.Model, workers: int) -> None:
            before = time.process_time()
            result = vitcli.embed(encoder, source, out, workers=workers, part_rows=asked.images)
            assert result.ok == asked.images
            if encoder is null:
                main_s.append((time.process_time() - before) / asked.images)
            shutil.rmtree(out)

        stages = {
            "decoding": decoding,
            "encoding": encoding,
            "null": partial(job, null),
            "embed": partial(job, model),
        }
        rates: dict[tuple[int, str], list[float]] = {
            (workers, stage): [] for workers in asked.workers for stage in stages
        }
        pillow, own_way = decoding_alone(paths[:6], size, asked.rounds)
        start: list[float] = []
        for _ in range(asked.rounds):
            for (workers, stage), measured in rates.items():
                if stage not in asked.only:
                    measured.append(math.nan)
                    continue
                start.append(time.perf_counter())
                stages[stage](workers)
                measured.append(asked.images / (time.perf_counter() - start[-1]))

    print(
        f"{asked.preset}, {asked.images} JPEGs of {asked.size}, {cores} cores, "
        f"encoder threads: {threads}, {asked.rounds} rounds, img/s"
    )
    print(
        "workers  decoding  encoding  null encoder  of decoding  vitcli embed  of the slower stage"
        "  of what the cores allow"
    )
    for workers in asked.workers:
        decode, encode, nothing, both = (
            statistics.median(rates[workers, stage]) for stage in stages
        )
        most = allowed(decode, encode, workers=workers, threads=threads, cores=cores)
        print(
            f"{workers:7} {decode:9.2f} {encode:9.2f} {nothing:13.2f} {nothing / decode:12.2f} "
            f"{both:13.2f} {both / min(decode, encode):20.2f} {both / most:24.2f}"
        )
    own = statistics.median(main_s or [math.nan])
    print(f"main process: {own * 1e3:.2f} ms per image, so {1 / own:.0f} img/s on one core of it")
    ratios = [b / a for a, b in zip(pillow, own_way, strict=True)]
    print(
        f"transform: {statistics.median(own_way) * 1e3:.2f} ms of a core per image, "
        f"{statistics.median(ratios):.2f} of Pillow's open, convert and resize "
        f"({min(ratios):.2f} to {max(ratios):.2f} over rounds)"
    )


def allowed(decode: float, encode: float, *, workers: int, threads: int, cores: int) -> float:
    """Images per second that no overlap exceeds: the slower stage's rate, and the cores' time."""
    core_seconds = min(workers, cores) / decode + min(threads, cores) / encode
    return min(decode, encode, cores / core_seconds)


if __name__ == "__main__":
    main()
