"""The error that a user can cause, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname


class VitcliError(Exception):
    """Something the user can put right: one line of what went wrong, one of what to do next.

    `exit_code` is 2 for usage or bad input and 1 for a run that failed.
    """

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def install_extra(name: str) -> str:
    """The command that installs the extra `name`, from the checkout where this is one."""
    checkout = _checkout()
    if checkout is None:
        return f"pip install 'vitcli[{name}]'"
    return "pip install -e " + shlex.quote(f"{checkout}[{name}]")


def _checkout() -> Path | None:
    """The folder that was installed with `pip install -e`, or from which this runs uninstalled."""
    try:
        recorded = importlib.metadata.distribution("vitcli").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        recorded = None
    if recorded:
        source = json.loads(recorded)
        if source.get("dir_info", {}).get("editable"):
            return Path(url2pathname(urlparse(source["url"]).path))
    here = Path(__file__).resolve().parent.parent
    return here if (here / "pyproject.toml").is_file() else None
