"""Numbers for people: exact where there is room, three digits where there is not."""

from __future__ import annotations


def exact(value: int) -> str:
    """`85,798,656`, and nothing for zero."""
    return f"{value:,}" if value else ""


def plural(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short(value: int, units: str = "KMBT") -> str:
    """`85.8M`: three significant digits, by thousands; nothing for zero.

    `units` names 10^3, 10^6 and so on; operations are told in KMGT.
    """
    if value < 1000:
        return str(value) if value else ""
    scaled, steps = value / 1000, 1
    while scaled >= 999.5 and steps < len(units):
        scaled, steps = scaled / 1000, steps + 1
    return f"{scaled:#.3g}".rstrip(".") + units[steps - 1]


def percent(share: float) -> str:
    """`24.8%`, `100%`, and nothing for zero: five characters at most."""
    text = f"{share:.1%}" if share else ""
    return "100%" if text == "100.0%" else text
