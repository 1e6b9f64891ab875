"""A training step of `vitcli train-shapes` beside a plain PyTorch loop and timm's training task.

    python experiments/training.py [--preset vit-ti16] [--batch 32] [--rounds 5] [--steps 5]
    python experiments/training.py --contention [--rounds 3]

Short runs of a few steps, in turn; each step is forward, cross-entropy, backward, gradients clipped
at norm 1, AdamW, the loss read. vitcli's time is that of the steps of `vitcli.train_shapes`, which
draws its images; those of the other two are drawn before anything is timed. So there are two
ratios: of the whole step, and of the step less what drawing its images takes alone (the fastest of
three). The plain loop trains vitcli's encoder by torch alone; timm trains its own model of the same
shape by its `ClassificationTask` and its optimizer.

`--contention` times a forward pass of two threads in processes of their own, alone and beside one
busy process per core, with threads that spin while they wait (torch's default), threads that sleep
(OMP_WAIT_POLICY=PASSIVE) and threads that sleep soon (GOMP_SPINCOUNT=1000 too, as in the commands).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitcli

CLASSES = ("circle", "square", "triangle", "cross")
TOY = {"depth": 1, "hidden": 12, "heads": 3, "mlp_hidden": 24}
Run = Callable[[], float]
"""A short run; the seconds of a step."""
Batches = list[tuple[Tensor, Tensor]]
"""Images (B, 3, h, w) and labels (B,) of each step."""


def ours(preset: str, batch: int, steps: int, encoder: dict[str, Any]) -> Run:
    """The loop of `vitcli train-shapes`, which draws its images."""
    settings = {
        "data.classes": [*CLASSES],
        "data.train_size": batch * steps,
        "data.val_size": 1,
        "train.clip_grad": 1.0,
        "train.threads": torch.get_num_threads(),
        **encoder,
    }

    def run() -> float:
        done = vitcli.train_shapes(
            preset=preset, batch=batch, epochs=1, lr=1e-3, set=settings, device="cpu"
        )
        return batch / done.result.images_per_s

    return run


def plain(model: vitcli.Model, batches: Batches) -> Run:
    """The same encoder by torch alone."""
    encoder = model.encoder.train()

    def run() -> float:
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
        start = time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(encoder(images).output, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            loss.item()
        return (time.perf_counter() - start) / len(batches)

    return run


def timm_task(model: vitcli.Model, batches: Batches) -> Run:
    """timm's vision transformer of the same shape, by its task and its optimizer."""
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask
    from timm.utils import dispatch_clip_grad

    encoder = model.config.encoder
    theirs = VisionTransformer(
        img_size=encoder.image_size,
        patch_size=int(encoder.patch_size),
        num_classes=len(CLASSES),
        embed_dim=encoder.hidden,
        depth=encoder.depth,
        num_heads=encoder.heads,
        mlp_ratio=encoder.mlp_hidden / encoder.hidden,
    ).train()
    task = ClassificationTask(theirs, criterion=nn.CrossEntropyLoss(), verbose=False)

    def run() -> float:
        optimizer = create_optimizer_v2(theirs, "adamw", lr=1e-3, weight_decay=0.05)
        start = time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = task(images, labels)["loss"]
            loss.backward()
            dispatch_clip_grad(theirs.parameters(), 1.0)
            optimizer.step()
            loss.item()
        return (time.perf_counter() - start) / len(batches)

    return run


def in_turn(preset: str, batch: int, rounds: int, steps: int, encoder: dict[str, Any]) -> None:
    """Print the seconds of each, and how many times faster vitcli's step is."""
    head = {"encoder.head": "linear", "encoder.head_out": len(CLASSES)}
    model = vitcli.load(preset, set=encoder | head, device="cpu")
    images, names = vitcli.shapes(batch * steps, size=model.input_size, classes=CLASSES)
    labels = torch.tensor([CLASSES.index(name) for name in names])
    batches = [*zip(model.transform(images).split(batch), labels.split(batch), strict=True)]
    runs = {
        "vitcli train": ours(preset, batch, steps, encoder),
        "plain loop": plain(model, batches),
        "timm": timm_task(model, batches),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    drawing: list[float] = []

    def draw() -> float:
        start = time.perf_counter()
        vitcli.shapes(batch, size=model.input_size, classes=CLASSES)
        return time.perf_counter() - start

    for number in range(rounds + 1):
        for name, run in runs.items():
            took = run()
            if number:  # the first run makes kernels
                times[name].append(took)
        if number:
            drawing.append(min(draw() for _ in range(3)))
    threads = torch.get_num_threads()
    print(f"{preset}, batch {batch}, {threads} threads, {rounds} rounds of {steps} steps, in turn")
    for name, seconds in times.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"{name:14} {statistics.median(seconds):.3f} s per step ({spread})")
    others = [values for name, values in times.items() if name != "vitcli train"]
    best = [min(r) for r in zip(*others, strict=True)]
    steps_alone = [t - d for t, d in zip(times["vitcli train"], drawing, strict=True)]
    for what, mine in (("its images drawn", times["vitcli train"]), ("alone", steps_alone)):
        ratios = [b / m for b, m in zip(best, mine, strict=True)]
        print(
            f"vitcli's step, {what}, is {statistics.median(ratios):.2f} times as fast as the "
            f"better of the two ({min(ratios):.2f} to {max(ratios):.2f} over rounds)"
        )


PASS = """
import statistics, sys, time, torch, vitcli
torch.set_num_threads(2)
model = vitcli.load("vit-ti16", device="cpu")
images, times = torch.randn(int(sys.argv[1]), 3, 224, 224), []
model.runner(images)
start = time.perf_counter()
while len(times) < 5 or (len(times) < 50 and time.perf_counter() - start < 3):
    before = time.perf_counter()
    model.runner(images)
    times.append(time.perf_counter() - before)
print(statistics.median(times))
"""
BUSY = "import time\nend = time.time() + 600\nwhile time.time() < end: pass"


def contention(rounds: int, batches: tuple[int, ...] = (1, 8)) -> None:
    """Print the seconds of a forward pass: threads that spin or sleep, alone or not."""
    sleep = {"OMP_WAIT_POLICY": "PASSIVE"}
    policies = {
        "threads spin": {},
        "threads sleep": sleep,
        "threads sleep soon": sleep | {"GOMP_SPINCOUNT": "1000"},
    }
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    clean = {key: value for key, value in os.environ.items() if key not in names}
    print("| ViT-Ti/16, two threads | batch | alone (s) | beside busy processes (s) |")
    print("| --- | --- | --- | --- |")
    for batch in batches:
        found: dict[tuple[str, int], list[float]] = {}
        for count in (0, os.cpu_count() or 1):
            busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
            try:
                for _ in range(rounds):
                    for name, policy in policies.items():
                        command = [sys.executable, "-c", PASS, str(batch)]
                        done = subprocess.run(
                            command, env=clean | policy, check=True, capture_output=True
                        )
                        found.setdefault((name, count), []).append(json.loads(done.stdout))
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
        for name in policies:
            cells = [
                f"{statistics.median(v):.4f} ({min(v):.4f} to {max(v):.4f})"
                for (which, _), v in sorted(found.items(), key=lambda item: item[0][1])
                if which == name
            ]
            print(f"| {name} | {batch} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="vit-ti16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of a run")
    parser.add_argument("--contention", action="store_true")
    parser.add_argument("--toy", action="store_true", help="a tiny encoder of 32 x 32 pixels")
    asked = parser.parse_args()
    if asked.contention:
        contention(min(asked.rounds, 5))
        return
    encoder = {**TOY, "image_size": 32} if asked.toy else {"image_size": 224}
    settings = {f"encoder.{key}": value for key, value in encoder.items()}
    in_turn(asked.preset, asked.batch, asked.rounds, asked.steps, settings)


if __name__ == "__main__":
    main()
