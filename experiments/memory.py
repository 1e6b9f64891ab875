"""Memory of `vitcli embed FOLDER --out DIR` over many small images.

    python experiments/memory.py [--images 50000]

Draws the images in a temporary folder, encodes them with a tiny encoder (so that what is measured
is the job, not the model) and prints resident memory of the process and of its decoding processes
as the rows go by. What it must show: the last lines are the first ones.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

import vitcli

TINY = {"patch_size": 8, "hidden": 24, "depth": 1, "heads": 3, "mlp_hidden": 40}


class Memory:
    """Prints memory about twelve times a job."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.printed = -1

    def line(self, text: str) -> None:
        print(text, flush=True)

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        if done * 12 // total == self.printed:
            return
        self.printed = done * 12 // total
        ours = self.process.memory_info().rss
        workers = sum(child.memory_info().rss for child in self.process.children())
        print(
            f"{done:7,} rows: {ours >> 20} MiB, decoding processes {workers >> 20} MiB", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=50_000)
    asked = parser.parse_args()
    settings = {f"encoder.{key}": value for key, value in TINY.items()}
    model = vitcli.load(set=settings, image_size=16, device="cpu")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "images"
        source.mkdir()
        for number in range(asked.images):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(source / f"{number:06d}.jpg")
        result = vitcli.embed(model, source, Path(name) / "out", progress=Memory())
    print(f"{result.ok:,} of {result.rows:,} encoded, {result.images_per_s:.0f} img/s")


if __name__ == "__main__":
    main()
