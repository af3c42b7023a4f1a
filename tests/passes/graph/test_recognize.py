"""Chains that exporters write, and the op that each must become; near misses, which must stay as they are, and why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Function, Let, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, all_ops
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.decompose import decompose
from relaxlite.passes.graph.eliminate import eliminate_common, eliminate_dead
from relaxlite.passes.graph.recognize import recognize
from relaxlite.target import Target

SHAPES: dict[str, tuple[int | str, ...]] = {"x": ("n", 3, 6), "w": (6,), "b": (6,), "s": (1, 3, 6), "r": ("n", 3, 1)}


def main(statements: str, other_result: str = "") -> IRModule:
    """A function over tensors of SHAPES: lines `name = expression` over ops; the last one is the result."""
    bb = BlockBuilder()
    n = bb.symbol("n")
    types = {k: TensorType.of(tuple(n if d == "n" else d for d in dims), "float32") for k, dims in SHAPES.items()}
    env: dict[str, Any] = {"const": Constant.of}
    all_ops_by_name = {op.name: op for op in all_ops()}
    with bb.function("main", **types) as params:
        env.update(zip(SHAPES, params, strict=True))
        for line in filter(None, map(str.strip, statements.split("\n"))):
            name, text = line.split(" = ", 1)
            env[name] = bb.emit(eval(text, all_ops_by_name, env), name)
        bb.result(Tuple((env[name], env[other_result])) if other_result else env[name])
    return bb.module()


def recognized(given: IRModule) -> tuple[IRModule, list[str]]:
    context = PassContext(Target.parse("llvm -mcpu=x86-64-v3"))
    return recognize(eliminate_common(given), context), context.notes


def op_names(made: IRModule) -> list[str]:
    function = made["main"]
    assert isinstance(function, Function)
    calls = [b.value for b in function.body.bindings() if isinstance(b, Let) and isinstance(b.value, Call)]
    return [call.callee.name for call in calls if isinstance(call.callee, Op)]


def c(value: float, dtype: str = "float32") -> str:
    return f'const({value!r}, "{dtype}")'


CENTER = """
    m = mean(x, axes=(-1,), keepdims=True)
    d = subtract(x, m)
"""
VARIANCE = f"""{CENTER}
    q = multiply(d, d)
    v = mean(q, axes=(2,), keepdims=True)
    e = add(v, {c(1e-05)})
"""
NORM = f"""{VARIANCE}
    t = sqrt(e)
    y = divide(d, t)
"""
RMS = f"""
    q = multiply(x, x)
    v = mean(q, axes=(-1,), keepdims=True)
    e = add({c(1e-06)}, v)
"""
EXP = """
    t = max(x, axes=(1,), keepdims=True)
    d = subtract(x, t)
    e = exp(d)
    s1 = sum(e, axes=(1,), keepdims=True)
"""
ERF = f"""
    a = divide(x, {c(1.4142135)})
    f = erf(a)
    g = add(f, {c(1.0)})
"""
TANH = f"""
    p = power(x, {c(3.0)})
    a = multiply(p, {c(0.044715)})
    f = add(x, a)
    g = multiply(f, {c(0.7978846)})
    h = tanh(g)
    i = add(h, {c(1.0)})
"""
RELU6 = f"""
    a = add(x, {c(3.0)})
    f = clip(a, lower=0.0, upper=6.0)
"""

CHAINS: dict[str, tuple[str, list[str]]] = {
    "layer norm": (NORM, ["layer_norm"]),
    "layer norm with a power": (NORM.replace("multiply(d, d)", f"power(d, {c(2.0)})"), ["layer_norm"]),
    "layer norm without epsilon": (NORM.replace("sqrt(e)", "sqrt(v)"), ["layer_norm"]),
    "layer norm by the inverse root": (f"{VARIANCE}\nt = rsqrt(e)\ny = multiply(t, d)", ["layer_norm"]),
    "layer norm by a reciprocal": (
        f"{VARIANCE}\nt = sqrt(e)\nu = reciprocal(t)\ny = multiply(d, u)",
        ["layer_norm"],
    ),
    "layer norm by a power": (f"{VARIANCE}\nt = power(e, {c(-0.5)})\ny = multiply(d, t)", ["layer_norm"]),
    "layer norm, centered twice": (
        NORM.replace("q = multiply(d, d)", "d2 = subtract(x, m)\n    q = multiply(d2, d2)"),
        ["layer_norm"],
    ),
    "layer norm with a scale": (f"{NORM}\nz = multiply(w, y)", ["layer_norm"]),
    "layer norm with scale and bias": (f"{NORM}\nz = multiply(y, w)\no = add(z, b)", ["layer_norm"]),
    "layer norm over two axes": (
        NORM.replace("axes=(-1,)", "axes=(1, 2)").replace("axes=(2,)", "axes=(-1, -2)")
        + "\nz = multiply(y, s)\no = add(z, s)",
        ["reshape", "reshape", "layer_norm"],
    ),
    "layer norm, folded": (
        f"{VARIANCE}\nt = rsqrt(e)\nk = multiply(t, w)\ny = multiply(x, k)\nu = multiply(k, m)\n"
        "z = subtract(b, u)\no = add(y, z)",
        ["layer_norm"],
    ),
    "rms norm": (f"{RMS}\nt = sqrt(e)\ny = divide(x, t)", ["rms_norm"]),
    "rms norm with a scale": (f"{RMS}\nt = rsqrt(e)\ny = multiply(x, t)\nz = multiply(w, y)", ["rms_norm"]),
    "softmax": (f"{EXP}\ny = divide(e, s1)", ["softmax"]),
    "softmax by a reciprocal": (f"{EXP}\nu = reciprocal(s1)\ny = multiply(e, u)", ["softmax"]),
    "softmax, not shifted": (f"{EXP}\ny = divide(e, s1)".replace("exp(d)", "exp(x)"), ["softmax"]),
    "log softmax": (f"{EXP}\nl = log(s1)\ny = subtract(d, l)", ["log_softmax"]),
    "log of softmax": ("p = softmax(x, axis=1)\ny = log(p)", ["log_softmax"]),
    "gelu, the half last": (f"{ERF}\nh = multiply(x, g)\ny = multiply(h, {c(0.5)})", ["gelu"]),
    "gelu, the half first": (f"{ERF}\nh = multiply({c(0.5)}, x)\ny = multiply(h, g)", ["gelu"]),
    "gelu, half of the sum": (f"{ERF}\nh = multiply(g, {c(0.5)})\ny = multiply(h, x)", ["gelu"]),
    "gelu of tanh": (f"{TANH}\nj = multiply(x, {c(0.5)})\ny = multiply(j, i)", ["gelu"]),
    "gelu of tanh, the cube from the constant on": (
        f"p = multiply({c(0.044715)}, x)\nq = multiply(x, p)\na = multiply(x, q)\nf = add(x, a)\n"
        f"g = multiply({c(0.7978846)}, f)\nh = tanh(g)\ni = add({c(1.0)}, h)\nj = multiply(i, {c(0.5)})\n"
        "y = multiply(x, j)",
        ["gelu"],
    ),
    "gelu of tanh, factored": (
        f"q = multiply(x, x)\na = multiply(q, {c(0.044715)})\nk = add(a, {c(1.0)})\nl = multiply(x, {c(0.7978846)})\n"
        f"g = multiply(l, k)\nh = tanh(g)\ni = add({c(1.0)}, h)\nj = multiply(x, i)\ny = multiply(j, {c(0.5)})",
        ["gelu"],
    ),
    "sigmoid": (f"a = neg(x)\nf = exp(a)\ng = add({c(1.0)}, f)\ny = divide({c(1.0)}, g)", ["sigmoid"]),
    "silu": ("a = sigmoid(x)\ny = multiply(a, x)", ["silu"]),
    "silu by a division": (f"a = neg(x)\nf = exp(a)\ng = add({c(1.0)}, f)\ny = divide(x, g)", ["silu"]),
    "hard swish": (f"{RELU6}\ng = multiply(x, f)\ny = divide(g, {c(6.0)})", ["hard_swish"]),
    "hard swish, the sixth inside": (f"{RELU6}\ng = multiply(f, {c(1 / 6)})\ny = multiply(x, g)", ["hard_swish"]),
    "hard swish by its gate": (
        f"a = hard_sigmoid(x, alpha={1 / 6!r}, beta=0.5)\ny = multiply(x, a)",
        ["hard_swish"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_becomes_one_op(name: str) -> None:
    statements, expected = CHAINS[name]
    given = main(statements)
    made, notes = recognized(given)
    assert op_names(made) == expected, f"{notes}\n{made}"
    rng = np.random.default_rng(1)
    for n in (0, 1, 5):
        values = {
            name: rng.standard_normal([n if d == "n" else int(d) for d in dims]).astype(np.float32)
            for name, dims in SHAPES.items()
        }
        got, wanted = (Interpreter(decompose(m)).run("main", *values.values()) for m in (made, given))
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


STAY: dict[str, tuple[str, str]] = {
    "means over an axis in front": (
        NORM.replace("axes=(-1,)", "axes=(1,)").replace("axes=(2,)", "axes=(1,)"),
        "last axes",
    ),
    "another epsilon for each row": (NORM.replace(c(1e-05), "r"), ""),
    "a square of something else": (NORM.replace("multiply(d, d)", "multiply(d, x)"), ""),
    "softmax over another axis": (
        f"{EXP}\ny = divide(e, s1)".replace("max(x, axes=(1,)", "max(x, axes=(2,)"),
        "different axes",
    ),
    "softmax over two axes": (f"{EXP}\ny = divide(e, s1)".replace("axes=(1,)", "axes=(1, 2)"), "one axis"),
    "gelu with another half": (f"{ERF}\nh = multiply(x, g)\ny = multiply(h, {c(0.25)})", ""),
    "gelu with a rough root": (f"{ERF}\nh = multiply(x, g)\ny = multiply(h, {c(0.5)})".replace("142135", "2"), ""),
    "gelu of another x": (f"{ERF}\nz = exp(x)\nh = multiply(z, g)\ny = multiply(h, {c(0.5)})", ""),
    "hard swish with another slope": ("a = hard_sigmoid(x, alpha=0.2, beta=0.5)\ny = multiply(x, a)", "slope"),
    "hard swish up to five": (
        f"{RELU6}\ng = multiply(x, f)\ny = divide(g, {c(6.0)})".replace("6.0)\n\ng", "5.0)\n\ng"),
        "",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_near_miss_stays(name: str) -> None:
    statements, reason = STAY[name]
    given = main(statements)
    made, notes = recognized(given)
    assert op_names(made) == op_names(eliminate_dead(eliminate_common(given)))
    assert any(reason in note for note in notes) if reason else not notes


def test_scale_of_its_own_for_each_row_stays_outside() -> None:
    made, notes = recognized(main(f"{NORM}\nz = multiply(y, r)"))
    assert op_names(made) == ["layer_norm", "multiply"]
    assert any("another shape" in note for note in notes)


@pytest.mark.parametrize(
    ("given", "reason"),
    [(main(NORM, "m"), "used elsewhere"), (main(NORM.replace("axes=(2,)", "axes=(1, 2)")), "different axes")],
    ids=["a mean that is used elsewhere", "means over different axes"],
)
def test_what_follows_a_centering_of_its_own_is_an_rms_norm(given: IRModule, reason: str) -> None:
    made, notes = recognized(given)
    assert op_names(made) == ["mean", "subtract", "rms_norm"]
    assert any(reason in note for note in notes)


def test_half_precision_constants_match_in_their_own_resolution() -> None:
    text = f"{ERF}\nh = multiply(x, g)\ny = multiply(h, {c(0.5)})".replace("float32", "float16").replace(
        "1.4142135", "1.4140625"
    )
    given = main(f'z = cast(x, dtype="float16")\n{text.replace("x", "z").replace("(zp", "(xp")}')
    assert op_names(recognized(given)[0]) == ["cast", "gelu"]
