"""Whether JPEGs may be decoded at reduced scale: how far the resized image moves.

    python experiments/reduced_jpeg.py

libjpeg can decode at 1/2, 1/4 or 1/8 (Pillow's draft mode), which saves a third to a half of the
time of a 12-megapixel image. It averages before it clips and keeps other chroma samples than the
full decoder, so that the result after resizing is not the same. Prints the largest and the mean
difference in 8-bit levels, for pictures drawn here, and the processor time of both. What it showed
is why `vitcli encode` decodes at full scale: at 1/2 at most 2 levels on the photograph, but 22 on
colored text with subsampled chroma, and what a JPEG holds is not known before it is decoded.
"""

from __future__ import annotations

import io
import time

import numpy as np
from PIL import Image, ImageDraw

HEIGHT, WIDTH = 3000, 4000
RESIZES = (((224, 224), Image.Resampling.BILINEAR), ((341, 256), Image.Resampling.BICUBIC))


def photograph(rng: np.random.Generator) -> Image.Image:
    """Noise whose amplitude falls as one over frequency, as that of photographs does."""
    frequency = np.hypot(np.fft.rfftfreq(WIDTH)[None], np.fft.fftfreq(HEIGHT)[:, None])
    frequency[0, 0] = np.inf
    planes = []
    for _ in range(3):
        spectrum = np.fft.rfft2(rng.standard_normal((HEIGHT, WIDTH))) / frequency
        plane = np.fft.irfft2(spectrum, (HEIGHT, WIDTH))
        planes.append(128 + 50 * plane / plane.std())
    return Image.fromarray(np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8))


def text(rng: np.random.Generator) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for top in range(0, HEIGHT, 24):
        line = "The quick brown fox jumps over the lazy dog 0123456789 " * 12
        draw.text((10, top), line, fill=_color(rng), font_size=20)
    return image


def discs(rng: np.random.Generator) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(image)
    for _ in range(3000):
        x, y, radius = rng.integers(0, WIDTH), rng.integers(0, HEIGHT), rng.integers(5, 200)
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_color(rng))
    return image


def _color(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(level) for level in rng.integers(0, 256, 3))
    return red, green, blue


def decoded(content: bytes, scale: int) -> tuple[Image.Image, float]:
    start = time.process_time()
    image = Image.open(io.BytesIO(content))
    if scale > 1:
        image.draft("RGB", (WIDTH // scale, HEIGHT // scale))
    image.load()
    return image, time.process_time() - start


def main() -> None:
    rng = np.random.default_rng(0)
    for draw in (photograph, text, discs):
        picture = draw(rng)
        for quality, subsampling in ((75, "4:2:0"), (95, "4:4:4")):
            file = io.BytesIO()
            picture.save(file, "JPEG", quality=quality, subsampling=subsampling)
            full, full_s = decoded(file.getvalue(), 1)
            print(f"{draw.__name__}, quality {quality} {subsampling}: full {full_s * 1e3:.0f} ms")
            for size, resampling in RESIZES:
                expected = np.asarray(full.resize(size, resampling), np.int16)
                for scale in (2, 4, 8):
                    image, spent = decoded(file.getvalue(), scale)
                    moved = abs(np.asarray(image.resize(size, resampling), np.int16) - expected)
                    print(
                        f"  1/{scale} to {size[0]}x{size[1]} {resampling.name.lower():8} "
                        f"max {moved.max():2} mean {moved.mean():.2f} levels, {spent * 1e3:.0f} ms"
                    )


if __name__ == "__main__":
    main()
