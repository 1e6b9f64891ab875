"""`vitcli embed` beside the script that most people write: timm, a DataLoader, Parquet.

    python experiments/embedding.py [--images 2000] [--size 500x375] [--format jpg] [--rounds 3]
    python experiments/embedding.py --images 96 --size 4000x3000 --preset vit-b16 \\
        --timm vit_base_patch16_224 --own-workers 1 2 3 --own-threads 1 2

Draws the images, then runs both as whole processes in turn, the script with each number of
DataLoader workers asked for. Both have fresh weights of one ViT-Ti/16 (or `--preset` and its
`--timm` name), read the same files and write 224-pixel float32 embeddings as Parquet. Prints the
seconds of each (median over rounds, smallest and largest), how many times faster `vitcli embed`
at its defaults is than the script at its best, and, with `--own-workers` or `--own-threads`, than
itself at the best of these; last, these ratios as a row of a table: wall and processor time beside
the script, then beside itself. Needs timm and pyarrow.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

OWN = "vitcli embed"
SCRIPT = """
import sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, timm, torch
from PIL import Image

folder, out, name, workers, batch = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
model = timm.create_model(name, pretrained=False, num_classes=0).eval()
transform = timm.data.create_transform(
    **timm.data.resolve_model_data_config(model), is_training=False)

class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.paths = sorted(map(str, Path(folder).iterdir()))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        return transform(Image.open(self.paths[index]).convert("RGB")), self.paths[index]

names, vectors = [], []
with torch.inference_mode():
    for pixels, paths in torch.utils.data.DataLoader(Images(), batch, num_workers=workers):
        vectors.append(model(pixels))
        names += paths
matrix = torch.cat(vectors).numpy()
lists = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])
pq.write_table(pa.table({"path": names, "vector": lists}), out)
"""


def draw(folder: Path, count: int, size: tuple[int, int], suffix: str, distinct: int = 24) -> None:
    """Pictures with the spectrum of photographs: amplitude falls as one over frequency."""
    width, height = size
    frequency = np.hypot(np.fft.rfftfreq(width)[None], np.fft.fftfreq(height)[:, None])
    frequency[0, 0] = np.inf
    distinct = min(distinct, count)
    for number in range(distinct):
        rng = np.random.default_rng(number)
        planes = []
        for _ in range(3):
            spectrum = np.fft.rfft2(rng.standard_normal((height, width))) / frequency
            plane = np.fft.irfft2(spectrum, (height, width))
            planes.append(128 + 50 * plane / plane.std())
        pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05d}.{suffix}", quality=85)
    for number in range(distinct, count):
        first = folder / f"{number % distinct:05d}.{suffix}"
        shutil.copyfile(first, folder / f"{number:05d}.{suffix}")


def seconds(command: list[str], threads: int | None = None) -> tuple[float, float]:
    """Wall time of a command, and the processor time of all its processes."""
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **limit})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", default="500x375", help="width x height in pixels")
    parser.add_argument("--format", default="jpg", choices=("jpg", "png"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="no round that would end later")
    parser.add_argument("--loader-workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--own-workers", type=int, nargs="+", default=[])
    parser.add_argument("--own-threads", type=int, nargs="+", default=[])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--preset", default="vit-ti16")
    parser.add_argument("--timm", default="vit_tiny_patch16_224")
    asked = parser.parse_args()
    width, height = map(int, asked.size.split("x"))
    with tempfile.TemporaryDirectory() as name:
        images, out, table = Path(name) / "images", Path(name) / "out", Path(name) / "v.parquet"
        images.mkdir()
        draw(images, asked.images, (width, height), asked.format)
        ours = [sys.executable, "-m", "vitcli", "embed", str(images), "--out", str(out)]
        ours += ["--preset", asked.preset]
        ways: dict[str, tuple[list[str], int | None]] = {OWN: (ours, None)}
        for workers in asked.own_workers:
            ways[f"{OWN}, --workers {workers}"] = [*ours, "--workers", str(workers)], None
        for threads in asked.own_threads:
            ways[f"{OWN}, {threads} threads"] = ours, threads
        for workers in asked.loader_workers:
            arguments = [str(images), str(table), asked.timm, str(workers), str(asked.batch)]
            ways[f"script, {workers} workers"] = [sys.executable, "-c", SCRIPT, *arguments], None
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        begin, rounds = time.perf_counter(), 0
        while rounds < asked.rounds and (time.perf_counter() - begin) * (rounds + 1) <= (
            60 * asked.minutes * max(rounds, 1)
        ):
            for way, (command, limit) in ways.items():
                times[way].append(seconds(command, limit))
                shutil.rmtree(out, ignore_errors=True)
            rounds += 1
    print(f"{asked.preset}, {asked.images} {asked.format} of {asked.size}, {rounds} rounds")
    for way, measured in times.items():
        wall, used = (statistics.median(values) for values in zip(*measured, strict=True))
        spread = f"{min(measured)[0]:.1f} to {max(measured)[0]:.1f}"
        rate = asked.images / wall
        print(f"{way:26} {wall:7.1f} s ({spread}), {rate:6.1f} img/s, {used:6.1f} s of a core")
    others = {"script": "the best script", OWN: "its best --workers and threads"}
    row = [f"{asked.preset}, {asked.images} {asked.format} of {asked.size}"]
    for begin, what in others.items():
        rest = [values for way, values in times.items() if way.startswith(begin) and way != OWN]
        for number, kind in enumerate(("wall time", "processor time")):
            pairs = zip(times[OWN], *rest, strict=True)
            ratios = [
                min(t[number] for t in theirs) / mine[number] for mine, *theirs in pairs if theirs
            ]
            if ratios:
                median, spread = (
                    statistics.median(ratios),
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                )
                row.append(f"{median:.2f} ({spread})")
                print(
                    f"{kind}: {OWN} is {median:.2f} times as fast as {what} ({spread} over rounds)"
                )
    print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
