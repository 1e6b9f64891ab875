"""The whole matrix on this machine's accelerator, in about five minutes: what to report.

    python experiments/gpu-check.py                     on CUDA, or MPS where there is none
    python experiments/gpu-check.py --device cpu --toy  the same checks at toy size

Each check is one line: its name, ok or what went wrong, its seconds, and a fact (the largest
difference to the same on the CPU, images per second, losses of one process and of several). A
check that fails does not stop the next; the exit code is 1 if one did. Copy all of the output into
a report: this project has no accelerator to run it on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitcli

TOY = {"hidden": 24, "depth": 2, "heads": 3, "mlp_hidden": 48, "patch_size": 8}
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-3}
"""Of the norm of a float32 vector: TF32 and the order of sums differ between devices."""


@dataclass
class Setting:
    """What all checks need."""

    device: str
    toy: bool
    folder: Path
    images: int

    def load(self, device: str, dtype: str = "float32", engine: str | None = None) -> vitcli.Model:
        small = {f"encoder.{key}": value for key, value in TOY.items()} if self.toy else {}
        return vitcli.load(
            None if self.toy else "vit-b16",
            set=small,
            image_size=32 if self.toy else None,
            device=device,
            dtype=dtype,
            engine=engine,
        )

    @property
    def photos(self) -> Path:
        return self.folder / "photos"


def draw(folder: Path, count: int) -> None:
    """Pictures of noise in two folders, one per class."""
    for number in range(count):
        place = folder / "ab"[number % 2] / f"{number:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (96, 128, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place)


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest distance of two vectors, over the second one's norm."""
    return float((np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)).max())


def features(here: Setting, device: str, **how: Any) -> np.ndarray:
    model = here.load(device, **how)
    paths = sorted(here.photos.rglob("*.png"))[:8]
    pooled = model.features(paths).pooled
    assert pooled is not None
    return pooled.float().cpu().numpy()


def encode(here: Setting, **how: Any) -> str:
    """Vectors on the device beside those of plain torch on the CPU in float32."""
    far = difference(features(here, here.device, **how), features(here, "cpu", engine="eager"))
    assert far < TOLERANCE[how.get("dtype", "float32")], f"differs from the CPU by {far:.2g}"
    return f"within {far:.2g} of the CPU"


def embed(here: Setting) -> str:
    """A job on the device, twice: the same vectors, and nothing to do the second time."""
    rows = []
    for out in ("first", "second"):
        model = here.load(here.device)
        result = vitcli.embed(model, here.photos, here.folder / out, format="npy")
        assert result.ok == here.images, f"{result.ok} of {here.images}"
        parts = sorted((here.folder / out).glob("part-*.npy"))
        rows.append(np.concatenate([np.load(part) for part in parts]))
    far = difference(rows[0], rows[1])
    assert far < 1e-6, f"two jobs differ by {far:.2g}"
    return f"{result.images_per_s:.0f} img/s, two jobs within {far:.2g}"


def profile(here: Setting, dtypes: tuple[str, ...]) -> str:
    """Speed of each dtype, and memory."""
    batch = 2 if here.toy else 64
    result = vitcli.profile(
        here.load(here.device), batches=[1, batch], dtypes=[*dtypes], runs=3 if here.toy else None
    )
    rows = [run for run in result.runs if run.batch == batch]
    assert all(run.error is None for run in rows), rows[0].error
    return "; ".join(
        f"{run.dtype} {run.images_per_s:.4g} img/s, {run.gemm_fraction:.0%} of GEMM, "
        f"peak {(run.peak_bytes or 0) / 2**20:.0f} MiB"
        for run in rows
    )


def losses(here: Setting, processes: int, batch: int) -> list[float]:
    """Of a run on shapes as a command, through torchrun where several processes are asked for."""
    words = ["train-shapes", "--device", here.device, "--json", "--batch", str(batch)]
    words += ["--out", str(here.folder / f"run-{processes}-{batch}")]
    small = {"data.train_size": 8 * batch, "data.val_size": 4 * batch, "train.epochs": 1}
    for key, value in small.items():
        words += ["--set", f"{key}={value}"]
    if here.toy:
        words += ["--set", "encoder.depth=1", "--set", "encoder.hidden=24"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = [sys.executable, *(torchrun if processes > 1 else []), "-m", "vitcli"]
    environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*start, *words], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, " / ".join(done.stderr.strip().splitlines()[-3:])
    history = json.loads(done.stdout)["history"]
    return [row["loss"] for row in history if row.get("loss") is not None]


def train(here: Setting, processes: int) -> str:
    """The losses of several processes beside those of one, on the same images."""
    batch = 8 * processes
    alone = losses(here, 1, batch)
    if processes == 1:
        return f"loss {alone[0]:.4f} to {alone[-1]:.4f} in {len(alone)} steps"
    many = losses(here, processes, batch)
    far = max(abs(a - b) for a, b in zip(alone, many, strict=True))
    assert far < 1e-2, f"losses differ by {far:.2g}"
    return f"{processes} processes: losses within {far:.2g} of one"


def checks(here: Setting, processes: int) -> dict[str, Callable[[], str]]:
    half = ("bfloat16",) if here.device == "cpu" else ("bfloat16", "float16")
    found: dict[str, Callable[[], str]] = {"encode float32": partial(encode, here)}
    for dtype in half:
        found[f"encode {dtype}"] = partial(encode, here, dtype=dtype)
    found["compile float32"] = partial(encode, here, engine="compile")
    found["compile bfloat16"] = partial(encode, here, engine="compile", dtype="bfloat16")
    found["embed"] = partial(embed, here)
    found["profile"] = partial(profile, here, ("float32", *half))
    found["train"] = partial(train, here, 1)
    if processes > 1:
        found["train, several processes"] = partial(train, here, processes)
    return found


def machine(device: str) -> str:
    """The versions and the devices that a report needs."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    where = ", ".join(names) if device == "cuda" else device
    return (
        f"vitcli {vitcli.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}, {platform.platform()}; {where}"
    )


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default=default_device(), choices=("cuda", "mps", "cpu"))
    parser.add_argument("--toy", action="store_true", help="a tiny encoder and few images")
    parser.add_argument("--images", type=int, help="default: 512, 6 at toy size")
    parser.add_argument("--processes", type=int, help="default: one per GPU, two on a CPU")
    parser.add_argument("--skip", action="append", default=[], help="names that begin so")
    asked = parser.parse_args()
    processes = asked.processes or {"cuda": torch.cuda.device_count(), "mps": 1}.get(
        asked.device, 2
    )
    print(machine(asked.device), flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        here = Setting(
            asked.device, asked.toy, Path(name), asked.images or (6 if asked.toy else 512)
        )
        draw(here.photos, here.images)
        for title, check in checks(here, processes).items():
            if title.startswith(tuple(asked.skip)):
                continue
            start = time.perf_counter()
            try:
                said = f"ok: {check()}"
            except Exception as error:  # whatever it is, the next check is made
                failed += 1
                place = traceback.extract_tb(error.__traceback__)[-1]
                said = f"FAILED: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            print(f"{title:26} {time.perf_counter() - start:6.1f} s  {said}", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
