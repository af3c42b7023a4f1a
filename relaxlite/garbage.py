"""Suspension of Python's cyclic garbage collector, whose collections traverse all objects of the process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def with_gc_disabled(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: run a function with the cyclic garbage collector disabled.

    For functions that allocate many objects, most of which live until the end (docs/measurements/frontend.md).
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return run
