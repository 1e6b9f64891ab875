"""How much of the slower stage's speed `vitcli encode FOLDER --out DIR` keeps.

    python experiments/throughput.py [--images 144] [--rounds 3] [--workers 1 2]

Decoding alone (the same worker processes, nothing behind them), encoding alone (the same batches,
nothing before them) and the whole command, one after the other, several rounds, in one process on
the same 12-megapixel JPEGs, which it draws itself: with a core left to the encoder, and with a
decoding process for each core, the default. Prints images a second (medians over rounds), the
command's share of the slower stage, and its share of what the cores allow: an image costs
processes / decoding + threads / encoding seconds of a core, whatever overlaps with what.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitcli.commands.embed.analysis import encode_folder, encoder_threads
from vitcli.commands.embed.encoder import FolderOptions, PartEncoder
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.parts import Rows
from vitcli.config.request import ModelRequest
from vitcli.images.pool import Decoded, DecodePool, DecodeWork, available_cpus
from vitcli.images.shards import Entry
from vitcli.model import load_model

SIZE = (3000, 4000)


def draw(folder: Path, count: int, distinct: int = 6) -> list[Entry]:
    """JPEGs with the spectrum of photographs: amplitude falls as one over frequency."""
    height, width = SIZE
    frequency = np.hypot(np.fft.rfftfreq(width)[None], np.fft.fftfreq(height)[:, None])
    frequency[0, 0] = np.inf
    distinct = min(distinct, count)
    for number in range(distinct):
        rng = np.random.default_rng(number)
        planes = []
        for _ in range(3):
            spectrum = np.fft.rfft2(rng.standard_normal(SIZE)) / frequency
            plane = np.fft.irfft2(spectrum, SIZE)
            planes.append(128 + 50 * plane / plane.std())
        pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.jpg", quality=85)
    for number in range(distinct, count):
        content = (folder / f"{number % distinct:04d}.jpg").read_bytes()
        (folder / f"{number:04d}.jpg").write_bytes(content)
    return [Entry(path.name, str(path)) for path in sorted(folder.iterdir())]


def main() -> None:
    cores = available_cpus()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=sorted({max(1, cores - 1), cores})
    )
    parser.add_argument("--preset", default="vit-ti16")
    asked = parser.parse_args()
    request = ModelRequest(preset=asked.preset, device="cpu")
    model = load_model(request)
    threads = encoder_threads(model)
    torch.set_num_threads(threads)

    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "jpegs", Path(name) / "out"
        source.mkdir()
        entries = draw(source, asked.images)

        def decoding(options: FolderOptions, workers: int) -> None:
            work = DecodeWork(model.preprocessing)
            with DecodePool(work, workers, options.timeout_s, options.ahead(workers)) as pool:
                assert all(image.code == "ok" for image in pool.decode(entries))

        height, width = model.input_size
        pixels = np.random.default_rng(0).standard_normal((3, height, width)).astype(np.float32)

        def encoding(options: FolderOptions, workers: int) -> None:
            encoder = PartEncoder(model, options, lambda done, failures: None)
            encoder.encode(Rows.empty(0, entries), iter([Decoded(pixels, 1, 1)] * len(entries)))

        def command(options: FolderOptions, workers: int) -> None:
            result = encode_folder(request, model, Listing((str(source),)), out, options)
            assert result.ok == asked.images
            shutil.rmtree(out)

        stages = (decoding, encoding, command)
        rates = {(workers, stage): [] for workers in asked.workers for stage in stages}
        for _ in range(asked.rounds):
            for (workers, stage), measured in rates.items():
                options = FolderOptions(part_rows=asked.images, workers=workers)
                start = time.perf_counter()
                stage(options, workers)
                measured.append(asked.images / (time.perf_counter() - start))

    print(
        f"{asked.preset}, {asked.images} JPEGs of {SIZE[1]}x{SIZE[0]}, {cores} cores, "
        f"encoder threads: {threads}, {asked.rounds} rounds, img/s"
    )
    print(
        "workers  decoding  encoding  vitcli encode  of the slower stage  of what the cores allow"
    )
    for workers in asked.workers:
        decode, encode, both = (statistics.median(rates[workers, stage]) for stage in stages)
        most = allowed(decode, encode, workers=workers, threads=threads, cores=cores)
        print(
            f"{workers:7} {decode:9.2f} {encode:9.2f} {both:14.2f} "
            f"{both / min(decode, encode):20.2f} {both / most:24.2f}"
        )


def allowed(decode: float, encode: float, *, workers: int, threads: int, cores: int) -> float:
    """Images a second that no overlap exceeds: the slower stage's rate, and the cores' time."""
    core_seconds = min(workers, cores) / decode + min(threads, cores) / encode
    return min(decode, encode, cores / core_seconds)


if __name__ == "__main__":
    main()
