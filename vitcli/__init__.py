"""vitcli: a command-line experimentation tool for Vision Transformer encoders.

The Python API is in `vitcli.api`; its names are here too and load torch when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitcli._version import __version__
from vitcli.errors import VitcliError

if TYPE_CHECKING:
    from vitcli.api import encode, load

__all__ = ["VitcliError", "__version__", "encode", "load"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in ("encode", "load"):
        from vitcli import api

        return getattr(api, name)
    raise AttributeError(f"module 'vitcli' has no attribute {name!r}")
