"""Compares a host function with the interpreter of its bytecode: results to the last bit, errors to the letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite import config
from relaxlite.errors import RelaxliteError
from relaxlite.runtime.host import HostFailedError
from relaxlite.runtime.module import Executable


def interpreted(exe: Executable) -> Executable:
    with config.override(interpret=True):
        return Executable(exe.data)


def outcome(exe: Executable, inputs: Sequence[Any]) -> Any:
    """What a call gives: arrays as bytes with their types, or an error's class and text."""
    try:
        results = exe(*inputs)
    except RelaxliteError as error:
        return type(error), str(error)
    arrays = results if isinstance(results, tuple) else (results,)
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays]


def assert_same_both_ways(exe: Executable, inputs: Sequence[Any] | Mapping[str, Any], reference: Executable) -> None:
    """The native host function runs the call to its end, or gives up where the interpreter raises; and both agree."""
    values = [inputs[spec.name] for spec in exe.inputs] if isinstance(inputs, Mapping) else list(inputs)
    expected = outcome(reference, values)
    assert outcome(exe, values) == expected
    if all(type(value) is np.ndarray for value in values):
        assert runs_natively(exe, values) == isinstance(expected, list)


def runs_natively(exe: Executable, values: Sequence[np.ndarray]) -> bool:
    assert exe._host is not None, exe.data.host.reason
    try:
        return exe._host(tuple(np.ascontiguousarray(v).reshape(v.shape) for v in values)) is not None
    except HostFailedError:
        return False
