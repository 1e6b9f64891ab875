"""Every command line and Python block of the documentation runs, on encoders made small.

Pages are read from top to bottom in one folder, so that a line finds what an earlier one wrote.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import transformers
from PIL import Image
from typer.testing import CliRunner

from vitcli.cli import app
from vitcli.commands.sweep import spec
from vitcli.commands.sweep.spec import shipped_sweeps
from vitcli.config import request
from vitcli.config.yaml import Document, parse_yaml

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
TOY = "{encoder: {hidden: 48, heads: 2, mlp_hidden: 64}}"
"""Over every preset: its depth, patches and kinds stay, so that layers and settings exist."""
QUICK = {
    "train-shapes": "--epochs 1 --set data.train_size=64 --set data.val_size=64 --batch 32",
    "profile": "--runs 2",
    "probe": "--k 2",
}
SWEEP = """\
command: params
base: {preset: vit-ti16}
grid: {encoder.depth: [1, 2]}
metrics: {accuracy: models.0.total}
"""


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """The language and text of each fenced block that can be run."""
    text = (ROOT / page).read_text("utf-8")
    yield from re.findall(r"^```(bash|python|yaml)\n(.*?)^```", text, re.M | re.S)


def commands(body: str) -> list[str]:
    lines = [line.split("  #")[0].strip() for line in body.splitlines()]
    return [line for line in lines if line.startswith("vitcli ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("photo.jpg", *(f"photos/{c}/{i}.png" for c in ("cat", "dog") for i in range(6))):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = sum(name.encode())
        coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((90, 70), Image.Resampling.BICUBIC).save(path)
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=48,
        num_hidden_layers=12,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=56,
        patch_size=14,
    )
    twin = folder / "facebook" / "dinov2-small"
    transformers.Dinov2Model(config).save_pretrained(twin)
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    transformers.BitImageProcessorPil(**sizes).save_pretrained(twin)
    plain = torchvision.models.VisionTransformer(224, 16, 12, 2, 48, 64)
    torch.save(plain.state_dict(), folder / "vit_b_16.pth")
    (folder / "mine.yaml").write_text("preset: vit-s16\n")
    for name in shipped_sweeps():
        (folder / "shipped").mkdir(exist_ok=True)
        (folder / "shipped" / f"{name}.yaml").write_text(SWEEP)
    return folder


@pytest.fixture
def toy(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Presets made small, in a copy of the folder for each page."""
    place = shutil.copytree(place, tmp_path / "page")
    whole = request.preset_layers

    def small(name: str, source: str = "") -> list[Document]:
        return [*whole(name, source), parse_yaml(TOY, "toy")]

    monkeypatch.setattr(request, "preset_layers", small)
    monkeypatch.setattr(spec, "SHIPPED", place / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.chdir(place)
    return place


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs(page: str, toy: Path) -> None:
    for language, body in blocks(page):
        if language == "python":
            exec(compile(body, page, "exec"), {})
        elif language == "yaml" and "encoder:" in body:
            (toy / "page.yaml").write_text(body)
            assert run("vitcli params --config page.yaml") == 0
        elif language == "yaml":
            (toy / "page.yaml").write_text(body)
            assert run("vitcli sweep page.yaml --dry-run --out page") == 0
        for line in commands(body) if language == "bash" else []:
            differs = " compare " in line and "norm_eps" in line
            assert run(line) in ((0, 1) if differs else (0,)), line


def run(line: str) -> int:
    _, name, *arguments = shlex.split(line)
    more = [] if "--weights runs/a" in line else shlex.split(QUICK.get(name, ""))
    done = CliRunner().invoke(app, [name, *arguments, *more])
    if done.exit_code:
        print(line, done.output)  # pytest shows it where the line fails
    return int(done.exit_code)


def test_pages_show_something() -> None:
    shown: dict[str, Any] = {page: list(blocks(page)) for page in PAGES}
    assert sum(map(bool, shown.values())) >= 6 and len(PAGES) >= 9
