"""Colours as a command line writes them."""

from __future__ import annotations

import contextlib

from PIL import ImageColor

from vitcli.errors import VitcliError
from vitcli.images.paths import printable


def parse_colour(text: str) -> tuple[int, int, int]:
    """Red, green, blue from a name (`white`), `#rrggbb`, `rgb(0, 0, 0)` or three numbers `0,0,0`.

    Raises VitcliError for anything else, transparency included.
    """
    numbers = text.count(",") == 2 and "(" not in text
    with contextlib.suppress(ValueError):
        colour = ImageColor.getrgb(f"rgb({text})" if numbers else text.strip())
        if len(colour) == 3 and all(0 <= channel <= 255 for channel in colour):
            return colour
    raise VitcliError(
        f"{printable(text)} is not a colour",
        "write a name, #rrggbb, or three numbers such as 255,255,255",
    )
