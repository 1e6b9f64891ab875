"""Any encoder as a directory that vitcli reads back bit for bit."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from vitcli.checkpoints.readers import SNAPSHOT_CONFIG
from vitcli.config.load import config_yaml
from vitcli.config.schema import ModelConfig
from vitcli.files import atomic_folder
from vitcli.nn.encoder import VisionEncoder

WEIGHTS_FILE = "model.safetensors"


def save_snapshot(folder: Path, config: ModelConfig, encoder: VisionEncoder) -> None:
    """Write model.safetensors and config.yaml; the directory appears whole, in one rename.

    Raises:
        VitcliError: something is there already, or it cannot be written (exit code 1).
    """
    with atomic_folder(folder) as part:
        state = {name: t.contiguous() for name, t in encoder.state_dict().items()}
        save_file(state, part / WEIGHTS_FILE, metadata={"format": "pt"})
        (part / SNAPSHOT_CONFIG).write_text(config_yaml(config), encoding="utf-8")
