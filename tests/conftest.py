"""Fixtures that several test files share."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relaxlite import models
from relaxlite.errors import FetchError
from relaxlite.passes.graph import lower_precision
from tests.support import tiers

os.environ.setdefault("RELAXLITE_VERIFY_PASSES", "1")  # every compilation of every test proves its IR after each pass
if "RELAXLITE_KERNEL_CACHE" not in os.environ:  # tests neither use nor fill the cache of whoever runs them
    os.environ["RELAXLITE_KERNEL_CACHE"] = tempfile.mkdtemp(prefix="relaxlite-kernels-")
    atexit.register(shutil.rmtree, os.environ["RELAXLITE_KERNEL_CACHE"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that the programs that tests interrupt can be

gc.disable()  # until the tests are collected: what is made until then, a million objects, stays until the end


MANY_TESTS = 5000
"""From here on it pays to leave them out of collections. Hypothesis is among what so many of them import; imported
later, it would not find who refers to the generators that it is given."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(tiers.OPTION, action="store_true", help="run all tests, also those that repeat others' work")


def pytest_configure(config: pytest.Config) -> None:
    tiers.use(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.choose(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the tests themselves out of all later collections of cyclic garbage, which would go through them."""
    if len(session.items) > MANY_TESTS:
        gc.collect()
        gc.freeze()
    gc.enable()


SLOW_FAILURE_SECONDS = 20.0
"""A registry that takes this long to fail does not answer: it is not asked again in the same session."""


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """`precision="bf16"` rounds to bfloat16, also where whole numbers would be faster."""
    monkeypatch.setattr(lower_precision, "may_be_int16", lambda weights, context: False)


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """`model_path(name)`: the path of a real model's file, fetched if need be; skips when it cannot be had."""
    failed: dict[str, str] = {}  # by model name, or by registry when that does not answer
    entries = {entry.name: entry for entry in models.known_models()}

    def fetched(name: str) -> Path:
        registry = entries[name].registry if name in entries else ""
        started = time.monotonic()
        if reason := failed.get(name) or failed.get(registry):
            pytest.skip(reason)
        try:
            return models.fetch(name, progress=False)
        except FetchError as error:
            reason = f"cannot fetch {str(error).splitlines()[0]}"
            slow = time.monotonic() - started > SLOW_FAILURE_SECONDS
            failed[registry if slow else name] = reason
            pytest.skip(reason)

    return fetched
