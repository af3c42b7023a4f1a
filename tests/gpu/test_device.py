"""Launches on the simulated device: the PTX that is emitted, and the faults that the device finds in it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from relaxlite.codegen.llvm import emit_assembly, emit_program
from relaxlite.errors import CodegenError, ExecutionError
from relaxlite.target import Target
from tests.gpu import programs
from tests.gpu.device import SM_80, DeviceProgram
from tests.gpu.execution import FaultError
from tests.gpu.test_oracle import CASES, SIZES, floats
from tests.support.ir_text import program


@pytest.mark.parametrize("name", CASES)
def test_launches_compute_what_they_say(name: str) -> None:
    made = DeviceProgram(program(getattr(programs, name)))
    make, expected = CASES[name]
    for n in SIZES:
        inputs = make(n)
        np.testing.assert_allclose(made(inputs)[0], expected(*inputs), 1e-4, 1e-4)
    assert made.driver.launches == len(SIZES) - 1, "an empty grid launches nothing"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("SUMS", "                barrier()\n", "", "a race"),
        ("SUMS", "out[b] = total", "out[0] = total", "a race"),
        ("PRODUCT", '                            call_library("warp", "wait", int32(0))\n', "", "that nobody wrote"),
        ("PRODUCT", '                            call_library("warp", "commit")\n', "", "that nobody wrote"),
        ("PRODUCT", "                            barrier()\n", "", "a race"),
        ("SUMS", "x[b, t]", "x[b + 1000, t]", "an access outside of an allocation"),
    ],
)
def test_faults_are_named(name: str, old: str, new: str, message: str) -> None:
    text = getattr(programs, name)
    assert old in text
    with pytest.raises(FaultError, match=message):
        DeviceProgram(program(text.replace(old, new)))(CASES[name][0](37))


def test_a_failed_check_arrives_as_an_error_and_is_then_forgotten() -> None:
    made = DeviceProgram(program(programs.CHECKED))
    with pytest.raises(ExecutionError, match="kernel 'program': an index is outside of x"):
        made([floats(5), np.array([4, 5])])
    x = floats(5)
    np.testing.assert_array_equal(made([x, np.array([4, 0])])[0], x[[4, 0]])


def test_instructions_are_those_of_the_table() -> None:
    ptx = emit_assembly({"p": program(programs.PRODUCT)}, SM_80)
    for instruction in ("cp.async.cg", "cp.async.commit_group", "cp.async.wait_group", "ldmatrix", "mma.sync.aligned"):
        assert f"\t{instruction}" in ptx
    assert ".version 8.0" in ptx and ".target sm_80" in ptx and ".reqntid 32, 1, 1" in ptx
    assert not re.findall(r"\t(?:ld|st)\.[a-z]*\d", ptx), "an access to the generic space"
    assert ".target sm_100" in emit_assembly({"p": program(programs.SUMS)}, Target.parse("cuda -arch=sm_100"))


def test_inputs_are_read_by_the_way_of_constants() -> None:
    assert "ld.global.nc" in emit_assembly({"p": program(programs.SUMS)}, SM_80)
    in_place = programs.SUMS.replace("symbols=(n,)", "symbols=(n,), writes_inputs=True")
    assert "ld.global.nc" not in emit_assembly({"p": program(in_place)}, SM_80)


def test_a_cpu_has_no_axes() -> None:
    with pytest.raises(CodegenError, match="loop b is bound to block_x, an axis of a GPU"):
        emit_program("p", program(programs.SUMS), Target.host())


def test_the_text_shows_the_host_part_and_the_launches() -> None:
    text = emit_program("p", program(programs.SUMS), SM_80)
    assert "call i32 @cuLaunchKernel(" in text and "define ptx_kernel void @kernel_p_0(" in text


def test_a_workspace_inside_of_a_launch_is_refused() -> None:
    text = programs.SHUFFLED.replace('(), "float32", "local"', '(9,), "float32"').replace("total[()]", "total[0]")
    with pytest.raises(CodegenError, match="total is allocated inside of a launch with the scope global; lift it out"):
        emit_program("p", program(text), SM_80)


@pytest.mark.parametrize("name", ["exp", "log"])
def test_functions_of_float64(name: str) -> None:
    text = programs.CHECKED.replace("f32", "f64").replace("= x[at]", f"= {name}(x[at])")
    made = DeviceProgram(program(text))
    x = np.array([0.0, -0.0, 1.0, 3.5, -2.0, 701.0, -720.0, 800.0, -800.0, 1e-310, 1e300, np.inf, -np.inf, np.nan])
    with np.errstate(all="ignore"):
        want = getattr(np, name)(x)
    np.testing.assert_allclose(made([x, np.arange(len(x))])[0], want, 1e-14, 5e-324)


def test_functions_that_need_a_library_are_refused() -> None:
    text = programs.CHECKED.replace("f32", "f64").replace("= x[at]", "= sin(x[at])")
    with pytest.raises(CodegenError, match="sin of float64 has no code on GPUs; cast the operand to float32"):
        emit_program("p", program(text), SM_80)
