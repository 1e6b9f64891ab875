"""How much of the slower stage's speed `vitcli encode FOLDER --out DIR` keeps.

    python experiments/throughput.py [--images 48] [--rounds 3] [--workers N]

Decoding alone (the same worker processes, nothing behind them), encoding alone (the same batches,
nothing before them) and the whole command, one after the other, several rounds, in one process on
the same 12-megapixel JPEGs, which it draws itself. Prints images a second (medians over rounds),
the command's share of the slower stage, and what is left of that stage when both compete for the
same cores: 1 / (1/decoding + 1/encoding).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitcli.analyses.encode_folder import encode_folder, encoder_threads
from vitcli.analyses.part_encoder import FolderOptions, PartEncoder
from vitcli.config.request import ModelRequest
from vitcli.jobs.entries import Entry
from vitcli.jobs.listing import Listing
from vitcli.jobs.parts import Rows
from vitcli.jobs.pool import DecodePool
from vitcli.jobs.worker import Decoded, DecodeWork
from vitcli.models import load_model

SIZE = (3000, 4000)


def draw(folder: Path, count: int, distinct: int = 6) -> list[Entry]:
    """JPEGs with the spectrum of photographs: amplitude falls as one over frequency."""
    height, width = SIZE
    frequency = np.hypot(np.fft.rfftfreq(width)[None], np.fft.fftfreq(height)[:, None])
    frequency[0, 0] = np.inf
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--preset", default="vit-ti16")
    asked = parser.parse_args()
    request = ModelRequest(preset=asked.preset, device="cpu")
    model = load_model(request)
    torch.set_num_threads(encoder_threads(model))
    options = FolderOptions(part_rows=asked.images, workers=asked.workers)
    workers = options.workers_for(asked.images)

    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "jpegs", Path(name) / "out"
        source.mkdir()
        entries = draw(source, asked.images)

        def decoding() -> None:
            work = DecodeWork(model.preprocess)
            with DecodePool(work, workers, options.timeout_s, options.ahead(workers)) as pool:
                assert all(image.code == "ok" for image in pool.decode(entries))

        height, width = model.input_size
        pixels = np.random.default_rng(0).standard_normal((3, height, width)).astype(np.float32)

        def encoding() -> None:
            encoder = PartEncoder(model, options, lambda done, failures: None)
            encoder.encode(Rows.empty(0, entries), iter([Decoded(pixels, 1, 1)] * len(entries)))

        def command() -> None:
            out.mkdir()
            result = encode_folder(request, model, Listing((str(source),)), out, options)
            assert result.ok == asked.images
            for path in out.iterdir():
                path.unlink()
            out.rmdir()

        stages: dict[str, Callable[[], None]] = {
            "decoding alone": decoding,
            "encoding alone": encoding,
            "vitcli encode": command,
        }
        rates: dict[str, list[float]] = {stage: [] for stage in stages}
        for _ in range(asked.rounds):
            for stage, work in stages.items():
                start = time.perf_counter()
                work()
                rates[stage].append(asked.images / (time.perf_counter() - start))

    median = {stage: statistics.median(values) for stage, values in rates.items()}
    print(f"{asked.preset}, {asked.images} JPEGs of {SIZE[1]}x{SIZE[0]}, {workers} decoding")
    print(f"processes, {torch.get_num_threads()} encoder threads, {asked.rounds} rounds, img/s:")
    for stage, values in rates.items():
        each = " ".join(f"{value:6.2f}" for value in values)
        print(f"  {stage:15} {median[stage]:6.2f}   ({each} )")
    decode, encode = median["decoding alone"], median["encoding alone"]
    slower = min(decode, encode)
    print(f"  of the slower stage alone: {median['vitcli encode'] / slower:.2f}")
    print(f"  possible if both share all cores: {decode * encode / (decode + encode) / slower:.2f}")


if __name__ == "__main__":
    main()
