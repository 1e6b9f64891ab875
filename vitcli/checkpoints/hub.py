"""Published weights by their repository id, through huggingface_hub and its cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vitcli.errors import VitcliError, install_extra

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_CHOICES = (
    ("model.safetensors",),
    ("*.safetensors.index.json",),
    ("pytorch_model.bin",),
    ("*.bin.index.json",),
    ("open_clip_model.safetensors",),
    ("open_clip_pytorch_model.bin",),
    ("*.safetensors",),
    ("*.npz",),
    ("*.pth", "*.pt", "*.bin"),
)
"""Patterns of the files of one checkpoint, best first; only the first that is there is fetched.

Of a sharded one that is the index; then the shards that hold what is read.
"""
_CONFIGS = [
    *("config.json", "open_clip_config.json", "preprocessor_config.json", "processor_config.json"),
    "config.yaml",
]
Fetch = Callable[[Sequence[str]], None]
"""Brings files of these names into the folder of the snapshot."""
ANSWER_S = 10
"""Seconds that the hub may take to list a repository."""


def is_hub_id(source: str) -> bool:
    return _ID.fullmatch(source) is not None


def download(source: str) -> tuple[Path, Fetch]:
    """The folder of a snapshot of `owner/name[@revision]` with its configs and one checkpoint.

    Of a sharded checkpoint the index alone is there; the second value fetches shards into the same
    folder. The cache and HF_HUB_OFFLINE are respected.

    Raises:
        VitcliError: no extra `hub`, no network and nothing cached, no such repository.
    """
    repo, _, revision = source.partition("@")
    try:
        from huggingface_hub import constants, hf_hub_download, snapshot_download
    except ImportError as error:
        raise VitcliError(
            f"--weights {source}: no such path, and hub ids need the extra `hub`",
            install_extra("hub"),
        ) from error

    def snapshot() -> Path:
        files = [] if constants.HF_HUB_OFFLINE else _listed(repo, revision or None)
        if not files:
            return _cached(repo, revision or None)
        wanted = [*_CONFIGS, *files]
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=wanted))

    with _reported(source):
        folder = snapshot()

    def fetch(names: Sequence[str]) -> None:
        with _reported(source):
            for name in names:
                hf_hub_download(repo, name, revision=folder.name)

    return folder, fetch


@contextlib.contextmanager
def _reported(source: str) -> Iterator[None]:
    """What the hub's library raises, as an error of one line."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except LocalEntryNotFoundError as error:
        raise VitcliError(
            f"--weights {source}: no such path, not in the hub's cache, "
            "and the hub cannot be reached",
            "check the id and the network, or give a local directory",
        ) from error
    except (OSError, ValueError) as error:  # the hub's HTTP errors are OSErrors
        reason = next((line for line in str(error).splitlines() if line.strip()), "failed")
        raise VitcliError(
            f"--weights {source}: {reason[:160]}", "check the id, the revision and the access"
        ) from error


def _cached(repo: str, revision: str | None) -> Path:
    """The folder of the best checkpoint that is in the cache whole.

    The cache knows what else the repository holds, so it must be asked for one checkpoint's files.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for patterns in _CHOICES:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=[*_CONFIGS, *patterns],
                    local_files_only=True,
                )
            )
            if any(any(folder.glob(pattern)) for pattern in patterns):
                return folder
    raise LocalEntryNotFoundError(f"{repo} is not in the cache")


def _listed(repo: str, revision: str | None) -> list[str]:
    """The files of the best checkpoint at the hub's top level, none when the hub is not reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # One request, which is not tried again: without a network the cache should answer at once.
        info = HfApi().model_info(repo, revision=revision, timeout=ANSWER_S)
    except HfHubHTTPError:
        raise  # the hub answered: no such repository, no such revision, no access
    except Exception:  # whatever the HTTP library raises where there is no network
        return []
    names = [file.rfilename for file in info.siblings or ()]
    top = [name for name in names if "/" not in name]
    for patterns in _CHOICES:
        chosen = [n for n in top if any(Path(n).match(pattern) for pattern in patterns)]
        if chosen:
            return chosen
    raise VitcliError(f"--weights {repo}: the repository has no weights", "check the id")
