"""The Python API: how alike are images to an encoder?

    python experiments/similar.py --weights facebook/dinov2-small a.jpg b.jpg c.jpg
    python experiments/similar.py --preset vit-ti16 *.png

Prints a line for every two images, the most alike first: the cosine of their pooled vectors.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

import vitcli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+")
    parser.add_argument("--preset")
    parser.add_argument("--weights")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "NUMBER"))
    arguments = parser.parse_args()
    try:
        model = vitcli.load(
            arguments.preset,
            weights=arguments.weights,
            set={key: int(value) for key, value in arguments.set},
        )
        result, vectors = vitcli.encode(model, arguments.images, tokens=["pooled"])
    except vitcli.VitcliError as error:
        raise SystemExit(f"{error} ({error.hint})") from error
    for failure in result.failed:
        print(f"skipped: {failure.error}")
    if len(result.images) < 2:
        raise SystemExit("two images or more can be compared")
    pooled = vectors["pooled"]  # (images, width)
    unit = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    cosines = unit @ unit.T
    pairs = itertools.combinations(range(len(result.images)), 2)
    for a, b in sorted(pairs, key=lambda pair: -cosines[pair]):
        print(f"{cosines[a, b]:.4f}  {result.images[a].path}  {result.images[b].path}")


if __name__ == "__main__":
    main()
