"""fetch a real model, compile it once, and read text lines of different widths with it

The model (PP-OCRv4's text recogniser) is compiled with symbolic batch, height and width; every line is then read at its
own width, and at last all of them as one batch. Without a network, the message says where to place the model by hand.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

NAME = "demo"
MODEL = "ppocrv4-rec"
HEIGHT = 48  # the model's line height, in pixels
LINES = (
    "relaxlite",
    "compiled once",
    "every width is welcome",
    "one program for all the shapes that come",
    "No padding, no buckets, no recompilation: 12345.67",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", help="lines of text to draw and read (default: a few about the demo)")
    parser.add_argument("--image", action="append", metavar="FILE", help="a picture of one line of text; repeat")
    parser.add_argument("--save-pictures", metavar="DIR", help="keep the drawn lines as PNG files")


def execute(args: argparse.Namespace) -> int:
    from relaxlite import models
    from relaxlite.driver import compile as compile_module
    from relaxlite.frontend.onnx import from_onnx
    from relaxlite.passes.manager import PassContext
    from relaxlite.target import Target

    print(f"1. fetching {MODEL}")
    path = models.fetch(MODEL)
    print("2. compiling it, once, for every batch, height and width")
    context, start = PassContext(Target.host()), time.perf_counter()
    module = from_onnx(path)
    context.timings.append(("import", time.perf_counter() - start))
    exe = compile_module(module, context.target, context=context)
    _report(exe, context, time.perf_counter() - start)
    alphabet = _alphabet(module.attrs)
    pictures = [(text, _draw(text)) for text in args.text or LINES]
    pictures += [(name, _open(name)) for name in args.image or ()]
    if args.save_pictures:
        _save_pictures(pictures, args.save_pictures)
    print("3. reading lines of text, each at its own width")
    print(f"   {'size':>10}  {'ms':>7}  {'sure':>5}  read")
    right = 0
    for text, picture in pictures:
        x = _normalize(picture)
        start = time.perf_counter()
        scores = exe(x)
        elapsed = time.perf_counter() - start
        read, confidence = _decode(scores[0], alphabet)
        right += read.replace(" ", "") == text.replace(" ", "")
        print(f"   {x.shape[3]:>6}x{x.shape[2]}  {elapsed * 1e3:7.1f}  {confidence:5.0%}  {read}")
    _read_batch(exe, [picture for _, picture in pictures])
    drawn = len(args.text or LINES)
    print(f"read {right} of {drawn} drawn lines to the letter, with one compilation")
    return 0


def _report(exe: object, context: object, seconds: float) -> None:
    from relaxlite.runtime.module import Executable

    assert isinstance(exe, Executable)
    data = exe.data
    for spec in (*exe.inputs, *exe.outputs):
        print(f"   {spec}")
    ops = data.metadata.info["ops"]
    print(
        f"   {sum(ops.values())} operators became {len(data.kernels)} kernels; memory: {_short(data.metadata.memory_plan['arena_bytes'])}"
    )
    stages = {"import": 0.0, "passes": 0.0, "codegen": 0.0}
    for name, spent in context.timings:  # type: ignore[attr-defined]
        stages[name if name in stages else "passes"] += spent
    text = ", ".join(f"{name} {spent:.1f} s" for name, spent in stages.items())
    print(f"   compiled in {seconds:.1f} s ({text})")


def _short(text: str, limit: int = 70) -> str:
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def _alphabet(attrs: object) -> list[str]:
    """The characters of the classes 1, 2, ...; class 0 is CTC's blank. The last class is a space."""
    metadata = dict(attrs["metadata"])  # type: ignore[index]
    return [*metadata["character"].splitlines(), " "]


def _draw(text: str) -> np.ndarray:
    """Black text on white, (48, width, 3) uint8."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=30)
    width = int(font.getlength(text)) + 24
    picture = Image.new("RGB", (width, HEIGHT), "white")
    ImageDraw.Draw(picture).text((12, HEIGHT // 2), text, fill="black", font=font, anchor="lm")
    return np.asarray(picture)


def _open(name: str) -> np.ndarray:
    """A picture scaled to the model's height, its proportions kept."""
    from PIL import Image

    from relaxlite.errors import InvalidArgumentError

    try:
        picture = Image.open(name).convert("RGB")
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the picture {name!r}: {error}") from error
    return np.asarray(picture.resize((max(1, round(picture.width * HEIGHT / picture.height)), HEIGHT)))


def _save_pictures(pictures: list[tuple[str, np.ndarray]], folder: str) -> None:
    from pathlib import Path

    from PIL import Image

    Path(folder).mkdir(parents=True, exist_ok=True)
    for k, (_, picture) in enumerate(pictures):
        Image.fromarray(picture).save(Path(folder) / f"line{k}.png")


def _normalize(picture: np.ndarray) -> np.ndarray:
    """(h, w, 3) uint8 -> (1, 3, h, w) float32 in -1 .. 1, blue first, as the model was trained."""
    scaled = picture[:, :, ::-1].astype(np.float32) / 127.5 - 1
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])


def _decode(scores: np.ndarray, alphabet: list[str]) -> tuple[str, float]:
    """Greedy CTC: the best class of each step, repeats merged, blanks dropped; and its mean probability."""
    best = scores.argmax(axis=1)
    keep = (best != 0) & np.concatenate([[True], best[1:] != best[:-1]])
    text = "".join(alphabet[c - 1] for c in best[keep])
    return text, float(scores.max(axis=1)[keep].mean()) if keep.any() else 0.0


def _read_batch(exe: object, pictures: list[np.ndarray]) -> None:
    width = max(p.shape[1] for p in pictures)
    batch = np.concatenate(
        [_normalize(np.pad(p, ((0, 0), (0, width - p.shape[1]), (0, 0)), constant_values=255)) for p in pictures]
    )
    start = time.perf_counter()
    scores = exe(batch)  # type: ignore[operator]
    elapsed = time.perf_counter() - start
    shape = "x".join(map(str, batch.shape))
    print(f"   all {len(pictures)} as one batch of {shape}: {elapsed * 1e3:.1f} ms, scores of shape {scores.shape}")
