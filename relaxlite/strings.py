"""Text in tensors: an element is the 64-bit code of its string, and a table of each call says which string it is.

Codes are hashes, equal in every process, so that compiled models compare, look up and move text as integers. The empty
string is code 0. Two strings of one code in a call are an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from relaxlite.errors import ExecutionError, InputError

_active = threading.local()


def code_of(text: str) -> int:
    """The code of a string, a signed integer of 64 bits."""
    import hashlib

    if not text:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def encode(texts: Any, what: str = "a tensor") -> tuple[np.ndarray, dict[int, str]]:
    """Codes int64 of an array of str or bytes, and the strings by code. InputError for other elements."""
    array = np.asarray(texts)
    if array.dtype.kind not in "OUS" and array.size:
        raise InputError(f"{what}: got {array.dtype.name}, expects strings")
    table: dict[str, int] = {}
    codes = np.zeros(array.size, np.int64)
    for place, element in enumerate(array.ravel().tolist()):
        text = element.decode("utf-8", "replace") if isinstance(element, bytes) else element
        if not isinstance(text, str):
            raise InputError(f"{what}: an element is {type(element).__name__}, expects strings")
        if text not in table:
            table[text] = code_of(text)
        codes[place] = table[text]
    return codes.reshape(array.shape), {code: text for text, code in table.items()}


@contextmanager
def table(known: Iterable[str] = ()) -> Iterator[None]:
    """A table of strings for one call in this thread; `known`: strings of the model."""
    outer = getattr(_active, "strings", None)
    _active.strings = {}
    add({code_of(text): text for text in known})
    try:
        yield
    finally:
        _active.strings = outer


def add(strings: dict[int, str]) -> None:
    """Add strings by code to the table of the call."""
    known = _strings()
    for code, text in strings.items():
        if known.setdefault(code, text) != text:
            raise ExecutionError(f"the strings {known[code]!r} and {text!r} have one code; change either")


def to_codes(texts: Any) -> np.ndarray:
    """Codes of strings that the call makes; the strings go into its table."""
    codes, strings = encode(texts)
    add(strings)
    return codes


def to_texts(codes: np.ndarray) -> np.ndarray:
    """Strings, an object array, of codes of the call."""
    known = _strings()
    texts = np.empty(codes.size, dtype=object)
    try:
        texts[:] = [known[code] if code else "" for code in codes.ravel().tolist()]
    except KeyError as error:
        raise ExecutionError(f"a tensor of text holds {error}, the code of no string of this call") from error
    return texts.reshape(codes.shape)


def _strings() -> dict[int, str]:
    strings = getattr(_active, "strings", None)
    if strings is None:
        raise ExecutionError("text is known only during a call of a model that takes, makes or gives text")
    return strings
