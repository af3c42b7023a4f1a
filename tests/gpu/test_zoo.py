"""The model zoo on the simulated device: the same results as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ExecutionError
from relaxlite.runtime.gpu.driver import use_driver
from tests.gpu.simulator import SimulatedDriver
from tests.support import tiers
from tests.test_model_zoo import ZOO

KEPT = (
    "gpt",
    "resnet",
    "crnn",
    "mixture_of_experts",
    "sizes_from_data",
    "branches",
    "graph_network",
    "contributed_ops",
)
TOLERANCE = 1e-4


def small_feeds(feeds: list[Any]) -> list[Any]:
    """The two smallest inputs of a model, of which none is empty."""
    sizes = {
        k: sum(x.size for x in feed.values()) for k, feed in enumerate(feeds) if all(x.size for x in feed.values())
    }
    return [feeds[k] for k in sorted(sizes, key=lambda k: sizes[k])[:2]]


@pytest.mark.parametrize("name", tiers.only(KEPT, ZOO))
def test_models_compute_what_they_compute_on_a_cpu(name: str) -> None:
    make, feeds = ZOO[name]
    module = rl.from_onnx(make())
    usual = rl.compile(module)
    driver = SimulatedDriver(1 << 27, checks_races=tiers.is_exhaustive(), counts_traffic=False)
    with use_driver(driver):
        exe = rl.compile(module, "cuda -arch=sm_80")
    for feed in small_feeds(feeds):
        want = usual.run(feed)
        try:
            got = exe.run(feed)
        except ExecutionError:
            if driver.fault is not None:
                raise driver.fault from None
            raise
        for key, array in want.items():
            np.testing.assert_allclose(got[key], array, TOLERANCE, TOLERANCE, err_msg=key)
    assert driver.launches
