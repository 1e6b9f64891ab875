"""A hub on this machine: only the best checkpoint and the configs of a repository are fetched."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.sources import vit_folder

COMMIT = "c" * 40
REPO = "someone/tiny-vit"
Fetched = list[tuple[str, int]]
"""What was asked for and the bytes that were sent, in order; answers without a body left out."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Fetched]]:
    """Its address, and what was fetched from it."""
    folder = vit_folder(tmp_path / "repo")
    (folder / "pytorch_model.bin").write_bytes(b"not the best checkpoint")
    (folder / "README.md").write_text("no weights")
    with served(folder) as found:
        yield found


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[tuple[str, Fetched]]:
    """The same of a VLM whose tower is in one of four shards, and its language model in others."""
    folder = vit_folder(tmp_path / "repo")
    tower = {f"vit.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    shards = [f"model.safetensors-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    save_file({n: t.clone() for n, t in tower.items()}, folder / shards[1])
    shard_of = dict.fromkeys(tower, shards[1])
    for shard in (shards[0], *shards[2:]):
        name = f"model.language_model.{shard}.weight"
        save_file({name: torch.zeros(500_000)}, folder / shard)
        shard_of[name] = shard
    index = {"weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text("{}")
    with served(folder) as found:
        yield found


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Fetched]]:
    names = sorted(file.name for file in folder.iterdir())
    fetched: Fetched = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.split("?")[0]
            if path.startswith(f"/api/models/{REPO}/tree/"):
                entries = [
                    {"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0"}
                    for n in names
                ]
                return self.send(json.dumps(entries).encode(), body)
            if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
                siblings = [{"rfilename": name} for name in names]
                info = {"id": REPO, "sha": COMMIT, "siblings": siblings}
                return self.send(json.dumps(info).encode(), body)
            name = path.rsplit("/", 1)[-1]
            if path.startswith(f"/{REPO}/resolve/") and name in names:
                return self.send((folder / name).read_bytes(), body)
            self.send_error(404)

        def send(self, content: bytes, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                fetched.append((self.path.split("?")[0].rsplit("/", 1)[-1], len(content)))
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", fetched
    server.shutdown()


def bytes_of_files(fetched: Fetched, folder: Path) -> list[str]:
    """The files that were sent, each once and whole."""
    sent = sorted(name for name, _ in fetched if (folder / name).is_file())
    for name in sent:
        sizes = [size for other, size in fetched if other == name]
        assert sizes == [(folder / name).stat().st_size], (name, sizes)
    return sent


def vitcli(source: str, home: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    # However slow the machine, no answer is asked for twice.
    environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "600")
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "vitcli", "params", "--json", "--weights", source]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)


def test_a_repository_is_fetched_once_and_then_read_from_the_cache(
    hub: tuple[str, Fetched], tmp_path: Path
) -> None:
    endpoint, fetched = hub
    first = vitcli(REPO, tmp_path / "home", endpoint)
    assert first.returncode == 0, first.stderr
    assert bytes_of_files(fetched, tmp_path / "repo") == ["config.json", "model.safetensors"]
    fetched.clear()
    again = vitcli(REPO, tmp_path / "home", "http://127.0.0.1:9")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout and not fetched


def test_of_a_sharded_model_the_towers_shard_alone_is_fetched(
    sharded: tuple[str, Fetched], tmp_path: Path
) -> None:
    endpoint, fetched = sharded
    first = vitcli(REPO, tmp_path / "home", endpoint)
    assert first.returncode == 0, first.stderr
    assert bytes_of_files(fetched, tmp_path / "repo") == [
        "config.json",
        "model.safetensors-00002-of-00004.safetensors",
        "model.safetensors.index.json",
    ]
    # Each of the three other shards alone would be 2 MB.
    assert sum(size for _, size in fetched) < 200_000
    fetched.clear()
    again = vitcli(REPO, tmp_path / "home", "http://127.0.0.1:9")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout and not fetched


def test_an_id_that_the_hub_does_not_know_is_a_user_error(
    hub: tuple[str, Fetched], tmp_path: Path
) -> None:
    done = vitcli("someone/else", tmp_path / "home", hub[0])
    assert done.returncode == 2
    assert "--weights someone/else: " in done.stderr and "Traceback" not in done.stderr
