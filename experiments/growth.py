"""Time and memory against tokens, batch, depth and number of images, with exponents.

    python experiments/growth.py                                the whole table: about half an hour
    python experiments/growth.py --part tokens --part batch     some of it
    python experiments/growth.py --listed 1000 10000 --encoded 1000 10000

A row is one size. Time is the fastest of interleaved rounds, memory the peak of a step in a process
of its own. The exponent is the slope between a row and the one before on logarithmic axes: 1 is
linear, 2 quadratic. Images are listed as `vitcli embed` lists them, from folders of 1,000 empty
files; they are encoded by a whole `embed` with an encoder of one tiny block, with the peak of the
main process and its own processor time per image.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PARTS = ("tokens", "batch", "depth", "listed", "encoded")
SIDES = (224, 384, 512, 768, 1024)
BATCHES = (1, 4, 16, 64, 256)
DEPTHS = (3, 6, 12, 24, 48)
NULL = {"patch_size": 32, "hidden": 8, "depth": 1, "heads": 1, "mlp_hidden": 8}
MIB = 2**20
Row = tuple[str, int, float, int | None, str]
"""What grows, its size, seconds, peak bytes, a remark."""


def forward(
    what: str, sizes: Sequence[int], rounds: int, make: Callable[[int], tuple[Any, Any]]
) -> Iterator[Row]:
    """Rows of a forward pass: `make` gives the model and its images for a size."""
    from vitcli.commands.profile.machine import peak_alone, timed
    from vitcli.commands.profile.measure import lone_step

    best = dict.fromkeys(sizes, math.inf)
    peaks: dict[int, int | None] = {}
    for number in range(rounds + 1):
        for size in sizes:
            model, images = make(size)
            if number == 0:  # not counted: the first call makes kernels
                peaks[size] = peak_alone(lone_step, model.engine, model.encoder, images, False)
                model.runner(images)
            else:
                seconds = timed(lambda m=model, x=images: m.runner(x), model.device)
                best[size] = min(best[size], seconds)
    for size in sizes:
        yield what, size, best[size], peaks[size], ""


def step(side: int = 224, batch: int = 1, depth: int = 12) -> tuple[Any, Any]:
    """A ViT-Ti/16 of that depth and its images."""
    import vitcli
    from vitcli.commands.profile.measure import random_images

    model = vitcli.load("vit-ti16", image_size=side, set={"encoder.depth": depth}, device="cpu")
    return model, random_images(model, batch)


def tokens(side: int) -> int:
    return 1 + (side // 16) ** 2


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def listed(folder: str, count: int) -> Row:
    """Names of `count` files listed, cut into parts and written, as a job begins."""
    from vitcli.commands.embed.inputs import Listing, write_inputs

    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        found = write_inputs(Listing((folder,)), Path(out), 4096).count
        seconds = time.perf_counter() - start
    assert found == count, f"{found} files of {count}"
    return "images listed", count, seconds, peak(), ""


def encoded(folder: str, count: int) -> Row:
    """A whole job with an encoder of one tiny block."""
    import vitcli

    settings = {f"encoder.{key}": value for key, value in NULL.items()}
    model = vitcli.load(set=settings, device="cpu")
    with tempfile.TemporaryDirectory() as out:
        start, used = time.perf_counter(), time.process_time()
        result = vitcli.embed(model, folder, Path(out) / "out")
        seconds, used = time.perf_counter() - start, time.process_time() - used
    assert result.ok == count, f"{result.ok} of {count}"
    return "images encoded", count, seconds, peak(), f"{used / count * 1e3:.2f} ms of main process"


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def files(folder: Path, content: bytes, first: int, last: int) -> None:
    """Files of one content, a thousand to a folder."""
    for number in range(first, last):
        path = folder / f"{number // 1000:05d}" / f"{number:07d}.jpg"
        if number % 1000 == 0 or number == first:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def jobs(counts: Sequence[int], content: bytes, measure: Callable[[str, int], Row]) -> list[Row]:
    """A row for each count, smallest first, over one folder that grows."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for before, count in itertools.pairwise([0, *sorted(counts)]):
            files(Path(name), content, before, count)
            rows.append(in_child(measure, name, count))
            say(rows[-1])
    return rows


def jpeg() -> bytes:
    """A small picture of noise."""
    with tempfile.SpooledTemporaryFile() as file:
        pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG")
        file.seek(0)
        return file.read()


def say(row: Row) -> None:
    print(f"{row[0]} {row[1]:,}: {row[2]:.4g} s", file=sys.stderr, flush=True)


def exponents(rows: Sequence[tuple[int, float | None]]) -> list[float | None]:
    """The slope between each size and the one before, None for the first and where none is."""
    slopes: list[float | None] = [None]
    for (size, value), (next_size, next_value) in itertools.pairwise(rows):
        known = bool(value and next_value)
        ratio = math.log(next_value / value) if value and next_value else 0.0
        slopes.append(ratio / math.log(next_size / size) if known else None)
    return slopes


def report(rows: Sequence[Row]) -> None:
    """Markdown on stdout."""
    print("| grows | | time (s) | exponent | peak (MiB) | exponent | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for what, group in itertools.groupby(rows, key=lambda row: row[0]):
        same = [*group]
        times = exponents([(size, seconds) for _, size, seconds, *_ in same])
        peaks = exponents([(size, memory) for _, size, _, memory, _ in same])
        for (_, size, seconds, memory, remark), a, b in zip(same, times, peaks, strict=True):
            slopes = ["" if slope is None else f"{slope:.2f}" for slope in (a, b)]
            shown = "" if memory is None else f"{memory / MIB:.1f}"
            cells = [what, f"{size:,}", f"{seconds:.4g}", slopes[0], shown, slopes[1], remark]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--listed", type=int, nargs="+", default=[10**n for n in range(3, 7)])
    parser.add_argument("--encoded", type=int, nargs="+", default=[10**n for n in range(3, 6)])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    asked = parser.parse_args()
    parts = asked.part or PARTS
    rows: list[Row] = []
    if "tokens" in parts:
        measured = forward("tokens", asked.sides, asked.rounds, lambda side: step(side=side))
        rows += [(what, tokens(side), *rest) for what, side, *rest in measured]
    if "batch" in parts:
        rows += forward("batch", asked.batches, asked.rounds, lambda batch: step(batch=batch))
    if "depth" in parts:
        rows += forward("depth", asked.depths, asked.rounds, lambda depth: step(depth=depth))
    if "listed" in parts:
        rows += jobs(asked.listed, b"", listed)
    if "encoded" in parts:
        rows += jobs(asked.encoded, jpeg(), encoded)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    report(rows)


if __name__ == "__main__":
    main()
