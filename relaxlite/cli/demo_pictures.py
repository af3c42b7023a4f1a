"""relaxlite demo --pictures: recognize text in images of any width with one compiled model.

The model is PP-OCRv4's recognizer (PaddleOCR). Input: an image of one line, 48 pixels high. Output: for every eighth
column, the probabilities of 6,625 characters, decoded by greedy CTC (Graves et al., 2006).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from relaxlite import models
from relaxlite.cli.compiling import show_timings
from relaxlite.cli.sizes import bytes_text
from relaxlite.driver import compile as compile_module
from relaxlite.errors import RelaxliteError
from relaxlite.frontend.onnx import from_onnx
from relaxlite.passes.context import PassContext
from relaxlite.records import dataclass
from relaxlite.runtime.module import Executable
from relaxlite.target import Target

MODEL = "ppocrv4-rec"
HEIGHT = 48  # of a line in pixels, as in the model's training
FONT_SIZE, MARGIN = 32, 4  # as PP-OCR's detector crops lines; the model reads wide margins as spaces
LINES = (
    "relaxlite",
    "compiled once",
    "every width is welcome",
    "one program for all the shapes that come",
    "No padding, no buckets, no recompilation: 12345.67",
)


@dataclass(frozen=True, slots=True)
class Line:
    """An image of a line of text."""

    picture: np.ndarray  # (48, width, 3) uint8
    text: str | None  # the drawn text; None for an image from a file


def execute(args: argparse.Namespace) -> None:
    lines = [draw(text) for text in args.text or (() if args.image else LINES)] + [open_line(f) for f in args.image]
    if args.save_pictures:
        _save_pictures(lines, Path(args.save_pictures))
    print(f"1. Fetch {MODEL}, which reads a line of text in a picture")
    path = models.fetch(MODEL)
    print(f"   {path}, {bytes_text(path.stat().st_size)}\n")
    print("2. Compile it, once, for every batch, height and width")
    exe, alphabet = _compile(args, path)
    print("\n3. Read each line at its own width\n")
    texts = _read_each(exe, alphabet, lines)
    if len(lines) > 1:
        print(f"\n4. Read the {len(lines)} lines as one batch, padded to the widest\n")
        _read_batch(exe, alphabet, lines, texts)
    shapes = len({line.picture.shape for line in lines}) + (len(lines) > 1)
    print(f"\nOne compilation, {shapes} shape{'s' if shapes > 1 else ''}.", end=" ")
    print('Try your own: relaxlite demo --pictures "any words" --image line.png')


def _compile(args: argparse.Namespace, path: Path) -> tuple[Executable, list[str]]:
    """Compile the model; return it and the characters of its classes."""
    context = PassContext(Target.host())
    start = time.perf_counter()
    module = from_onnx(path, dynamic_shapes={"x": {0: "batch", 2: "height", 3: "width"}})
    context.timings.append(("import", time.perf_counter() - start))
    exe = compile_module(module, context.target, context=context)
    seconds = time.perf_counter() - start
    for title, specs in (("in ", exe.inputs), ("out", exe.outputs)):
        for spec in specs:
            print(f"   {title}  {spec}")
    ops = sum(exe.data.metadata.info["ops"].values())
    print(f"   {ops} operators became {len(exe.data.kernels)} kernels for {exe.data.target.cpu} in {seconds:.1f} s:")
    for name, spent in _stages(context.timings, seconds):
        print(f"   {name:<36}{spent:5.1f} s  {'#' * round(40 * spent / seconds)}".rstrip())
    show_timings(args, context.timings)
    metadata = dict(module.attrs["metadata"])  # type: ignore[arg-type,var-annotated]
    return exe, [*metadata["character"].splitlines(), " "]


def _stages(timings: Sequence[tuple[str, float]], seconds: float) -> list[tuple[str, float]]:
    named = {"import": "read the ONNX file", "codegen": "make machine code"}
    seconds_by_stage = {text: sum(s for name, s in timings if name == key) for key, text in named.items()}
    passes = sum(s for name, s in timings if name not in named)
    remaining = seconds - passes - sum(seconds_by_stage.values())
    stages = [(named["import"], seconds_by_stage[named["import"]]), ("fuse, schedule and plan memory", passes)]
    return [*stages, (named["codegen"], seconds_by_stage[named["codegen"]]), ("verify, load and link", remaining)]


def _read_each(exe: Executable, alphabet: Sequence[str], lines: Sequence[Line]) -> list[str]:
    print(f"   {'size':>8}  {'ms':>6}  {'sure':>4}  text")
    texts = []
    for line in lines:
        x = normalize([line.picture])
        start = time.perf_counter()
        scores = exe(x)  # (1, steps, classes)
        elapsed = time.perf_counter() - start
        text, confidence = decode(scores[0], alphabet)
        print(f"   {x.shape[3]:>5}x{x.shape[2]}  {elapsed * 1e3:6.1f}  {confidence:4.0%}  {text}")
        texts.append(text)
    drawn = [(line.text, text) for line, text in zip(lines, texts, strict=True) if line.text is not None]
    if drawn:
        print(f"\n   {sum(a == b for a, b in drawn)} of {len(drawn)} drawn lines read to the letter")
    return texts


def _read_batch(exe: Executable, alphabet: Sequence[str], lines: Sequence[Line], alone: Sequence[str]) -> None:
    batch = normalize([line.picture for line in lines])
    start = time.perf_counter()
    scores = exe(batch)  # (lines, steps, classes)
    elapsed = time.perf_counter() - start
    same = sum(decode(s, alphabet)[0].strip() == text for s, text in zip(scores, alone, strict=True))
    shapes = " -> ".join("x".join(map(str, array.shape)) for array in (batch, scores))
    print(f"   {shapes} in {elapsed * 1e3:.1f} ms; {same} of {len(lines)} lines read as before")


# Pictures


def draw(text: str) -> Line:
    """Draw a line of black text on white."""
    font = ImageFont.load_default(size=FONT_SIZE)
    picture = Image.new("RGB", (max(16, round(font.getlength(text)) + 2 * MARGIN), HEIGHT), "white")
    ImageDraw.Draw(picture).text((MARGIN, HEIGHT // 2), text, fill="black", font=font, anchor="lm")
    return Line(np.asarray(picture), text)


def open_line(file: str) -> Line:
    """Read an image and scale it to the model's height. Raises RelaxliteError for an unreadable file."""
    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except UnidentifiedImageError:
        raise RelaxliteError(f"{file}: not a picture that Pillow can read") from None
    except OSError as error:
        raise RelaxliteError(f"cannot read the picture {file!r}: {error.strerror or error}") from error
    width = max(16, round(picture.width * HEIGHT / picture.height))
    return Line(np.asarray(picture.resize((width, HEIGHT), Image.Resampling.BICUBIC)), None)


def _save_pictures(lines: Sequence[Line], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, line in enumerate(lines):
        Image.fromarray(line.picture).save(folder / f"line{k}.png")


def normalize(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Convert images (48, w, 3) uint8 to a batch (n, 3, 48, max w) float32 in -1..1, BGR, zero-padded as in PP-OCR."""
    batch = np.zeros((len(pictures), 3, HEIGHT, max(p.shape[1] for p in pictures)), np.float32)
    for row, picture in zip(batch, pictures, strict=True):
        row[:, :, : picture.shape[1]] = picture[:, :, ::-1].transpose(2, 0, 1) / np.float32(127.5) - 1
    return batch


def decode(scores: np.ndarray, alphabet: Sequence[str]) -> tuple[str, float]:
    """Decode scores (steps, classes) by greedy CTC with blank 0; return the text and its mean score."""
    best = scores.argmax(axis=1)
    keep = (best != 0) & np.concatenate([[True], best[1:] != best[:-1]])
    text = "".join(alphabet[c - 1] for c in best[keep])
    return text, float(scores.max(axis=1)[keep].mean()) if keep.any() else 0.0
