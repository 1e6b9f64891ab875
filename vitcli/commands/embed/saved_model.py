"""The model behind a folder of vectors, so that later questions need not name it again."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch

from vitcli.commands.embed.job import load_manifest
from vitcli.config.load import Setting
from vitcli.config.request import ModelRequest
from vitcli.errors import VitcliError
from vitcli.images.paths import printable
from vitcli.model import LoadedModel, load_model


def remembered(request: ModelRequest) -> dict[str, Any]:
    """A request as plain JSON; files by their absolute paths."""
    plain = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    plain["settings"] = [[list(s.path), s.value, s.source] for s in request.settings]
    for key in ("config_file", "weights", "adapter"):
        value = plain[key]
        plain[key] = str(Path(value).resolve()) if value and Path(value).exists() else value
    return plain


def recalled(plain: dict[str, Any]) -> ModelRequest:
    """The request that `remembered` wrote."""
    size, file = plain["image_size"], plain["config_file"]
    settings = tuple(
        Setting(tuple(path), value, source) for path, value, source in plain["settings"]
    )
    changes = {
        "settings": settings,
        "image_size": tuple(size) if size else None,
        "config_file": Path(file) if file else None,
    }
    return ModelRequest(**{**plain, **changes})


def load_saved(folder: Path, device: str = "auto") -> LoadedModel:
    """The model that made the vectors in `folder`.

    Raises:
        VitcliError: no vectors there, or the source has other weights now.
    """
    manifest = load_manifest(folder)
    try:
        request = recalled(manifest["request"])
    except (KeyError, TypeError, ValueError) as error:
        raise VitcliError(f"{printable(folder)}: the manifest does not name a model") from error
    model = load_model(dataclasses.replace(request, device=device))
    if weights_digest(model.encoder) != manifest["settings"]["weights_sha256"]:
        raise VitcliError(
            f"{model.weights}: other weights than those that made the vectors in "
            f"{printable(folder)}",
            "encode the images again into another folder",
        )
    return model


def weights_digest(encoder: torch.nn.Module) -> str:
    """SHA-256 over every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
