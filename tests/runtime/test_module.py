"""What a user sees: calling a model, its errors, saving, loading, profiling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from relaxlite.errors import ArtifactError, ExecutionError, InputError, InvalidArgumentError
from relaxlite.runtime import threadpool
from relaxlite.runtime.executable import ExecutableData, Ret, Signature, TensorSpec, VMFunction
from relaxlite.runtime.module import Executable, load
from tests.runtime.test_vm import KERNELS_IR, R, adder, builtin, compile_object

BOUNDS = {"batch": (1, None, 1), "length": (0, 512, 1), "width": (8, None, 8)}


def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, dtype, shape, {dim: BOUNDS[dim] for dim in shape if dim in BOUNDS})


def echo(*inputs: TensorSpec) -> ExecutableData:
    """A model that gives its inputs back, as a tuple where there are several."""
    many = len(inputs) != 1
    code = (builtin("make_tuple", len(inputs), *R[: len(inputs)]), Ret(len(inputs))) if many else (Ret(0),)
    main = VMFunction("main", tuple(item.name for item in inputs), len(inputs) + 1, code)
    outputs = tuple(dataclasses.replace(item, name=f"{item.name}_out") for item in inputs)
    return ExecutableData({"main": main}, Signature(inputs, outputs))


TOKENS = spec("tokens", "int64", "batch", "length")
MASK = spec("mask", "float32", "batch", "length", 4)
HIDDEN = spec("hidden.0", "float32", "width")


@pytest.fixture
def model() -> Executable:
    return Executable(echo(TOKENS, MASK))


def arrays(batch: int = 2, length: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((batch, length), np.int64), np.ones((batch, length, 4), np.float32)


def test_arguments_by_position_and_by_name(model: Executable) -> None:
    tokens, mask = arrays()
    for result in (model(tokens, mask), model(tokens, mask=mask), model(mask=mask, tokens=tokens)):
        assert isinstance(result, tuple)
        np.testing.assert_array_equal(result[0], tokens)
        np.testing.assert_array_equal(result[1], mask)


def test_one_output_comes_alone() -> None:
    exe = Executable(echo(HIDDEN))
    assert isinstance(exe(np.ones(8, np.float32)), np.ndarray)
    assert exe.run({"hidden.0": [1.0] * 8})["hidden.0_out"].shape == (8,)


def test_run_wants_names(model: Executable) -> None:
    """An array met "The truth value of an array is ambiguous"."""
    with pytest.raises(InputError, match=r"^run takes arrays by name, as .'\w+': .*, got ndarray; call the model"):
        model.run(np.ones((2, 3), np.float32))  # type: ignore[arg-type]


def test_a_model_without_inputs_and_outputs() -> None:
    assert Executable(echo())() == ()
    with pytest.raises(InputError, match=r"got 1 arguments; the model takes 0 \(\)"):
        Executable(echo())(1)


def test_outputs_do_not_alias_inputs(model: Executable) -> None:
    tokens, mask = arrays()
    out_tokens, _ = model(tokens, mask)
    out_tokens[:] = 5
    assert tokens.max() == 0


@pytest.mark.parametrize(("batch", "length"), [(1, 0), (1, 1), (7, 512)])
def test_every_size_in_bounds_runs(model: Executable, batch: int, length: int) -> None:
    assert model(*arrays(batch, length))[1].shape == (batch, length, 4)


def test_the_signature_reads_well(model: Executable) -> None:
    assert repr(model.inputs) == (
        "tokens: int64[batch, length] where 1 <= batch, length <= 512\n"
        "mask: float32[batch, length, 4] where 1 <= batch, length <= 512"
    )
    assert model.outputs[0].name == "tokens_out" and model.outputs[0].dtype == "int64"
    assert "Executable(tokens: int64[batch, length]" in repr(model)
    assert "ret r2" in model.disassemble()


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


T, M = arrays()
MISTAKES: list[tuple[Callable[[Executable], Any], str]] = [
    (lambda m: m(), "missing arguments 'tokens', 'mask'; the model takes 2 (tokens, mask)"),
    (lambda m: m(T), "missing argument 'mask'; the model takes 2 (tokens, mask)"),
    (lambda m: m.run({"mask": M}), "missing argument 'tokens'; the model takes 2 (tokens, mask)"),
    (lambda m: m(T, M, T), "got 3 arguments; the model takes 2 (tokens, mask)"),
    (lambda m: m(T, msk=M), "there is no argument 'msk'; did you mean 'mask'?; the model takes 2 (tokens, mask)"),
    (lambda m: m(T, M, q=M), "there is no argument 'q'; the model takes 2 (tokens, mask)"),
    (lambda m: m(T, M, tokens=T), "argument 'tokens' is given both by position and by name"),
    (lambda m: m(T.astype("int32"), M),
     "argument 'tokens': got int32, expects int64; convert it with .astype('int64')"),
    (lambda m: m(T[0], M),
     "argument 'tokens': expects int64[batch, length] of rank 2, got rank 1: (3,)"),
    (lambda m: m(T, f32(2, 3, 5)),
     "argument 'mask': dimension 2 of shape (2, 3, 5): expects 4, got 5; the type is float32[batch, length, 4]"),
    (lambda m: m(T, f32(2, 6, 4)),
     "argument 'mask': dimension 1 of shape (2, 6, 4): length is 6 here, but 3 in argument 'tokens'"),
    (lambda m: m(*arrays(1, 600)),
     "argument 'tokens': dimension 1 of shape (1, 600): length = 600 exceeds its upper bound 512"),
    (lambda m: m(*arrays(0, 1)),
     "argument 'tokens': dimension 0 of shape (0, 1): batch = 0 is below its lower bound 1"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_mistakes_are_explained(model: Executable, mistake: Callable[[Executable], Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        mistake(model)
    assert str(caught.value) == message


def test_a_divisor_is_checked() -> None:
    with pytest.raises(InputError, match=r"argument 'hidden.0': dimension 0 .*: width = 12 is not a multiple of 8"):
        Executable(echo(HIDDEN)).run({"hidden.0": f32(12)})


def test_one_symbol_twice_in_an_argument() -> None:
    exe = Executable(echo(spec("square", "float32", "length", "length")))
    assert exe(f32(3, 3)).shape == (3, 3)
    with pytest.raises(InputError, match=r"dimension 1 of .*: length is 4 here, but 3 in argument 'square'"):
        exe(f32(3, 4))


def test_bfloat16_goes_in_and_out() -> None:
    exe = Executable(echo(spec("x", "bfloat16", 2)))
    result = exe([1.5, 2])
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result, np.array([1.5, 2], ml_dtypes.bfloat16))


def test_a_model_that_gives_the_wrong_number_of_tensors() -> None:
    data = echo(TOKENS)
    data = dataclasses.replace(data, signature=Signature((TOKENS,), (TOKENS, TOKENS)))
    with pytest.raises(ExecutionError, match="the model should give 2 tensors, got Tensor"):
        Executable(data)(T)


def test_save_and_load(model: Executable, tmp_path: Path) -> None:
    model.save(tmp_path / "m.rlx")
    again = load(tmp_path / "m.rlx", threads=1)
    assert threadpool.num_threads() == 1
    assert again.inputs == model.inputs
    np.testing.assert_array_equal(again(*arrays())[1], arrays()[1])
    with pytest.raises(ArtifactError, match="there is no such file"):
        load(tmp_path / "other.rlx")


# ---- with kernels


@pytest.fixture(scope="module")
def adding() -> Executable:
    n = {"n": (0, None, 1)}
    inputs = TensorSpec("p0", "float32", ("n",), n), TensorSpec("p1", "float32", ("n",), n)
    signature = Signature(inputs, (TensorSpec("sum", "float32", ("n",), n),))
    return Executable(dataclasses.replace(adder(compile_object(KERNELS_IR)), signature=signature))


def test_a_result_lives_on_its_own(adding: Executable) -> None:
    results = [adding(f32(n), f32(n)) for n in (5, 5, 900)]
    for result in results:
        np.testing.assert_array_equal(result, np.full(result.shape, 102))
        assert np.shares_memory(np.from_dlpack(result), result)


def test_profile_counts_kernels(adding: Executable) -> None:
    profile = adding.profile([f32(1000), f32(1000)], runs=3)
    assert {record.kernel: record.calls for record in profile.records} == {"add": 2, "shapes": 1}
    assert 0 < profile.other_us < profile.run_us
    table, _, remarks = str(profile).partition("\n\n")
    first = [line.split()[0] for line in table.splitlines()]
    assert (first[0], {*first[1:3]}, first[3:]) == ("kernel", {"add", "shapes"}, ["(outside", "total"])
    assert "each call at its least time of 3 runs" in remarks
    assert adding.profile({"p0": f32(1), "p1": f32(1)}).runs == 10
    with pytest.raises(InvalidArgumentError, match="runs must be at least 1, got 0"):
        adding.profile([], runs=0)
