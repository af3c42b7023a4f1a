"""Operators on text and pictures, which run on the host: Python functions that bytecode calls as `extern:SYMBOL`.

An operator takes arrays and options, and returns arrays. Its routine "host.NAME" writes them into outputs; where their
sizes depend on data, "host.NAME.sizes" first tells the dimensions of all outputs in a row. Options are JSON, as uint8.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from relaxlite import strings
from relaxlite.errors import ExecutionError

PREFIX = "host."
Options = Mapping[str, Any]
_CASES: Mapping[str, Callable[[str], str]] = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}
_Operator = Callable[..., Sequence[np.ndarray]]


def host_routine(symbol: str) -> Callable[..., None] | None:
    """The routine of a symbol: it takes inputs, options, then outputs, which it fills in. None for another symbol."""
    name, _, suffix = symbol.removeprefix(PREFIX).partition(".")
    if not symbol.startswith(PREFIX) or name not in _OPERATORS or suffix not in ("", "sizes"):
        return None
    return _sizes_routine(_OPERATORS[name]) if suffix else _routine(_OPERATORS[name])


def _routine(operator: tuple[_Operator, int]) -> Callable[..., None]:
    function, count = operator

    def run(*arrays: np.ndarray) -> None:
        for out, value in zip(arrays[count + 1 :], function(*arrays[:count], _options(arrays[count])), strict=True):
            out[...] = value

    return run


def _sizes_routine(operator: tuple[_Operator, int]) -> Callable[..., None]:
    function, count = operator

    def run(*arrays: np.ndarray) -> None:
        results = function(*arrays[:count], _options(arrays[count]))
        arrays[-1][...] = [dim for value in results for dim in np.shape(value)]

    return run


def _options(encoded: np.ndarray) -> Options:
    options = json.loads(encoded.tobytes())
    assert isinstance(options, dict)
    return options


def _concat(left: np.ndarray, right: np.ndarray, _: Options) -> Sequence[np.ndarray]:
    return [strings.to_codes(np.add(strings.to_texts(left), strings.to_texts(right)))]


def _split(codes: np.ndarray, options: Options) -> Sequence[np.ndarray]:
    """Pieces of each string, padded with empty strings, and their numbers."""
    delimiter, limit = options["delimiter"] or None, options["maxsplit"]
    pieces = [text.split(delimiter, limit) for text in strings.to_texts(codes).ravel().tolist()]
    width = max(map(len, pieces), default=0)
    table = np.full((len(pieces), width), "", dtype=object)
    for row, parts in zip(table, pieces, strict=True):
        row[: len(parts)] = parts
    counts = np.array([len(parts) for parts in pieces], np.int64).reshape(codes.shape)
    return [strings.to_codes(table).reshape(*codes.shape, width), counts]


def _matches(codes: np.ndarray, options: Options) -> Sequence[np.ndarray]:
    pattern = re.compile(options["pattern"])
    matched = [pattern.fullmatch(text) is not None for text in strings.to_texts(codes).ravel().tolist()]
    return [np.array(matched, bool).reshape(codes.shape)]


def _normalized(codes: np.ndarray, options: Options) -> Sequence[np.ndarray]:
    """Strings in another case, without stop words; one empty string if none is left."""
    change = _CASES[options["case_change_action"]]
    fold = _CASES["NONE" if options["is_case_sensitive"] else "LOWER"]
    stopwords = {fold(word) for word in options["stopwords"]}
    texts = [_without_accents(text) for text in strings.to_texts(codes).ravel().tolist()]
    kept = [change(text) for text in texts if fold(text) not in stopwords] or [""]
    shape = (1, len(kept)) if codes.ndim == 2 else (len(kept),)
    return [strings.to_codes(np.array(kept, dtype=object)).reshape(shape)]


def _without_accents(text: str) -> str:
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def _ngram_weights(x: np.ndarray, options: Options) -> Sequence[np.ndarray]:
    """Counts of n-grams of each row, of consecutive elements and of ones with equal gaps, in the mode's weights."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    pool = {tuple(gram): column for gram, column in options["pool"]}
    counts = np.zeros((len(rows), options["width"]), np.float32)
    for row, row_counts in zip(rows.tolist(), counts, strict=True):
        for length, skip in _spacings(options):
            for begin in range(len(row) - (length - 1) * skip):
                column = pool.get(tuple(row[begin : begin + (length - 1) * skip + 1 : skip]))
                if column is not None:
                    row_counts[column] += 1
    weights = np.array(options["weights"] or [1.0], np.float32)
    if options["mode"] != "TF":
        counts = (counts > 0).astype(np.float32)
    if options["mode"] != "IDF" and options["mode"] != "TFIDF":
        weights = np.ones(1, np.float32)
    return [(counts * weights).reshape(*x.shape[:-1], options["width"])]


def _spacings(options: Options) -> Sequence[tuple[int, int]]:
    """(length, distance) of the n-grams to count; elements of 1-grams have no distance."""
    lengths = range(options["min_gram_length"], options["max_gram_length"] + 1)
    distances = range(1, options["max_skip_count"] + 2)
    return [(n, d) for n in lengths for d in distances if n > 1 or d == 1]


def _decoded_picture(encoded: np.ndarray, options: Options) -> Sequence[np.ndarray]:
    """Pixels uint8 (height, width, channels) of a picture in a format that Pillow reads."""
    try:
        from PIL import Image  # optional, for models that decode pictures
    except ImportError as error:
        raise ExecutionError("ImageDecoder needs Pillow: pip install pillow") from error

    layout = options["pixel_format"]
    try:
        with Image.open(io.BytesIO(encoded.tobytes())) as picture:
            pixels = np.asarray(picture.convert("L" if layout == "Grayscale" else "RGB"))
    except Exception as error:  # whatever Pillow raises for a damaged file
        raise ExecutionError(f"ImageDecoder cannot decode {encoded.size} bytes as a picture: {error}") from error
    if layout == "Grayscale":
        return [pixels[..., None]]
    return [pixels[..., ::-1] if layout == "BGR" else pixels]


_OPERATORS: Mapping[str, tuple[_Operator, int]] = {  # name -> function, number of inputs
    "StringConcat": (_concat, 2),
    "StringSplit": (_split, 1),
    "RegexFullMatch": (_matches, 1),
    "StringNormalizer": (_normalized, 1),
    "TfIdfVectorizer": (_ngram_weights, 1),
    "ImageDecoder": (_decoded_picture, 1),
}


@cache
def host_routines() -> dict[str, Callable[..., None]]:
    """All routines by symbol."""
    names = [f"{PREFIX}{name}{suffix}" for name in _OPERATORS for suffix in ("", ".sizes")]
    return {name: routine for name in names if (routine := host_routine(name)) is not None}
