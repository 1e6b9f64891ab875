"""The error that a user can cause, and how to install what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path


class VitcliError(Exception):
    """Something the user can put right: one line of what went wrong, one of what to do next.

    `exit_code` is 2 for usage or bad input and 1 for a run that failed.
    """

    def __init__(self, message: str, hint: str = "", *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def either(words: Collection[str]) -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def check_choice(option: str, value: str | None, known: Collection[str]) -> None:
    """Refuse a value that is not one of the known ones; None is not given.

    Raises:
        VitcliError: its hint is the first of `known`.
    """
    if value is not None and value not in known:
        first = next(iter(known))
        raise VitcliError(
            f"{option} {value}: unknown (expected {either(known)})", f"{option} {first}"
        )


def install_extra(name: str) -> str:
    """The command that installs the extra `name`, from the checkout where this is one."""
    checkout = _checkout()
    if checkout is None:
        return f"pip install 'vitcli[{name}]'"
    return "pip install -e " + shlex.quote(f"{checkout}[{name}]")


def _checkout() -> Path | None:
    """The folder from which this runs: installed with `pip install -e`, or not at all."""
    here = Path(__file__).resolve().parent.parent
    return here if (here / "pyproject.toml").is_file() else None
