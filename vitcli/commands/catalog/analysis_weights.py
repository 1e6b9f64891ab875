"""What checkpoints are read, and one of them written in vitcli's own format."""

from __future__ import annotations

from pathlib import Path

from vitcli.checkpoints.families import FAMILIES
from vitcli.checkpoints.report import digest
from vitcli.checkpoints.save import WEIGHTS_FILE, save_snapshot
from vitcli.errors import VitcliError
from vitcli.load_report import ConvertResult, FamiliesResult, FamilyRow
from vitcli.model import LoadedModel


def families(word: str = "") -> FamiliesResult:
    """The families whose name or library contains `word`, in the order they are tried.

    Raises:
        VitcliError: there is none.
    """
    rows = tuple(
        FamilyRow(f.name, f.library, f.model_types, f.verified)
        for f in FAMILIES
        if word.lower() in f"{f.name} {f.library}".lower()
    )
    if not rows:
        raise VitcliError(f"no family's name contains {word!r}", "`vitcli families` lists all")
    return FamiliesResult(rows)


def convert(model: LoadedModel, folder: Path) -> ConvertResult:
    """Write a loaded checkpoint as `folder`, which loads back bit for bit.

    Raises:
        VitcliError: no checkpoint, no known preprocessing, or a place that cannot be written.
    """
    if model.report is None:
        raise VitcliError("these weights are fresh: there is no checkpoint to convert")
    config = model.config.model_copy(update={"preprocess": model.preprocess})
    save_snapshot(folder, config, model.encoder)
    file = folder / WEIGHTS_FILE
    return ConvertResult(
        folder=str(folder),
        parameters=model.parameters,
        bytes=file.stat().st_size,
        sha256=digest([file]),
        checkpoint=model.report,
    )
