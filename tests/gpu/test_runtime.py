"""Executables on a device: state, donated arrays, control flow on data, artifacts, memory, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ArtifactError, ExecutionError, OutOfMemoryError
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.types import TensorType
from relaxlite.runtime.gpu.driver import current_driver, use_driver
from tests.gpu.simulator import LAUNCH_FAILED, SimulatedDriver

CUDA = "cuda -arch=sm_80"


def gather() -> IRModule:
    """x[i], which checks i."""
    bb = BlockBuilder()
    n, m = bb.symbol("n"), bb.symbol("m")
    params = {"x": TensorType.of((m, 3), "float32"), "i": TensorType.of((n,), "int64")}
    with bb.function("main", **params) as (x, i):
        bb.result(bb.emit(get_op("gather")(x, i, axis=0)))
    return bb.module()


@pytest.fixture
def driver() -> Any:
    simulated = SimulatedDriver()
    with use_driver(simulated):
        yield simulated


def test_a_failed_check_is_the_same_error_as_on_a_cpu(driver: SimulatedDriver) -> None:
    x, bad, good = np.ones((4, 3), np.float32), np.array([1, 7]), np.array([1, 3])
    errors = []
    for target in ("llvm", CUDA):
        exe = rl.compile(gather(), target)
        with pytest.raises(ExecutionError) as caught:
            exe(x, bad)
        errors.append(str(caught.value).split(": ", 1)[1].split(" (")[0])
        np.testing.assert_array_equal(exe(x, good), x[good])
    assert errors[1] in errors[0]


def test_a_saved_model_runs_from_its_file(driver: SimulatedDriver, tmp_path: Path) -> None:
    path = tmp_path / "gather.rlx"
    rl.compile(gather(), CUDA).save(path)
    exe = rl.load(path)
    assert exe.data.target.device == CUDA and exe.data.device_modules
    x, i = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([3, 0, 0])
    np.testing.assert_array_equal(exe(x, i), x[i])
    assert exe(x, i[:0]).shape == (0, 3), "an empty grid launches nothing"


def test_loading_without_a_device_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaxlite.runtime.gpu.cuda._LIBRARY", "libcuda-of-no-machine.so.1")
    current_driver.__globals__["open_driver"].cache_clear()
    path = tmp_path / "gather.rlx"
    with use_driver(SimulatedDriver()):
        rl.compile(gather(), CUDA).save(path)
    with pytest.raises(ArtifactError, match=r"runs on an NVIDIA GPU, whose driver .* is not installed"):
        rl.load(path)


def test_memory_that_the_device_lacks_is_a_clear_error(driver: SimulatedDriver) -> None:
    exe = rl.compile(gather(), CUDA)
    x = np.ones((4, 3), np.float32)
    before = len(driver.places)
    with pytest.raises(OutOfMemoryError, match=r"the simulated device has no .* of memory left"):
        exe(x, np.zeros(1 << 23, np.int64))
    np.testing.assert_array_equal(exe(x, np.array([2])), x[:1])
    exe.release_memory()
    assert len(driver.places) <= before, "what the failed call took is free"


def test_a_refused_launch_is_an_error_with_the_drivers_number(driver: SimulatedDriver) -> None:
    exe = rl.compile(gather(), CUDA)
    driver.kernels = {handle: None for handle in driver.kernels}  # type: ignore[misc]
    with pytest.raises(ExecutionError, match=rf"the driver refused a launch \(CUDA error {LAUNCH_FAILED}\)"):
        exe(np.ones((4, 3), np.float32), np.array([1]))


def test_executables_share_a_device(driver: SimulatedDriver) -> None:
    first, second = rl.compile(gather(), CUDA), rl.compile(gather(), CUDA)
    x, i = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([3, 0])
    for exe in (first, second, first):
        np.testing.assert_array_equal(exe(x, i), x[i])


def test_passes_are_validated_by_the_oracle(driver: SimulatedDriver) -> None:
    bb = BlockBuilder()
    n = bb.symbol("n", lower=1, upper=9)
    with bb.function("main", x=TensorType.of((n, 20), "float32"), w=TensorType.of((20, 6), "float32")) as (x, w):
        bb.result(bb.emit(get_op("softmax")(bb.emit(get_op("matmul")(x, w)), axis=-1)))
    rl.compile(bb.module(), CUDA, validate=True)


def test_a_profile_times_each_kernel(driver: SimulatedDriver) -> None:
    exe = rl.compile(gather(), CUDA)
    profile = exe.profile((np.ones((4, 3), np.float32), np.array([1])), runs=2)
    assert "gather" in str(profile)


def test_interpreted_memory_checks_need_memory_of_the_host(
    driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAXLITE_CHECK_MEMORY", "1")
    with pytest.raises(ArtifactError, match="RELAXLITE_CHECK_MEMORY reads the memory of tensors, which lies on a GPU"):
        rl.compile(gather(), CUDA)
