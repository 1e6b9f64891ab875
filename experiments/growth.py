"""Time and memory against tokens, batch, depth and number of images, with exponents.

    python experiments/growth.py                                the whole table: about half an hour
    python experiments/growth.py --part tokens --part batch     some of it
    python experiments/growth.py --listed 1000 10000 --encoded 1000 10000

A row is one size. Time and memory of a forward pass are those of `vitcli profile`: the median of
--rounds steps, and the peak of a step in a process of its own. The exponent is the slope between a
row and the one before on logarithmic axes: 1 is linear, 2 quadratic. Images are listed by an
`embed` whose shard has no part to encode, from folders of 1,000 empty files; they are encoded by a
whole `embed`. Both have an encoder of one tiny block and the peak of the main process, torch
included; encoding also its processor time per image.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As in every command, before torch is loaded.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"} | os.environ

import numpy as np
from PIL import Image

import vitcli

PARTS = ("tokens", "batch", "depth", "listed", "encoded")
SIDES = (224, 384, 512, 768, 1024)
BATCHES = (1, 4, 16, 64, 256)
DEPTHS = (3, 6, 12, 24, 48)
NULL = {"patch_size": 32, "hidden": 8, "depth": 1, "heads": 1, "mlp_hidden": 8}
MIB = 2**20
Row = tuple[str, int, float, int | None, str]
"""What grows, its size, seconds, peak bytes, a remark."""


def forward(
    what: str, size: int, rounds: int, side: int = 224, batch: int = 1, depth: int = 12
) -> Row:
    """The row of a forward pass of a ViT-Ti/16."""
    model = vitcli.load("vit-ti16", image_size=side, set={"encoder.depth": depth}, device="cpu")
    (run,) = vitcli.profile(model, batches=[batch], runs=rounds).runs
    seconds = run.wall_s.median if run.wall_s else math.nan
    row = (what, size, seconds, run.peak_bytes, run.error or "")
    say(row)
    return row


def tokens(side: int) -> int:
    return 1 + (side // 16) ** 2


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def null() -> vitcli.Model:
    """An encoder of one tiny block."""
    return vitcli.load(set={f"encoder.{key}": value for key, value in NULL.items()}, device="cpu")


def listed(folder: str, count: int) -> Row:
    """`count` files listed, cut into parts and written, as a job begins."""
    model = null()
    with tempfile.TemporaryDirectory() as out:
        beyond = (count + 1, count + 1)  # more shards than parts: the last has none
        result = vitcli.embed(model, folder, out, shard=beyond)
    left_out = result.duplicates, result.skipped_files
    assert left_out == (0, ()), f"{left_out} left out"
    return "images listed", count, result.wall_s, peak(), ""


def encoded(folder: str, count: int) -> Row:
    """A whole job with an encoder of one tiny block."""
    model = null()
    with tempfile.TemporaryDirectory() as out:
        used = time.process_time()
        result = vitcli.embed(model, folder, out)
        used = time.process_time() - used
    assert result.ok == count, f"{result.ok} of {count}"
    remark = f"{used / count * 1e3:.2f} ms of main process"
    return "images encoded", count, result.wall_s, peak(), remark


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    with contextlib.suppress(OSError):  # Linux: ru_maxrss begins at the parent's
        status = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in status)
        return int(fields["VmHWM"].split()[0]) * 1024
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
        rows += [forward("tokens", tokens(n), asked.rounds, side=n) for n in asked.sides]
    if "batch" in parts:
        rows += [forward("batch", n, asked.rounds, batch=n) for n in asked.batches]
    if "depth" in parts:
        rows += [forward("depth", n, asked.rounds, depth=n) for n in asked.depths]
    if "listed" in parts:
        rows += jobs(asked.listed, b"", listed)
    if "encoded" in parts:
        rows += jobs(asked.encoded, jpeg(), encoded)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    report(rows)


if __name__ == "__main__":
    main()
