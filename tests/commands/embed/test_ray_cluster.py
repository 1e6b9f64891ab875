"""The same job on a local Ray cluster: the same bytes, also when a worker is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitcli.commands.embed import ray_cluster
from vitcli.commands.embed.analysis import encode_folder
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.ray_cluster import PartActor, on_ray
from vitcli.commands.embed.result import FolderOptions
from vitcli.config.request import ModelRequest
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError
from vitcli.loading import load_model

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


def test_a_cluster_gives_the_same_bytes_and_a_killed_worker_loses_nothing(
    listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = load_model(REQUEST), FolderOptions(part_rows=4, batch=2, workers=1)
    encode_folder(model, listing, tmp_path / "local", options)
    killed = tmp_path / "killed"

    class Dying(PartActor):
        """The first to be given a part is killed before it makes it."""

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            try:
                killed.touch(exist_ok=False)
            except FileExistsError:
                return super().__call__(row)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

    monkeypatch.setattr(ray_cluster, "PartActor", Dying)
    out = tmp_path / "cluster"
    result = encode_folder(model, listing, out, options, work=on_ray(None))
    assert killed.exists()
    assert (result.rows, result.ok, result.parts) == (15, 14, 4)
    local = {p.name: p.read_bytes() for p in (tmp_path / "local").iterdir()}
    assert {p.name: p.read_bytes() for p in out.iterdir()} == local


def test_a_cluster_that_is_not_there_is_told_at_once(listing: Listing, tmp_path: Path) -> None:
    work = on_ray("127.0.0.1:1")
    with pytest.raises(VitcliError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        encode_folder(load_model(REQUEST), listing, tmp_path / "out", FolderOptions(), work=work)
