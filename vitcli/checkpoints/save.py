"""Any encoder as a directory that vitcli reads back bit for bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from vitcli.checkpoints.readers import SNAPSHOT_CONFIG
from vitcli.config.load import config_yaml
from vitcli.config.schema import ModelConfig
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder

WEIGHTS_FILE = "model.safetensors"


def save_snapshot(folder: Path, config: ModelConfig, encoder: VisionEncoder) -> None:
    """Write model.safetensors and config.yaml; the directory appears whole, in one rename.

    Raises:
        VitcliError: something is there already, or it cannot be written (exit code 1).
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VitcliError(f"{folder}: is there already", "give the name of a new directory")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o777 & ~umask)
        state = {name: t.contiguous() for name, t in encoder.state_dict().items()}
        save_file(state, part / WEIGHTS_FILE, metadata={"format": "pt"})
        (part / SNAPSHOT_CONFIG).write_text(config_yaml(config), encoding="utf-8")
        for file in part.iterdir():
            file.chmod(0o666 & ~umask)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        part.replace(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _cannot_write(folder: Path, error: OSError) -> VitcliError:
    return VitcliError(
        f"cannot write {folder}: {error.strerror or error}",
        "check that the place exists, may be written and has room",
        exit_code=1,
    )
