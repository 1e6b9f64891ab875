"""The same job on a local Ray cluster: the same bytes, also when a worker is killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from vitcli.commands.embed.analysis import encode_folder
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.ray_cluster import on_ray
from vitcli.commands.embed.result import FolderOptions
from vitcli.config.load import ModelRequest, parse_setting
from vitcli.errors import VitcliError
from vitcli.model import load_model
from vitcli.results import Quiet

REQUEST = ModelRequest(
    settings=tuple(
        parse_setting(f"encoder.{s}")
        for s in ("patch_size=8", "hidden=24", "depth=1", "heads=3", "mlp_hidden=40")
    ),
    image_size=(16, 16),
)


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(0)
    for number in range(14):
        pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"in/{number:02d}.png")
    (tmp_path / "in/bad.png").write_bytes(b"no")
    return Listing((str(tmp_path / "in"),))


def actors_below(process: psutil.Process) -> list[psutil.Process]:
    """Ray's processes that run a `PartActor`, among the descendants of this one.

    Ray names such a process `ray::Map(PartActor)...`: the name begins so, and no other program's
    does. Processes that end meanwhile are passed over.
    """
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone, or a zombie
            title = " ".join(child.cmdline()[:1])
            if title.startswith("ray::") and "PartActor" in title and child.pid != os.getpid():
                found.append(child)
    return found


def test_a_cluster_gives_the_same_bytes_and_a_killed_worker_loses_nothing(
    listing: Listing, tmp_path: Path
) -> None:
    model, options = load_model(REQUEST), FolderOptions(part_rows=4, batch=2, workers=1)
    encode_folder(REQUEST, model, listing, tmp_path / "local", options)
    killed: list[int] = []

    class KillOne(Quiet):
        def __call__(self, done: int, total: int, facts: str = "") -> None:
            if done and not killed:
                actors = actors_below(psutil.Process())
                assert actors, "no actor is at work"
                actors[0].kill()
                killed.append(actors[0].pid)

    work = on_ray(REQUEST, None)
    out = tmp_path / "cluster"
    result = encode_folder(REQUEST, model, listing, out, options, KillOne(), work)
    assert killed
    assert (result.rows, result.ok, result.parts) == (15, 14, 4)
    local = {p.name: p.read_bytes() for p in (tmp_path / "local").iterdir()}
    assert {p.name: p.read_bytes() for p in out.iterdir()} == local


def test_a_cluster_that_is_not_there_is_told_at_once(listing: Listing, tmp_path: Path) -> None:
    work = on_ray(REQUEST, "127.0.0.1:1")
    with pytest.raises(VitcliError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        encode_folder(
            REQUEST, load_model(REQUEST), listing, tmp_path / "out", FolderOptions(), work=work
        )
