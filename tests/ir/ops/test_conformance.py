"""Every op that declares samples: its NumPy reference against its loops and against machine code, at several sizes.

`RUNNERS` names the ways to run a module: each makes it ready once, and runs it at every size of its symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite import dtypes
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ExecutionError, TypeInferenceError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder, result_types
from relaxlite.ir.expr import Call, Function, Let, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, Sample, all_ops
from relaxlite.ir.program import Buffer, TensorProgram
from relaxlite.ir.symbolic import SymVar, as_int, smax, smin, syms
from relaxlite.ir.types import TensorType

SIZES = (0, 1, 3, 7)
FUNCTIONS = {"min": smin, "max": smax}  # what the dimensions of a sample may use
Runner = Callable[[IRModule], Callable[..., Any]]


def interpreted(module: IRModule) -> Callable[..., Any]:
    """Decomposed and lowered, its loops run one scalar at a time."""
    lowered = Interpreter(legalize(module))
    return lambda *args: lowered.run("main", *args)


def compiled(module: IRModule) -> Callable[..., Any]:
    return rl.compile(module)


RUNNERS: dict[str, Runner] = {"interpreted": interpreted, "compiled": compiled}


# A sample as a module


def sample_symbols(sample: Sample) -> dict[str, SymVar]:
    texts = [d for shape in sample.shapes for d in shape if isinstance(d, str)]
    names = dict.fromkeys(itertools.chain.from_iterable(compile(t, "", "eval").co_names for t in texts))
    return {name: SymVar(name) for name in names if name not in FUNCTIONS}


def dims_of(shape: tuple[int | str, ...], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Dimensions as ints where they are known, else symbolic."""
    found = [eval(d, FUNCTIONS, dict(values)) if isinstance(d, str) else d for d in shape]
    return tuple(d if as_int(d) is None else as_int(d) for d in found)


def operand_dtypes(sample: Sample) -> tuple[str, ...]:
    return sample.dtypes + ("float32",) * (len(sample.shapes) - len(sample.dtypes))


def sample_module(op: Op, sample: Sample) -> IRModule:
    """main(sizes, x...) = op(x...). The shape of `sizes` binds every symbol, also those of shape operands alone."""
    symbols = sample_symbols(sample)
    types = operand_dtypes(sample)
    params = [
        Var(f"x{k}", TensorType.of(dims_of(shape, symbols), dtype))
        for k, (shape, dtype) in enumerate(zip(sample.shapes, types, strict=True))
        if dtype != "shape"
    ]
    bb = BlockBuilder()
    anchor = Var("sizes", TensorType.of(tuple(symbols.values()), "bool"))
    with bb.function_with_params("main", (anchor, *params)):
        tensors = iter(params)
        operands = [
            ShapeValue(syms(dims_of(shape, symbols))) if dtype == "shape" else next(tensors)
            for shape, dtype in zip(sample.shapes, types, strict=True)
        ]
        bb.result(bb.emit(op(*operands, **sample.attrs)))
    return bb.module()


def sample_arguments(sample: Sample, size: int, rng: np.random.Generator) -> list[Any]:
    names = sample_symbols(sample)
    values = dict.fromkeys(names, size)
    args: list[Any] = [np.zeros((size,) * len(names), bool)]
    for k, (shape, dtype) in enumerate(zip(sample.shapes, operand_dtypes(sample), strict=True)):
        if dtype != "shape":
            dims = dims_of(shape, values)
            data = sample.make[k](dims, rng) if k in sample.make else draw(dims, dtype, rng)
            args.append(np.asarray(data).astype(dtypes.to_numpy(dtype)))
    return args


def draw(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    if dtypes.is_float(dtype):
        return rng.standard_normal(shape)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    return rng.integers(0 if dtype.startswith("uint") else -9, 10, shape)


# A module of ops as a module of loops


def legalize(module: IRModule) -> IRModule:
    """Every op decomposed, then lowered to a tensor program; builtins of the virtual machine stay."""
    changed = True
    while changed:
        module, changed = _legalize_once(module)
    return module


def _legalize_once(module: IRModule) -> tuple[IRModule, bool]:
    main = module["main"]
    assert isinstance(main, Function)
    bb = BlockBuilder(module)
    changed = False
    with bb.function_with_params("main", main.params):
        for binding in main.body.bindings():
            value = binding.value if isinstance(binding, Let) else None
            if isinstance(binding, Let) and isinstance(value, Call) and isinstance(value.callee, Op):
                made = value.callee.decompose(bb, value)
                if made is None and value.callee.has_lowering:
                    made = call_of_program(bb, value)
                changed = changed or made is not None
                bb.emit_let(binding.var, value if made is None else made)
            else:
                bb.append(binding)
        bb.result(main.body.result)
    return bb.module(), changed


def call_of_program(bb: BlockBuilder, call: Call) -> Call:
    op = call.callee
    assert isinstance(op, Op)
    program, symbols = program_of(call)
    tensors = tuple(a for a in call.args if not isinstance(a, ShapeValue))
    return Call(bb.define(op.name, program), tensors, sym_args=symbols, ty=call.ty)


def program_of(call: Call) -> tuple[TensorProgram, tuple[SymVar, ...]]:
    """The loops of one call, and the symbols that they need."""
    op = call.callee
    assert isinstance(op, Op)
    operands: list[Any] = [
        a.values if isinstance(a, ShapeValue) else Buffer(f"x{k}", a.ty.shape, a.ty.dtype)
        for k, a in enumerate(call.args)
    ]
    outs = [Buffer(f"out{k}", t.shape, t.dtype) for k, t in enumerate(result_types(call.ty))]
    inputs = [b for b in operands if isinstance(b, Buffer)]
    exprs = [e for o in (*operands, *outs) for e in (o.shape if isinstance(o, Buffer) else o)]
    symbols = tuple(dict.fromkeys(v for e in exprs for v in e.free_vars()))
    body = op.lower(*operands, out=outs[0] if len(outs) == 1 else tuple(outs), **call.attrs)
    return TensorProgram((*inputs, *outs), symbols, body, len(outs)), symbols


# The tests

NO_ANSWER = ("dft", "pad", "resize", "top_k")  # ops whose reference, or NumPy, refuses some samples of size 0
CASES = [pytest.param(op, sample, id=f"{op.name}-{k}") for op in all_ops() for k, sample in enumerate(op.samples())]


def runs() -> Iterator[object]:
    """Each sample is interpreted by default; of an op's compiled ones many are the same loops at other sizes."""
    for op in all_ops():
        for (k, sample), runner in itertools.product(enumerate(op.samples()), RUNNERS):
            left_out = runner == "compiled" and k % 4
            marks = [pytest.mark.exhaustive] if left_out else []
            yield pytest.param(op, sample, runner, id=f"{op.name}-{k}-{runner}", marks=marks)


@pytest.mark.parametrize(("op", "sample", "runner"), list(runs()))
def test_reference_agrees_with(op: Op, sample: Sample, runner: str) -> None:
    module = sample_module(op, sample)
    run = RUNNERS[runner](module)
    sizes = SIZES if sample_symbols(sample) else (1,)
    for size in sizes:
        args = sample_arguments(sample, size, np.random.default_rng(size))
        try:
            expected = Interpreter(module).run("main", *args)
        except (ValueError, IndexError):
            if size == 0 and op.name in NO_ANSWER:
                continue
            raise
        found = run(*args)
        for want, got in zip(as_tuple(expected), as_tuple(found), strict=True):
            assert_same(want, got, sample.tolerance, f"{op.name} at size {size}")


WITH_SYMBOLS = [
    pytest.param(*case.values, id=case.id, marks=[pytest.mark.exhaustive] if k else [])
    for _, cases in itertools.groupby(CASES, lambda case: case.values[0].name)
    for k, case in enumerate(case for case in cases if sample_symbols(case.values[1]))
]
"""By default one of each op."""


@pytest.mark.parametrize(("op", "sample"), WITH_SYMBOLS)
def test_sizes_that_are_known_to_be_zero(op: Op, sample: Sample) -> None:
    """What divides by a size has to do without it."""
    zeros = dict.fromkeys(sample_symbols(sample), 0)
    known = replace(sample, shapes=tuple(dims_of(shape, zeros) for shape in sample.shapes))
    try:
        module = sample_module(op, known)
    except TypeInferenceError:  # as for the three largest of none
        return
    args = sample_arguments(known, 0, np.random.default_rng(0))
    run = rl.compile(module)
    try:
        expected = Interpreter(module).run("main", *args)
    except (ValueError, IndexError):
        assert op.name in NO_ANSWER
        return
    for want, got in zip(as_tuple(expected), as_tuple(run(*args)), strict=True):
        assert_same(want, got, sample.tolerance, op.name)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def assert_same(want: Any, got: Any, tolerance: float, what: str) -> None:
    assert want.shape == got.shape and want.dtype == got.dtype, what
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(wide_got, wide_want, rtol=tolerance, atol=tolerance, err_msg=what)


def test_every_op_has_samples_or_is_tested_elsewhere() -> None:
    missing = [op.name for op in all_ops() if "." not in op.name and not list(op.samples())]
    assert missing == ["nms_collect", "nms_select", "tensor_to_shape"]  # the first two: through non_max_suppression


@pytest.mark.parametrize("runner", RUNNERS)
def test_ambiguous_dimensions_broadcast(runner: str) -> None:
    run = RUNNERS[runner](sample_module(ops.add, Sample((("n", 2), ("m", 2)))))
    for n, m in ((1, 5), (5, 1), (5, 5), (1, 1), (0, 1), (1, 0), (0, 0)):
        a, b = np.arange(n * 2, dtype="f4").reshape(n, 2), np.full((m, 2), 10, "f4")
        np.testing.assert_array_equal(run(np.zeros((n, m), bool), a, b), a + b)


# Run-time checks: (op, sample, arguments that pass none of them, message). The first argument binds the symbols.

SCALAR = np.zeros((), bool)
CHECKS: list[tuple[Op, Sample, tuple[Any, ...], str]] = [
    (
        ops.add,
        Sample((("n",), ("m",))),
        (np.zeros((2, 3), bool), np.zeros(2, "f4"), np.zeros(3, "f4")),
        "add: operands could not be broadcast: one dimension is n, the other m, and neither is 1",
    ),
    (
        ops.gather,
        Sample(((5, 2), (3,)), {"axis": 0}, ("float32", "int64")),
        (SCALAR, np.zeros((5, 2), "f4"), np.array([0, 5, 1])),
        "gather: an index is out of range for axis 0 of size 5",
    ),
    (
        ops.gather,
        Sample((("n", 2), (3,)), {"axis": 0}, ("float32", "int32")),
        (np.zeros(5, bool), np.zeros((5, 2), "f4"), np.array([0, -6, 1], "i4")),
        "gather: an index is out of range for axis 0 of size n",
    ),
    (
        ops.scatter_nd,
        Sample(((4,), (2, 1), (2,)), {}, ("float32", "int64", "float32")),
        (SCALAR, np.zeros(4, "f4"), np.array([[0], [4]]), np.ones(2, "f4")),
        "scatter_nd: an index is out of range for axis 0 of size 4",
    ),
    (
        ops.reshape,
        Sample((("n", 2), ("m",)), dtypes=("float32", "shape")),
        (np.zeros((3, 5), bool), np.zeros((3, 2), "f4")),
        "reshape|elements",  # the loops and the view of a compiled model each have their words
    ),
    (
        ops.slice,
        Sample((("n",), (2,), ("m",)), {}, ("float32", "shape", "shape")),
        (np.zeros((5, 4), bool), np.arange(5, dtype="f4")),
        "slice: axis 0 of size n: begin 2, size m and step 1 leave it",
    ),
    (
        ops.broadcast_to,
        Sample((("n",), ("m",)), {}, ("float32", "shape")),
        (np.zeros((3, 5), bool), np.arange(3, dtype="f4")),
        "broadcast_to: operands could not be broadcast: one dimension is n, the other m",
    ),
    (
        ops.concat,
        Sample((("n", 2), ("m", 2)), {"axis": 1}),
        (np.zeros((3, 5), bool), np.zeros((3, 2), "f4"), np.zeros((5, 2), "f4")),
        "concat: sizes m and n of operands differ",
    ),
    (
        ops.top_k,
        Sample((("n",), (3,)), {}, ("float32", "shape")),
        (np.zeros(2, bool), np.zeros(2, "f4")),
        "top_k: k = 3 exceeds the size n of axis 0",
    ),
    (
        ops.grid_sample,
        Sample(((1, 2, "h", 4), (1, 3, 3, 2)), {"padding_mode": "border"}),
        (np.zeros(0, bool), np.zeros((1, 2, 0, 4), "f4"), np.zeros((1, 3, 3, 2), "f4")),
        "grid_sample: .* is empty along dimension 2: it has no border",
    ),
    (
        ops.grid_sample,
        Sample(((1, 2, 4, 0), (1, 3, 3, 2)), {"padding_mode": "reflection"}),
        (SCALAR, np.zeros((1, 2, 4, 0), "f4"), np.zeros((1, 3, 3, 2), "f4")),
        "grid_sample: .* is empty along dimension 3: it has no border",
    ),
    (
        ops.roi_align,
        Sample(((1, 2, 5, "w"), (1, 4), (1,)), {"output": (2, 2)}, ("float32", "float32", "int64")),
        (np.zeros(0, bool), np.zeros((1, 2, 5, 0), "f4"), np.float32([[0, -0.4, 1, 0.4]]), np.zeros(1, np.int64)),
        "roi_align: .* is empty along dimension 3: a picture has no elements",
    ),
]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("op", "sample", "args", "message"), CHECKS)
def test_run_time_checks_stop_with_a_message(
    op: Op, sample: Sample, args: tuple[Any, ...], message: str, runner: str
) -> None:
    run = RUNNERS[runner](sample_module(op, sample))
    with pytest.raises(ExecutionError, match=message):
        run(*args)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_zeros_stand_everywhere_outside_of_an_empty_picture(mode: str, runner: str) -> None:
    run = RUNNERS[runner](sample_module(ops.grid_sample, Sample(((1, 2, "h", 4), (1, 3, 3, 2)), {"mode": mode})))
    grid = np.random.default_rng(0).uniform(-1.5, 1.5, (1, 3, 3, 2)).astype("f4")
    np.testing.assert_array_equal(run(np.zeros(0, bool), np.zeros((1, 2, 0, 4), "f4"), grid), np.zeros((1, 2, 3, 3)))


LARGE = np.array([-1e4, -200, -90, -1e-4, 0, 1e-4, 90, 200, 1e4], np.float32)
STABLE = {
    "sigmoid": [0, 0, 0, 0.499975, 0.5, 0.500025, 1, 1, 1],
    "softplus": [0, 0, 0, 0.693097, 0.693147, 0.693197, 90, 200, 1e4],
    "silu": [0, 0, 0, -5e-5, 0, 5e-5, 90, 200, 1e4],
    "mish": [0, 0, 0, -6e-5, 0, 6e-5, 90, 200, 1e4],
    "gelu": [0, 0, 0, -5e-5, 0, 5e-5, 90, 200, 1e4],
    "elu": [-1, -1, -1, -1e-4, 0, 1e-4, 90, 200, 1e4],
    "tanh": [-1, -1, -1, -1e-4, 0, 1e-4, 1, 1, 1],
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", STABLE)
def test_activations_stay_exact_for_large_arguments(name: str, runner: str) -> None:
    run = RUNNERS[runner](sample_module(ops.get_op(name), Sample((("n",),))))
    np.testing.assert_allclose(run(np.zeros(len(LARGE), bool), LARGE), STABLE[name], rtol=1e-5, atol=1e-6)
