"""The ONNX standard's own test suite (`onnx.backend.test`) through relaxlite's implementation of its interface.

    python -m tests.support.onnx_suite              # all cases, compiled: which fail, why, and the totals
    python -m tests.support.onnx_suite softmax_     # those whose name contains the text

Cases run as they are. Those that cannot pass stand in onnx_suite_expected.txt: the name of a case, then why.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

EXPECTED_FILE = Path(__file__).with_name("onnx_suite_expected.txt")


def load_cases() -> dict[str, Any]:
    """Functions by name of case; a function raises where the case fails. Takes ten seconds: data is computed."""
    from onnx.backend.test.runner import Runner

    from relaxlite.frontend.onnx.backend import RelaxliteBackend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        items = Runner(RelaxliteBackend)._test_items.values()
    return {
        name.removesuffix("_cpu"): item.func
        for category in items
        for name, item in category.items()
        if name.endswith("_cpu")
    }


def sample(names: Iterable[str], every: int) -> list[str]:
    """The first case of each operator, by the first word of its name, and each n-th of all cases."""
    words, chosen = set[str](), list[str]()
    for number, name in enumerate(names):
        word = name.split("_")[1]
        if word not in words or number % every == 0:
            chosen.append(name)
        words.add(word)
    return chosen


def run_cases(cases: Mapping[str, Any]) -> dict[str, str]:
    """Run cases; why each that fails does, by name."""
    failures = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"ONNX_HOME": folder}):
        for name, case in cases.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    case(None)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return failures


def expected_failures() -> dict[str, str]:
    """Name of a case -> why it cannot pass."""
    lines = [line for line in EXPECTED_FILE.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason for name, _, reason in (line.partition(" ") for line in lines)}


def main(text: str = "") -> int:
    start, expected = time.time(), expected_failures()
    cases = {name: case for name, case in load_cases().items() if text in name}
    failures = run_cases(cases)
    for name, reason in failures.items():
        print(f"{name}: {expected.get(name, 'UNEXPECTED')}\n    {reason[:300]}")
    print(f"{len(cases) - len(failures)} of {len(cases)} pass in {time.time() - start:.0f} s")
    return int(not failures.keys() <= expected.keys())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
