"""Converters of operators on text and pictures, most of which run on the host (runtime/host_operators.py)."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from relaxlite.frontend.onnx.host_call import host_call, sized_host_call
from relaxlite.frontend.onnx.narrow_types import TEXT
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, onnx_op
from relaxlite.ir.expr import Expr
from relaxlite.ir.ops.broadcast import broadcast_dim
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType


def _text(n: Node, x: Expr) -> Expr:
    """Mark a tensor of codes as text."""
    n.importer.narrow[x] = TEXT
    return x


def _text_input(n: Node, index: int) -> Expr:
    x = n.input(index)
    if n.importer.narrow.get(x) is not TEXT:
        n.fail(f"input {index} is {n.dtype(index)}, not text")
    return x


@onnx_op("StringConcat", since=20)
def string_concat(n: Node) -> Result:
    left, right = n.shape(0), n.shape(1)
    rank = max(len(left), len(right))
    padded = [(sym(1),) * (rank - len(dims)) + dims for dims in (left, right)]
    dims = [broadcast_dim(a, b) for a, b in zip(*padded, strict=True)]
    if None in dims:
        n.fail(f"shapes ({', '.join(map(str, left))}) and ({', '.join(map(str, right))}) do not broadcast")
    ty = TensorType.of(tuple(d for d in dims if d is not None), "int64")
    return _text(n, host_call(n, [_text_input(n, 0), _text_input(n, 1)], {}, [ty])[0])


@onnx_op("StringSplit", since=20)
def string_split(n: Node) -> Result:
    """StringSplit: pieces (..., most pieces of a string) and their number (...)."""
    options = {"delimiter": n.text("delimiter", ""), "maxsplit": n.int("maxsplit", -1)}
    rank = n.rank()
    pieces, counts = sized_host_call(n, [_text_input(n, 0)], options, [(rank + 1, "int64"), (rank, "int64")])
    return _text(n, pieces), counts


@onnx_op("RegexFullMatch", since=20)
def regex_full_match(n: Node) -> Result:
    """RegexFullMatch, by Python's regular expressions."""
    pattern = n.text("pattern")
    try:
        re.compile(pattern)
    except re.error as error:
        n.fail(f"attribute 'pattern' is no regular expression that Python takes: {pattern!r}: {error}")
    return host_call(n, [_text_input(n, 0)], {"pattern": pattern}, [TensorType.of(n.shape(), "bool")])[0]


@onnx_op("StringNormalizer", since=10)
def string_normalizer(n: Node) -> Result:
    """StringNormalizer of a vector (c,) or row (1, c); the locale is Unicode's, as in Python."""
    n.ignore("locale")
    options = {
        "case_change_action": n.text("case_change_action", "NONE"),
        "is_case_sensitive": n.flag("is_case_sensitive"),
        "stopwords": list(n.texts("stopwords", ())),
    }
    if options["case_change_action"] not in ("NONE", "LOWER", "UPPER"):
        n.fail(f"attribute 'case_change_action' must be NONE, LOWER or UPPER, not {options['case_change_action']!r}")
    return _text(n, sized_host_call(n, [_text_input(n, 0)], options, [(n.rank(), "int64")])[0])


@onnx_op("TfIdfVectorizer", since=9)
def tf_idf_vectorizer(n: Node) -> Result:
    """TfIdfVectorizer: counts or weights of the n-grams of a pool, of numbers or text."""
    columns = n.ints("ngram_indexes")
    options: dict[str, Any] = {
        "mode": n.text("mode"),
        "min_gram_length": n.int("min_gram_length"),
        "max_gram_length": n.int("max_gram_length"),
        "max_skip_count": n.int("max_skip_count"),
        "weights": list(n.floats("weights", ())),
        "width": max(columns, default=-1) + 1,
        "pool": [[gram, column] for gram, column in zip(_ngrams(n), columns, strict=True)],
    }
    ty = TensorType.of((*n.shape()[:-1], options["width"]), "float32")
    return host_call(n, [n.input(0)], options, [ty])[0]


def _ngrams(n: Node) -> list[list[int]]:
    """Return the n-grams of the pool, which holds first all of length 1, then of length 2, ..."""
    numbers = n.ints("pool_int64s", None)
    if numbers is None:
        numbers = tuple(n.importer.reader.codes(n.texts("pool_strings")).tolist())
    else:
        n.ignore("pool_strings")
    begins = [*n.ints("ngram_counts"), len(numbers)]
    grams = []
    for length, (begin, end) in enumerate(pairwise(begins), 1):
        grams += [list(numbers[k : k + length]) for k in range(begin, end, length)]
    return grams


@onnx_op("ImageDecoder", since=20)
def image_decoder(n: Node) -> Result:
    """ImageDecoder: pixels (height, width, channels) of an encoded picture, uint8."""
    layout = n.text("pixel_format", "RGB")
    if layout not in ("RGB", "BGR", "Grayscale"):
        n.fail(f"attribute 'pixel_format' must be RGB, BGR or Grayscale, not {layout!r}")
    return sized_host_call(n, [n.input(0)], {"pixel_format": layout}, [(3, "uint8")])[0]
