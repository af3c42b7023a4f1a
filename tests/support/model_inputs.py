"""Inputs that real models were made for: drawn text, drawn scenes, synthetic speech. Noise tells little about them.

A detector that sees no text answers with scores of 1e-7, whose relative error says nothing.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TEXT = "Quick brown foxes jump over 13 lazy dogs 2026 relaxlite keeps every width & height 48.5% symbolic"
DOT4_BYTES = TEXT.split()


def words(count: int, first: int = 0) -> str:
    return " ".join(DOT4_BYTES[(first + k) % len(DOT4_BYTES)] for k in range(count))


def page(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Lines of black text on a page, (height, width, 3) uint8."""
    picture = Image.new("RGB", (width, height), (250, 248, 240))
    draw, y, line = ImageDraw.Draw(picture), 4, seed
    while y < height - 8:
        size = (16, 22, 30, 40)[line % 4]
        text = words(1 + width // (size * 3), 3 * line)
        draw.text((6 + 5 * (line % 3), y), text, fill=(20, 10, 30), font=ImageFont.load_default(size=size))
        y, line = y + size + 10, line + 1
    return np.asarray(picture)


def text_line(height: int, width: int, seed: int = 0) -> np.ndarray:
    """One line of text that fills the width, (height, width, 3) uint8."""
    picture = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(size=height * 0.62)
    ImageDraw.Draw(picture).text((4, height // 2), words(20, seed), fill="black", font=font, anchor="lm")
    return np.asarray(picture)


def table(height: int, width: int) -> np.ndarray:
    """A table of 3 columns and as many rows as fit, (height, width, 3) uint8."""
    picture = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=16)
    for row, y in enumerate(range(10, height - 45, 40)):
        for column in range(3):
            x, step = 10 + column * (width - 20) // 3, (width - 20) // 3
            draw.rectangle((x, y, x + step, y + 40), outline="black", width=2)
            draw.text((x + 8, y + 10), words(1, row * 3 + column), fill="black", font=font)
    return np.asarray(picture)


def scene(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A sky, a ground and some shapes, with a little noise, (height, width, 3) uint8."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    sky = np.stack([90 + 60 * y / height, 140 + 50 * y / height, 200 - 40 * x / width], axis=-1)
    picture = Image.fromarray(sky.astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, int(height * 0.7), width, height), fill=(70, 110, 50))
    for _ in range(6):
        cx, cy, r = rng.integers(0, width), rng.integers(height // 3, height), rng.integers(height // 12, height // 4)
        draw.ellipse((cx - r, cy - r, cx + r, cy + r), fill=tuple(int(c) for c in rng.integers(40, 240, 3)))
    return np.clip(np.asarray(picture) + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)


def speech(samples: int, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """A voice of some harmonics whose pitch and loudness move, (samples,) float32 in -1 .. 1."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / rate
    pitch = 130 + 30 * np.sin(2 * np.pi * 1.7 * time + seed)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(k * phase) / k ** (1 + 0.3 * np.sin(2 * np.pi * 2.3 * time)) for k in range(1, 24))
    loudness = 0.55 + 0.45 * np.sin(2 * np.pi * 3.1 * time + 1)
    return (0.15 * voice * loudness + rng.normal(0, 0.002, samples)).astype(np.float32)


def planes(pictures: list[np.ndarray], mean: float | tuple[float, ...], scale: float | tuple[float, ...]) -> np.ndarray:
    """(n, 3, height, width) float32: (picture / 255 - mean) / scale."""
    stacked = np.stack(pictures).astype(np.float32) / 255
    return np.ascontiguousarray(((stacked - np.float32(mean)) / np.float32(scale)).transpose(0, 3, 1, 2))
