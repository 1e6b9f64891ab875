"""A training step of `vitcli train` beside a plain PyTorch loop and timm's training task.

    python experiments/training.py [--preset vit-ti16] [--batch 32] [--rounds 15]
    python experiments/training.py --contention [--rounds 3]

The same images and labels, drawn before anything is timed, go through all three in turn, each a
whole step: forward, cross-entropy, backward, gradients clipped at norm 1, AdamW, the loss read.
The plain loop trains vitcli's encoder by torch alone; timm trains its own model of the same shape
by its `ClassificationTask` and its optimizer. Prints seconds and the ratio per round.

`--contention` times a forward pass of two threads in processes of their own, alone and beside one
busy process per core, with threads that spin while they wait (torch's default) and threads that
sleep (OMP_WAIT_POLICY=PASSIVE, which the commands set).
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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitcli.build import build_encoder
from vitcli.commands.train import analysis as train
from vitcli.commands.train.data import ShapesSource
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.start import World
from vitcli.config.load import ModelRequest, Setting
from vitcli.config.training import ShapesRun, TrainRequest

Step = Callable[[Tensor, Tensor], float]
"""One update on images (B, 3, h, w) and labels (B,); the loss."""


def ours(config: ShapesRun) -> tuple[Trainer, Step]:
    """The loop of `vitcli train-shapes`, and its step."""
    data = config.data
    source = ShapesSource(
        train.shapes_of(config), data.train_size, data.val_size, config.preprocess
    )
    encoder = build_encoder(config.encoder, 0)
    trainer = Trainer(encoder, source, config.train, torch.device("cpu"), World())

    def step(images: Tensor, labels: Tensor) -> float:
        _, entry = trainer._update((images, labels))
        trainer.step += 1
        return float(entry["loss"])

    return trainer, step


def plain(config: ShapesRun) -> Step:
    """The same encoder by torch alone."""
    model = build_encoder(config.encoder, 0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(images: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images).output, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def timm_task(config: ShapesRun) -> Step:
    """timm's vision transformer of the same shape, by its task and its optimizer."""
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask
    from timm.utils import dispatch_clip_grad

    encoder = config.encoder
    model = VisionTransformer(
        img_size=encoder.image_size,
        patch_size=int(encoder.patch_size),
        num_classes=len(config.data.classes),
        embed_dim=encoder.hidden,
        depth=encoder.depth,
        num_heads=encoder.heads,
        mlp_ratio=encoder.mlp_hidden / encoder.hidden,
    ).train()
    task = ClassificationTask(model, criterion=nn.CrossEntropyLoss(), verbose=False)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)

    def step(images: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = task(images, labels)["loss"]
        loss.backward()
        dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.item())

    return step


def in_turn(preset: str | None, batch: int, rounds: int, settings: dict[str, object]) -> None:
    """Print the seconds of each, and how many times faster vitcli's step is."""
    fixed = {"train.batch": batch, "data.train_size": batch, "data.val_size": batch}
    fixed |= {"train.epochs": rounds + 1, "train.clip_grad": 1.0, "train.dtype": "float32"}
    chosen = tuple(
        Setting(tuple(key.split(".")), value, key) for key, value in (fixed | settings).items()
    )
    config = train.shapes_config(
        TrainRequest(ModelRequest(preset=preset, device="cpu"), chosen, device="cpu")
    )
    trainer, own = ours(config)
    steps = {"vitcli train": own, "plain loop": plain(config), "timm": timm_task(config)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number, (images, labels) in enumerate(trainer._batches()):
        for name, step in steps.items():
            start = time.perf_counter()
            step(images, labels)
            if number:  # the first step makes kernels and the optimizer's state
                times[name].append(time.perf_counter() - start)
    threads = torch.get_num_threads()
    print(f"{preset or 'the recipe'}, batch {batch}, {threads} threads, {rounds} rounds, in turn")
    for name, seconds in times.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"{name:14} {statistics.median(seconds):.3f} s per step ({spread})")
    others = [values for name, values in times.items() if name != "vitcli train"]
    ratios = [min(r) / mine for mine, *r in zip(times["vitcli train"], *others, strict=True)]
    print(
        f"vitcli's step is {statistics.median(ratios):.2f} times as fast as the better of the two "
        f"({min(ratios):.2f} to {max(ratios):.2f} over rounds)"
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
    policies = {"threads spin": {}, "threads sleep": {"OMP_WAIT_POLICY": "PASSIVE"}}
    clean = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contention", action="store_true")
    parser.add_argument("--toy", action="store_true", help="a tiny encoder in place of the preset")
    asked = parser.parse_args()
    if asked.contention:
        contention(min(asked.rounds, 5))
        return
    toy = {"encoder.depth": 1, "encoder.hidden": 12, "encoder.heads": 3, "encoder.mlp_hidden": 24}
    settings: dict[str, object] = {**toy} if asked.toy else {"encoder.image_size": 224}
    in_turn(None if asked.toy else asked.preset, asked.batch, asked.rounds, settings)


if __name__ == "__main__":
    main()
