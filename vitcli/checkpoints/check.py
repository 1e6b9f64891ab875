"""Every tensor of an encoder is there with its shape, and none of the checkpoint's is left over."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from vitcli.checkpoints.match import Match, Part, foreign_names
from vitcli.checkpoints.tensors import Tensors
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder


def check(
    encoder: VisionEncoder, parts: Mapping[str, Part], match: Match, tensors: Tensors
) -> None:
    """
    Raises:
        VitcliError: a tensor is missing, unexpected or misshapen; both sides are named.
    """
    expected = {name: tuple(t.shape) for name, t in encoder.state_dict().items()}
    missing: list[str] = []
    misshapen: list[str] = []
    left = sorted(match.left)
    for name, shape in expected.items():
        part = parts.get(name)
        if part is None or not part.complete:
            wanted = foreign_names(name, match) if part is None else part.names
            lost = [match.prefix + n for n in wanted if n not in match.spelled]
            near = difflib.get_close_matches(lost[0], left, 1, 0.8) if lost else []
            missing.append(
                f"{name} (from {', '.join(lost) or 'nothing in this family'}"
                + (f"; nearest there: {near[0]}" if near else "")
                + ")"
            )
        elif part.try_shape() != shape:
            theirs = ", ".join(
                f"{match.spelled[n]} {_by(tensors[match.spelled[n]].shape)}" for n in part.names
            )
            misshapen.append(f"{name} is {_by(shape)}, from {theirs}")
    used = {n for name, part in parts.items() if name in expected for n in part.names}
    extra = [
        f"{match.spelled[n]} (read as {name})"
        for name, part in parts.items()
        if name not in expected
        for n in part.names
        if n in match.spelled and n not in used
    ]
    unexpected = [*left, *extra]
    problems = [
        f"{len(items)} {kind}: {_some(items)}"
        for kind, items in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if items
    ]
    if problems:
        raise VitcliError(
            f"the tensors do not make a {match.family.name} encoder: " + " | ".join(problems),
            "nothing was loaded; is the file whole, and its config its own?",
        )


def _some(items: Sequence[str], limit: int = 4) -> str:
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
