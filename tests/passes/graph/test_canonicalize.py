"""The canonicalizing passes, as a specification: text before, text after; what must not change stays as it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import PassError
from relaxlite.ir import op as op_module
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, MatchShape
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Attr, Op, get_op, register_op
from relaxlite.ir.types import TensorType, Type
from relaxlite.ir.visitor import Rewriter
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.eliminate import eliminate_common, eliminate_dead
from relaxlite.passes.graph.fold_constants import ALWAYS_FOLDED_BYTES, fold_constants
from relaxlite.passes.graph.fold_shapes import fold_shapes
from relaxlite.passes.graph.simplify_algebra import RULES, simplify_algebra
from tests.support.ir_text import assert_becomes, assert_stays, module


class Effect(Op):
    """An op that does something beside giving a result."""

    name = "test_canonicalize.effect"
    operands = ("x",)
    attrs = {"slope": Attr("float", 0.0)}
    is_pure = False

    def infer(self, x: Expr, *, slope: float) -> Type:
        return x.ty

    def reference(self, x: np.ndarray, *, slope: float) -> np.ndarray:
        raise AssertionError("an op with effects is never evaluated at compile time")


class Scaled(Effect):
    """The same without effects."""

    name = "test_canonicalize.scaled"
    is_pure = True


class Endless(Op):
    """An op that is made of itself."""

    name = "test_canonicalize.endless"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        return x.ty

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        return self(call.args[0])


@pytest.fixture(scope="module", autouse=True)
def private_ops() -> Iterator[None]:
    private: tuple[Op, ...] = (Effect(), Scaled(), Endless())
    for op in private:
        register_op(op)
    yield
    for op in private:
        del op_module._registry[op.name]


def main(statements: str, result: str, params: str = "x: f32[n, 4], i: i64[n, 4], c: bool[]") -> str:
    """Text of a function over x and i."""
    body = "\n".join(f"    {line}" for line in statements.strip().split("\n") if line.strip())
    return f'n = symbol("n")\nm = symbol("m")\n@function\ndef main({params}):\n{body}\n    return {result}\n'


# What all of them are made of


def test_a_function_that_only_matches_shapes_is_rewritten() -> None:
    class Unmatched(Rewriter):
        def match_shape(self, binding: MatchShape) -> Expr | None:
            return binding.source

    bb = BlockBuilder()
    dims = bb.symbol("n"), 4
    with bb.function("main", x=TensorType.of(dims, "float32")) as (x,):
        bb.result(bb.match_shape(x, dims))
    function = Unmatched().function(bb.module().functions()["main"])
    assert not list(function.body.bindings()) and function.body.result is x


# fold_shapes


def test_the_subgraph_that_computes_a_shape_becomes_the_shape() -> None:
    assert_becomes(
        fold_shapes,
        """
        n = symbol("n")
        m = symbol("m")
        @function
        def main(x: f32[n, m]):
            s: i64[2] = shape_of(x)
            rows: i64[] = gather(s, const(0, "int64"), axis=0)
            twice: i64[] = multiply(rows, const(2, "int64"))
            row: i64[1] = reshape(twice, shape(1))
            target: i64[2] = concat(row, const([-1], "int64"), axis=0)
            return target
        """,
        """
        n = symbol("n")
        m = symbol("m")
        @function
        def main(x: f32[n, m]):
            s: i64[2] = shape_to_tensor(shape(n, m))
            rows_0: i64[1] = shape_to_tensor(shape(n))
            rows: i64[] = reshape(rows_0, shape())
            twice_0: i64[1] = shape_to_tensor(shape(n*2))
            twice: i64[] = reshape(twice_0, shape())
            row: i64[1] = reshape(twice, shape(1))
            target: i64[2] = shape_to_tensor(shape(n*2, -1))
            return target
        """,
    )


def test_what_the_facts_of_symbols_decide_becomes_a_constant() -> None:
    assert_becomes(
        fold_shapes,
        """
        n = symbol("n", lower=1)
        @function
        def main(x: f32[n, 4]):
            s: i64[2] = shape_of(x)
            rows: i64[] = gather(s, const(0, "int64"), axis=0)
            columns: i64[] = gather(s, const(1, "int64"), axis=0)
            is_full: bool[] = less(const(0, "int64"), rows)
            return (columns, is_full)
        """,
        """
        n = symbol("n", lower=1)
        @function
        def main(x: f32[n, 4]):
            s: i64[2] = shape_to_tensor(shape(n, 4))
            rows_0: i64[1] = shape_to_tensor(shape(n))
            rows: i64[] = reshape(rows_0, shape())
            return (const(4, "int64"), const(True, "bool"))
        """,
    )


def test_a_shape_in_a_branch_or_a_loop_is_folded_and_a_carried_value_is_not() -> None:
    assert_becomes(
        fold_shapes,
        """
        n = symbol("n")
        @function
        def main(x: f32[n], c: bool[], k: i64[1]):
            @loop(c, k)
            def last(step: i64[1]) -> Tuple(i64[1]):
                s: i64[1] = shape_of(x)
                next: i64[1] = add(step, s)
                return (c, next)
            return last
        """,
        """
        n = symbol("n")
        @function
        def main(x: f32[n], c: bool[], k: i64[1]):
            @loop(c, k)
            def last(step: i64[1]) -> Tuple(i64[1]):
                s: i64[1] = shape_to_tensor(shape(n))
                next: i64[1] = add(step, s)
                return (c, next)
            return last
        """,
    )


@pytest.mark.parametrize(
    "statement",
    [
        "y: i64[n, 4] = add(i, i)",  # data
        "y: i64[2] = shape_to_tensor(shape(n, 4))",  # as folded as it can be
        'y: bool[1] = less(s, const([4], "int64"))',  # not decided by what is known of n
        'y: f32[1] = cast(s, dtype="float32")',  # no integer
        'y: u8[1] = cast(s, dtype="uint8")',  # n may not fit
        's8: u8[1] = cast(s, dtype="uint8")\ny: u8[1] = subtract(s8, const([200], "uint8"))',  # wraps
    ],
)
def test_not_folded_as_a_shape(statement: str) -> None:
    assert_stays(fold_shapes, main(f"s: i64[1] = shape_to_tensor(shape(n))\n{statement}", "y"))


def test_folding_shapes_twice_changes_nothing_more() -> None:
    once = fold_shapes(module(main("s: i64[2] = shape_of(x)\nt: i64[] = gather(s, const(0, 'int64'), axis=0)", "t")))
    assert fold_shapes(once) is once


def test_arithmetic_that_wraps_is_left_to_its_dtype() -> None:
    """A size of 3 as uint8, minus 200, is 59: following it as an integer would give -197."""
    given = module(
        main(
            """
s: i64[1] = shape_of(x)
small: u8[1] = cast(s, dtype="uint8")
less: u8[1] = subtract(small, const([200], "uint8"))
wide: i64[1] = cast(less, dtype="int64")
""",
            "wide",
            "x: f32[n]",
        )
    )
    assert Interpreter(fold_shapes(given)).run("main", np.zeros(3, "f4")).tolist() == [59]


def test_constants_that_overflow_64_bits_wrap() -> None:
    text = main('y: i64[1] = multiply(const([2147483648], "int64"), const([8589934592], "int64"))', "y")
    assert_stays(fold_shapes, text)
    assert_becomes(fold_constants, text, main("", 'const([0], "int64")'))


# fold_constants


def test_a_chain_of_constants_becomes_one() -> None:
    assert_becomes(
        fold_constants,
        main(
            """
a: f32[2] = neg(const([0.0, 2.0], "float32"))
b: f32[2] = sqrt(a)
y: f32[2, 2] = add(b, const([[1.0], [2.0]], "float32"))
""",
            "(a, y)",
        ),
        main("", '(const([-0.0, -2.0], "float32"), const([[1.0, nan], [2.0, nan]], "float32"))'),
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('i8[1] = add(const([100], "int8"), const([100], "int8"))', 'const([-56], "int8")'),
        ('i64[3] = power(const([2, -1, -1], "int64"), const([-1, -3, -2], "int64"))', 'const([0, -1, 1], "int64")'),
        ('f16[1] = add(const([2048.0], "float16"), const([1.0], "float16"))', 'const([2048.0], "float16")'),
        ('bool[1] = less(const([nan], "float32"), const([1.0], "float32"))', 'const([False], "bool")'),
        ('i64[] = sum(const([[1, 2], [3, 4]], "int64"))', 'const(10, "int64")'),
        ('f32[2, 1] = transpose(const([[1.0, 2.0]], "float32"))', 'const([[1.0], [2.0]], "float32")'),
        ('i64[3] = broadcast_to(const(7, "int64"), shape(3))', 'const([7, 7, 7], "int64")'),
        ('f32[0] = full(shape(0), const(1.0, "float32"))', 'const([], "float32")'),
    ],
)
def test_constants_keep_their_dtype(call: str, expected: str) -> None:
    assert_becomes(fold_constants, main(f"y: {call}", "y"), main("", expected))


def test_several_results_are_folded_one_by_one() -> None:
    assert_becomes(
        fold_constants,
        main(
            """
t: Tuple(f32[2], i64[2]) = top_k(const([3.0, 1.0, 2.0], "float32"), shape(2))
values: f32[2] = t[0]
places: i64[2] = t[1]
""",
            "(places, values)",
        ),
        main(
            't: Tuple(f32[2], i64[2]) = (const([3.0, 2.0], "float32"), const([0, 2], "int64"))',
            '(const([0, 2], "int64"), const([3.0, 2.0], "float32"))',
        ),
    )


def test_constants_are_folded_in_branches() -> None:
    text = """
r: f32[]
if c:
    a: f32[] = exp(const(0.0, "float32"))
    r = a
else:
    r = const(2.0, "float32")
"""
    folded = text.replace('    a: f32[] = exp(const(0.0, "float32"))\n    r = a\n', '    r = const(1.0, "float32")\n')
    assert_becomes(fold_constants, main(text, "r"), main(folded, "r"))


@pytest.mark.parametrize(
    "statement",
    [
        "y: f32[n] = full(shape(n), const(1.0, 'float32'))",  # a size that is not known
        "y: f32[n, 4] = add(x, const(1.0, 'float32'))",
        "y: f32[] = test_canonicalize.effect(const(1.0, 'float32'))",
        "y: i64[] = gather(const([1, 2], 'int64'), const(2, 'int64'), axis=0)",  # an error of run time, if it runs
        "y: Tensor(rank=2, dtype='int64') = non_zero(const([0], 'int64'))",
    ],
)
def test_not_folded(statement: str) -> None:
    assert_stays(fold_constants, main(statement, "y"))


@pytest.mark.parametrize(
    ("elements", "is_folded"),
    [(ALWAYS_FOLDED_BYTES // 4, True), (ALWAYS_FOLDED_BYTES // 4 + 1, False)],
    ids=["small", "large"],
)
def test_a_large_constant_is_not_made_from_a_small_one(elements: int, is_folded: bool) -> None:
    given = module(main(f"y: f32[{elements}] = broadcast_to(const(1.0, 'float32'), shape({elements}))", "y"))
    result = fold_constants(given)["main"].body.result  # type: ignore[union-attr]
    assert isinstance(result, Constant) is is_folded


@pytest.mark.parametrize(("times", "is_folded"), [(2, True), (3, False)])
def test_a_large_constant_may_grow_to_twice_its_size(times: int, is_folded: bool) -> None:
    bb = BlockBuilder()
    with bb.function("main"):
        bb.result(
            bb.emit(ops.broadcast_to(np.ones((ALWAYS_FOLDED_BYTES, 1), np.float32), (ALWAYS_FOLDED_BYTES, times)))
        )
    result = fold_constants(bb.module())["main"].body.result  # type: ignore[union-attr]
    assert isinstance(result, Constant) is is_folded


@pytest.mark.parametrize(("points", "is_folded"), [(512, True), (8192, False)])
def test_tables_of_sines_are_constants_up_to_a_limit(points: int, is_folded: bool) -> None:
    """SMALL_BYTES is far below the table of a transform of 512 points, which took most of such a model's time."""
    bb = BlockBuilder()
    with bb.function("main"):
        bb.result(bb.emit(get_op("dft_matrix")((points, points // 2 + 1), parts=1, dtype="float32")))
    result = fold_constants(bb.module())["main"].body.result  # type: ignore[union-attr]
    assert isinstance(result, Constant) is is_folded


# simplify_algebra

FIRES = [
    ("add", 'y: i64[n, 4] = add(i, const(0, "int64"))', "i"),
    ("add", 'y: i64[n, 4] = add(const([0], "int64"), i)', "i"),
    ("add", 'y: f32[n, 4] = add(x, const(-0.0, "float32"))', "x"),
    ("subtract", 'y: i64[n, 4] = subtract(i, const(0, "int64"))', "i"),
    ("subtract", 'y: f32[n, 4] = subtract(x, const(0.0, "float32"))', "x"),
    ("multiply", 'y: f32[n, 4] = multiply(x, const(1.0, "float32"))', "x"),
    ("multiply", 'y: i64[n, 4] = multiply(const([[1]], "int64"), i)', "i"),
    ("divide", 'y: f32[n, 4] = divide(x, const(1.0, "float32"))', "x"),
    (
        "divide",
        'y: f32[n, 4] = divide(x, const([2.0, -4.0, 0.5, 1.0], "float32"))',
        'multiply(x, const([0.5, -0.25, 2.0, 1.0], "float32"))',
    ),
    ("power", 'y: f32[n, 4] = power(x, const(1.0, "float32"))', "x"),
    ("power", 'y: f32[n, 4] = power(x, const(2.0, "float32"))', "multiply(x, x)"),
    ("power", 'y: i64[n, 4] = power(i, const(2, "int64"))', "multiply(i, i)"),
    ("cast", 'y: f32[n, 4] = cast(x, dtype="float32")', "x"),
    ("broadcast_to", "y: f32[n, 4] = broadcast_to(x, shape(n, 4))", "x"),
    ("reshape", "y: f32[n, 4] = reshape(x, shape(n, 4))", "x"),
    (
        "reshape",
        "t: f32[4, n] = reshape(x, shape(4, n))\ny: f32[n*4] = reshape(t, shape(n*4))",
        "reshape(x, shape(n*4))",
    ),
    ("reshape", "t: f32[4, n] = reshape(x, shape(4, n))\ny: f32[n, 4] = reshape(t, shape(n, 4))", "x"),
    ("transpose", "y: f32[n, 4] = transpose(x, axes=(0, 1))", "x"),
    ("transpose", "y: f32[n, 4] = transpose(x, axes=(-2, -1))", "x"),
    ("transpose", "t: f32[4, n] = transpose(x, axes=(1, 0))\ny: f32[n, 4] = transpose(t, axes=(1, 0))", "x"),
    (
        "transpose",
        "t: f32[4, n] = transpose(x, axes=(-1, 0))\ny: f32[n, 4] = transpose(t, axes=(-1, -2))",
        "x",
    ),
    (
        "transpose",
        "t: f32[1, n, 4] = reshape(x, shape(1, n, 4))\ny: f32[n, 1, 4] = transpose(t, axes=(1, 0, 2))",
        "reshape(x, shape(n, 1, 4))",
    ),
    ("concat", "y: f32[n, 4] = concat(x, axis=1)", "x"),
    (
        "concat",
        "z: f32[n, 0] = full(shape(n, 0), const(0.0, 'float32'))\ny: f32[n, 8] = concat(x, z, x, axis=-1)",
        "concat(x, x, axis=-1)",
    ),
    ("slice", "y: f32[n, 4] = slice(x, shape(0, 0), shape(n, 4))", "x"),
    ("slice", "y: f32[n, 4] = slice(x, shape(0), shape(4), axes=(1,), steps=(1,))", "x"),
]  # fmt: skip

DECLINES = [
    ("add", 'y: f32[n, 4] = add(x, const(0.0, "float32"))'),  # -0.0 + 0.0 = 0.0
    ("add", 'y: i64[n, 4] = add(i, const(1, "int64"))'),
    ("add", 'y: i64[n, 4] = add(i, const([0, 0, 0, 1], "int64"))'),
    ("add", 'y: i64[2, n, 4] = add(i, const([[[0]], [[0]]], "int64"))'),  # broadcasts i
    ("add", 'y: i64[1, n, 4] = add(i, const([[[0]]], "int64"))'),
    ("subtract", 'y: f32[n, 4] = subtract(x, const(-0.0, "float32"))'),  # -0.0 - -0.0 = 0.0
    ("subtract", 'y: i64[n, 4] = subtract(const(0, "int64"), i)'),
    ("multiply", 'y: f32[n, 4] = multiply(x, const(0.0, "float32"))'),  # NaN, infinities, signs
    ("multiply", 'y: i64[1, n, 4] = multiply(i, const([[[1]]], "int64"))'),
    ("divide", 'y: f32[n, 4] = divide(const(1.0, "float32"), x)'),
    ("divide", 'y: f32[n, 4] = divide(x, const(3.0, "float32"))'),  # 1/3 is not exact
    ("divide", 'y: f32[n, 4] = divide(x, const([2.0, 3.0, 4.0, 8.0], "float32"))'),
    ("divide", 'y: f32[n, 4] = divide(x, const(0.0, "float32"))'),
    ("divide", 'y: f32[n, 4] = divide(x, const(inf, "float32"))'),
    ("divide", 'y: f32[n, 4] = divide(x, const(nan, "float32"))'),
    ("divide", 'y: f32[n, 4] = divide(x, const(1e-40, "float32"))'),  # a subnormal: its inverse overflows
    ("divide", 'h: f16[n, 4] = cast(x, dtype="float16")\ny: f16[n, 4] = divide(h, const(16384.0, "float16"))'),
    ("power", 'y: f32[n, 4] = power(x, const(0.5, "float32"))'),
    ("power", 'y: f32[n, 4] = power(x, const(0.0, "float32"))'),
    ("power", 'y: f32[n, 4] = power(const(2.0, "float32"), x)'),
    ("power", 'y: f32[2, n, 4] = power(x, const([[[2.0]], [[2.0]]], "float32"))'),
    ("cast", 'y: f64[n, 4] = cast(x, dtype="float64")'),
    ("broadcast_to", "y: f32[1, n, 4] = broadcast_to(x, shape(1, n, 4))"),
    ("reshape", "y: f32[4, n] = reshape(x, shape(4, n))"),
    ("transpose", "y: f32[4, n] = transpose(x, axes=(1, 0))"),
    ("transpose", "y: f32[4, n] = transpose(x, axes=(-1, 0))"),  # no reshape
    ("transpose", "y: f32[4, n] = transpose(x)"),
    ("concat", "y: f32[n, 8] = concat(x, x, axis=1)"),
    ("slice", "y: f32[n, 3] = slice(x, shape(0, 0), shape(n, 3))"),
    ("slice", "y: f32[n, 3] = slice(x, shape(0, 1), shape(n, 3))"),
    ("slice", "y: f32[n, 4] = slice(x, shape(3), shape(4), axes=(1,), steps=(-1,))"),
    ("slice", "y: f32[n, 2] = slice(x, shape(0), shape(2), axes=(1,), steps=(2,))"),
]  # fmt: skip


def after_rule(statements: str, replacement: str) -> str:
    """The statements with the value of y replaced; a variable in place of y where the value is one."""
    *before, last = statements.split("\n")
    if replacement.isidentifier():
        return main("\n".join(before), replacement)
    return main("\n".join([*before, f"{last.split(' = ')[0]} = {replacement}"]), "y")


@pytest.mark.parametrize(("rule", "statements", "replacement"), FIRES, ids=[f"{s} => {r}" for _, s, r in FIRES])
def test_rule_fires(rule: str, statements: str, replacement: str) -> None:
    assert_becomes(simplify_algebra, main(statements, "y"), after_rule(statements, replacement))


@pytest.mark.parametrize(("rule", "statements"), DECLINES, ids=[s for _, s in DECLINES])
def test_rule_declines(rule: str, statements: str) -> None:
    assert_stays(simplify_algebra, main(statements, "y"))


def test_every_rule_has_an_example_and_a_counterexample() -> None:
    assert {rule for rule, *_ in FIRES} == {rule for rule, _ in DECLINES} == set(RULES)


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3.4e38, 1.0, -1.5, 2.5, 1 / 3]


@pytest.mark.parametrize(("rule", "statements", "replacement"), FIRES, ids=[f"{s} => {r}" for _, s, r in FIRES])
def test_rules_are_exact(rule: str, statements: str, replacement: str) -> None:
    given = module(main(statements, "y"))
    x = np.array(SPECIAL, np.float32).reshape(3, 4)
    i = np.array([0, 1, -1, 2**63 - 1, -(2**63), 7, 3037000500, -3037000500, 2**32, 5, -2, 9]).reshape(3, 4)
    made = [Interpreter(m).run("main", x, i, np.array(True)) for m in (given, simplify_algebra(given))]
    np.testing.assert_array_equal(*made)
    if made[0].dtype.kind == "f":
        np.testing.assert_array_equal(*(np.signbit(y[~np.isnan(y)]) for y in made))


def test_an_empty_operand_that_checks_a_size_stays() -> None:
    """concat((n, m), (0, 4)) has 4 columns because of the empty operand, and fails where m is not 4."""
    for result, columns in (("f32[n, 4]", "f32[0, 4]"), ("f32[n, m]", "f32[0, n]")):
        assert_stays(simplify_algebra, main(f"y: {result} = concat(x, z, axis=0)", "y", f"x: f32[n, m], z: {columns}"))


def test_rules_apply_to_what_rules_made() -> None:
    assert_becomes(
        simplify_algebra,
        main(
            """
a: f32[n, 4] = multiply(x, const(1.0, "float32"))
b: f32[4, n] = transpose(a, axes=(1, 0))
d: f32[n, 4] = transpose(b, axes=(1, 0))
e: f32[n, 4] = divide(d, const(1.0, "float32"))
""",
            "e",
        ),
        main("b: f32[4, n] = transpose(x, axes=(1, 0))", "x"),
    )


def test_rules_apply_inside_branches_to_what_is_defined_outside() -> None:
    text = """
t: f32[4, n] = transpose(x, axes=(1, 0))
r: f32[n, 4]
if c:
    y: f32[n, 4] = transpose(t, axes=(1, 0))
    r = y
else:
    z: f32[n, 4] = add(x, const(-0.0, "float32"))
    r = z
"""
    after = """
t: f32[4, n] = transpose(x, axes=(1, 0))
r: f32[n, 4]
if c:
    r = x
else:
    r = x
"""
    assert_becomes(simplify_algebra, main(text, "r"), main(after, "r"))


# eliminate_common


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("f32[n, 4] = exp(x)", "f32[n, 4] = exp(x)"),
        ("f32[4, n] = transpose(x, axes=(1, 0))", "f32[4, n] = transpose(x, axes=(1, 0))"),
        ('f32[n, 4] = add(x, const([1.0, 2.0, 3.0, nan], "float32"))',) * 2,
        ("f32[n*4] = reshape(x, shape(n*4))", "f32[n*4] = reshape(x, shape(4*n))"),
        ("Tuple(f32[n, 4], bool[]) = (x, c)", "Tuple(f32[n, 4], bool[]) = (x, c)"),
    ],
)
def test_equal_expressions_are_bound_once(first: str, second: str) -> None:
    assert_becomes(eliminate_common, main(f"a: {first}\nb: {second}", "(a, b)"), main(f"a: {first}", "(a, a)"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("f32[n, 4] = exp(x)", "f32[n, 4] = sqrt(x)"),
        ("f32[n, 4] = subtract(x, x)", "f32[n, 4] = add(x, x)"),
        ('f32[n, 4] = add(x, const(0.0, "float32"))', 'f32[n, 4] = add(x, const(-0.0, "float32"))'),
        ('f32[n, 4] = add(x, const(1.0, "float32"))', 'f32[n, 4] = add(x, const([1.0], "float32"))'),
        ("f32[n, 4] = test_canonicalize.effect(x)", "f32[n, 4] = test_canonicalize.effect(x)"),
        ("f32[n, 4] = test_canonicalize.scaled(x, slope=0.0)", "f32[n, 4] = test_canonicalize.scaled(x, slope=-0.0)"),
        ('f32[4] = memory.alloc_tensor(shape(4), dtype="float32")',) * 2,  # two pieces of memory
        ("f32[n*4] = reshape(x, shape(n*4))", "f32[4, n] = reshape(x, shape(4, n))"),
    ],
)
def test_different_expressions_stay_apart(first: str, second: str) -> None:
    assert_stays(eliminate_common, main(f"a: {first}\nb: {second}", "(a, b)"))


def test_a_body_may_use_what_dominates_it_and_not_what_is_bound_beside_it() -> None:
    text = """
a: f32[n, 4] = exp(x)
r: f32[n, 4]
if c:
    b: f32[n, 4] = exp(x)
    d: f32[n, 4] = sqrt(x)
    e: f32[n, 4] = add(b, d)
    r = e
else:
    g: f32[n, 4] = sqrt(x)
    r = g
h: f32[n, 4] = sqrt(x)
"""
    after = text.replace("    b: f32[n, 4] = exp(x)\n", "").replace("add(b, d)", "add(a, d)")
    assert_becomes(eliminate_common, main(text, "(r, h)"), main(after, "(r, h)"))


def test_calls_of_functions_and_loops_are_not_merged() -> None:
    assert_stays(
        eliminate_common,
        """
        k = symbol("k")
        @function
        def helper(x: f32[k]):
            y: f32[k] = exp(x)
            return y

        n = symbol("n")
        @function
        def main(x: f32[n], c: bool[]):
            a: f32[n] = call(helper, x)
            b: f32[n] = call(helper, x)
            @loop(c, x)
            def d(v: f32[n]) -> Tuple(f32[n]):
                return (c, v)
            @loop(c, x)
            def e(w: f32[n]) -> Tuple(f32[n]):
                return (c, w)
            return (a, b, d, e)
        """,
    )


# eliminate_dead


def test_what_nothing_uses_is_dropped_with_what_only_that_used() -> None:
    assert_becomes(
        eliminate_dead,
        main("a: f32[n, 4] = exp(x)\nb: f32[n, 4] = sqrt(a)\nd: f32[n, 4] = sqrt(x)\ne: Tuple(f32[n, 4]) = (b,)", "d"),
        main("d: f32[n, 4] = sqrt(x)", "d"),
    )


def test_dead_code_is_dropped_inside_branches_and_loops() -> None:
    text = """
a: f32[n, 4] = exp(x)
dead: f32[n, 4] = sqrt(x)
r: f32[n, 4]
if c:
    dead_then: f32[n, 4] = sqrt(dead)
    r = a
else:
    r = x
@loop(c, r)
def last(v: f32[n, 4]) -> Tuple(f32[n, 4]):
    dead_step: f32[n, 4] = sqrt(v)
    w: f32[n, 4] = exp(v)
    return (c, w)
"""
    after = "\n".join(line for line in text.split("\n") if "dead" not in line)
    assert_becomes(eliminate_dead, main(text, "last"), main(after, "last"))


def test_a_dead_branch_is_dropped_when_all_in_it_may_be() -> None:
    text = "r: f32[n, 4]\nif c:\n    a: f32[n, 4] = exp(x)\n    r = a\nelse:\n    r = x"
    assert_becomes(eliminate_dead, main(text, "x"), main("", "x"))


@pytest.mark.parametrize(
    "statements",
    [
        "a: f32[n, 4] = test_canonicalize.effect(x)",
        "a: f32[m, 4] = match_shape(x, (m, 4))",  # a check
        "@loop(c, x)\ndef a(v: f32[n, 4]) -> Tuple(f32[n, 4]):\n    return (c, v)",  # may not end
        "a: f32[n, 4]\nif c:\n    b: f32[3, 4] = match_shape(x, (3, 4))\n    a = x\nelse:\n    a = x",
        "a: f32[n, 4]\nif c:\n    a = x\nelse:\n    b: f32[n, 4] = test_canonicalize.effect(x)\n    a = x",
    ],
    ids=["effect", "match_shape", "loop", "branch with a check", "branch with an effect"],
)
def test_what_nothing_uses_but_must_stay(statements: str) -> None:
    assert_stays(eliminate_dead, main(statements, "x"))


def test_calls_that_fill_their_operands_stay() -> None:
    program = """
        k = symbol("k")
        @program(symbols=(k,), outputs=1)
        def copy(x: f32[k], out: f32[k]):
            for i in serial(k):
                out[i] = x[i]

        n = symbol("n")
        @function
        def main(x: f32[n]):
            {call}
            return x
        """
    filled = 'y: f32[n] = memory.alloc_tensor(shape(n), dtype="float32")\n            call(copy, x, y, sym=(n,))'
    assert_stays(eliminate_dead, program.format(call=filled), stage="dps")
    by_value = program.format(call="y: f32[n] = call(copy, x, sym=(n,))")
    assert_becomes(eliminate_dead, by_value, by_value.replace("            y: f32[n] = call(copy, x, sym=(n,))\n", ""))


# decompose


def test_an_op_made_of_others_is_taken_apart() -> None:
    assert_becomes(
        decompose,
        main("y: f32[n] = sum_square(x, axes=(1,))", "y"),
        main("a: f32[n, 4] = multiply(x, x)\ny: f32[n] = sum(a, axes=(1,))", "y"),
    )


def test_what_a_decomposition_emits_is_taken_apart_again() -> None:
    """Of three operands, the first two are contracted, then the result with the third: two matrix products."""
    made = decompose(
        module(main('y: f32[n, n] = einsum(x, w, x, equation="ab,bc,dc->ad")', "y", "x: f32[n, 4], w: f32[4, 4]"))
    )
    assert str(made).count("= matmul(") == 2 and "= einsum(" not in str(made)
    assert decompose(made) is made


def test_a_data_dependent_op_binds_its_size() -> None:
    assert_becomes(
        decompose,
        main('y: Tensor(rank=2, dtype="int64") = non_zero(x)\nz: i64[2, m] = match_shape(y, (2, m))', "z"),
        main(
            """
count: i64[1] = nonzero_count(x)
s: Shape(rank=1) = tensor_to_shape(count)
k = symbol("k")
t: Shape((k,)) = match_shape(s, (k,))
y: i64[2, k] = nonzero_fill(x, shape(k))
z: i64[2, m] = match_shape(y, (2, m))
""",
            "z",
        ),
    )


def test_a_decomposition_without_end_is_an_error() -> None:
    with pytest.raises(PassError, match="does one decompose into itself"):
        decompose(module(main("y: f32[n, 4] = test_canonicalize.endless(x)", "y")))


def test_ops_with_loops_of_their_own_stay() -> None:
    assert_stays(decompose, main("y: f32[n, 4] = exp(x)\nz: f32[n, 4] = gelu(y)", "z"))


# Types survive


def test_passes_keep_the_types_of_results() -> None:
    given = module(main("a: f32[n, 4] = softmax(x, axis=-1)\nb: f32[n, 4] = add(a, const(-0.0, 'float32'))", "b"))
    made: IRModule = given
    for run in (fold_shapes, decompose, fold_constants, simplify_algebra, eliminate_common, eliminate_dead):
        made = run(made)
    assert made["main"].ty == given["main"].ty  # type: ignore[union-attr]
    assert isinstance(given["main"].ty.result, TensorType)  # type: ignore[union-attr]
