"""What explain keeps of a compilation, prints and draws; the page itself in a browser: test_explain_page.py."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import relaxlite as rl
from bench.decoder import DecoderConfig, build_decoder
from relaxlite.explain import Explanation, explain
from relaxlite.explain.code import codes_of, pack_text
from relaxlite.explain.decisions import decisions_by_kernel, group_decisions
from relaxlite.explain.graph import graph_of
from relaxlite.explain.kernels import modelled_work
from relaxlite.explain.passes import Differences, Snapshots, print_definition
from relaxlite.explain.summary import compiled_summary, summary, summary_text
from relaxlite.explain.symbols import Figures, Symbols, find_symbols, value_of
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, ExternFunction, Function, GlobalVar, If, Loop, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, smax, smin, sym
from relaxlite.ir.types import TensorType, TupleType
from relaxlite.passes.context import Decision, PassContext
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target

SMALL = DecoderConfig(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=50, max_batch=8, context=64)


@pytest.fixture(scope="module")
def decoder() -> Explanation:
    return explain(build_decoder(SMALL), name="decoder")


def two_products(*, width: int = 8) -> IRModule:
    """x @ w for two tensors of different lengths: one kernel, called at n and at k."""
    bb = BlockBuilder()
    n, k, m = bb.symbol("n"), bb.symbol("k"), bb.symbol("m", lower=1, upper=100, divisor=5)
    weight = np.ones((width, width), np.float32)
    x = Var("x", TensorType.of((n, width), "float32"))
    y = Var("y", TensorType.of((k, width), "float32"))
    z = Var("z", TensorType.of((m,), "float32"))
    with bb.function_with_params("main", (x, y, z)):
        one = bb.emit(get_op("matmul")(x, weight))
        two = bb.emit(get_op("matmul")(y, weight))
        bb.result(Tuple((one, two, bb.emit(ops.relu(bb.emit(ops.exp(z)))))))
    return bb.module()


def branches() -> IRModule:
    """if c: relu(exp(x)) else: x, then a loop, a library call, and a size that run time decides."""
    bb = BlockBuilder()
    n, k = bb.symbol("n"), bb.symbol("k")
    ty = TensorType.of((n,), "float32")
    square = bb.define("square", ExternFunction("lib_square", (ty, ty)))
    with bb.function("main", c=TensorType.of((), "bool"), x=ty, s=TensorType.of((1,), "int64")) as (c, x, s):
        with bb.body() as scope:
            bb.result(bb.emit(ops.relu(bb.emit(ops.exp(x)))))
        yes = bb.finish(scope)
        with bb.body() as scope:
            bb.result(bb.emit(ops.neg(x)))
        chosen = bb.emit(If(c, yes, bb.finish(scope), ty), "chosen")
        value = Var("value", ty)
        with bb.body() as scope:
            bb.result(Tuple((Constant.of(np.asarray(False)), bb.emit(ops.tanh(value)))))
        loop = bb.emit(Loop((value,), (chosen,), Constant.of(np.asarray(True)), bb.finish(scope), TupleType((ty,))))
        after = bb.emit(TupleGetItem(loop, 0))
        squared = bb.emit(Call(square, (after,), ty=ty), "squared")
        bb.match_shape(bb.emit(ops.tensor_to_shape(s)), (k,))
        many = bb.emit(ops.broadcast_to(np.float32(1), (k,)))
        bb.result(Tuple((squared, many)))
    return bb.module()


# The observer


def test_an_observer_sees_every_pass_with_the_module_before_and_after() -> None:
    module, context = two_products(), PassContext(Target.parse("llvm"))
    seen = Snapshots()
    context.observers.append(seen)
    rl.compile(module, context=context)
    assert [s.step.name for s in seen.taken] == [step.name for step in default_pipeline()]
    assert seen.taken[0].before is module
    assert all(a.after is b.before for a, b in zip(seen.taken, seen.taken[1:], strict=False))
    times = dict(context.timings)
    assert all(s.seconds == times[s.step.name] for s in seen.taken)


def test_nobody_observes_unless_asked() -> None:
    assert PassContext(Target.parse("llvm")).observers == []


# Symbols and figures

N, M = SymVar("n"), SymVar("m", lower=1, upper=64, divisor=4)


def expressions() -> st.SearchStrategy[SymExpr]:
    leaves = st.one_of(st.integers(-9, 9).map(sym), st.sampled_from([N, M]))

    def larger(inner: st.SearchStrategy[SymExpr]) -> st.SearchStrategy[SymExpr]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: p[0] + p[1]),
            pairs.map(lambda p: p[0] * p[1]),
            pairs.map(lambda p: smin(*p)),
            pairs.map(lambda p: smax(*p)),
            st.tuples(inner, st.integers(1, 7)).map(lambda p: p[0] // p[1]),
            st.tuples(inner, st.integers(1, 7)).map(lambda p: p[0] % p[1]),
        )

    return st.recursive(leaves, larger, max_leaves=8)


def evaluated(tree: Any, values: dict[str, int]) -> int:
    """What page.js does with a tree."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return values[tree]
    found = [evaluated(part, values) for part in tree[1:]]
    match tree[0]:
        case "+":
            return sum(found)
        case "*":
            return int(np.prod(np.array(found, dtype=object)))
        case "//":
            return found[0] // found[1]
        case "%":
            return found[0] % found[1]
        case "min":
            return min(found)
        case "max":
            return max(found)
    raise AssertionError(tree)


@given(expressions(), st.integers(0, 1000), st.integers(1, 64))
def test_trees_mean_what_expressions_mean(expr: SymExpr, n: int, m: int) -> None:
    symbols = Symbols()
    assert evaluated(symbols.tree(expr), {"n": n, "m": m}) == evaluate(expr, {N: n, M: m})


def test_symbols_of_one_name_get_names_of_their_own() -> None:
    symbols = Symbols()
    other = SymVar("n")
    assert (symbols.name(N), symbols.name(other), symbols.name(N)) == ("n", "n_1", "n")
    assert symbols.text(N + other * 2) == "n + n_1*2"


def test_usual_values_lie_within_the_bounds() -> None:
    cases = [SymVar("a"), SymVar("b", upper=7), SymVar("c", lower=100), SymVar("d", lower=1, upper=70, divisor=48)]
    symbols = Symbols()
    assert [symbols.of(var).default_value for var in cases] == [64, 7, 100, 48]
    assert symbols.values({"b": 3})[cases[1]] == 3


def test_symbols_know_where_they_are_defined() -> None:
    main = two_products()["main"]
    assert isinstance(main, Function)
    found = {s.name: (s.defined, s.is_input) for s in find_symbols(main)}
    assert found == {name: ([f"dimension 0 of {arg}"], True) for name, arg in zip("nkm", "xyz", strict=True)}
    main = branches()["main"]
    assert isinstance(main, Function)
    (k,) = [s for s in find_symbols(main) if s.name == "k"]
    assert not k.is_input and "run time" in k.defined[0]


def test_a_figure_is_kept_once_and_brings_its_symbols() -> None:
    symbols = Symbols()
    figures = Figures(symbols)
    assert [figures.number(e) for e in (N * 4, M + 1, N * 4)] == [0, 1, 0]
    assert [f["text"] for f in figures.to_json()] == ["n*4", "m + 1"]
    assert [s.name for s in symbols] == ["n", "m"]


def test_division_by_zero_gives_zero_as_in_compiled_costs() -> None:
    assert value_of(M // N, {N: 0, M: 3}) == 0


def test_symbols_of_other_functions_have_values_too() -> None:
    bb = BlockBuilder()
    a, n = bb.symbol("n"), bb.symbol("n")
    with bb.function("inner", x=TensorType.of((a, 4), "float32")) as (x,):
        wide = bb.emit(get_op("matmul")(x, np.ones((4, 9), np.float32)))
        bb.result(bb.emit(get_op("matmul")(wide, np.ones((9, 4), np.float32))))
    with bb.function("main", x=TensorType.of((n, 4), "float32")) as (x,):
        bb.result(bb.emit(Call(GlobalVar("inner"), (x,), ty=x.ty)))
    found = explain(bb.module())
    assert "inner" in found.memory_plans
    assert [s.name for s in found.symbols] == ["n", "n_1"]
    assert {m["function"] for m in summary(found, {"n_1": 5})["memory"]} >= {"inner"}


# Graphs and groups


def test_a_kernel_holds_the_calls_that_were_fused(decoder: Explanation) -> None:
    nodes = decoder.compiled.nodes
    kernels = [k for k, node in enumerate(nodes) if node.kind == "kernel"]
    assert len(kernels) == sum(len(k.calls) for k in decoder.kernels)
    for at, node in enumerate(nodes):
        inside = [other for other in nodes if other.inside == at]
        if node.name in decoder.fused and node.kind == "kernel":
            assert [i.name for i in inside] == [m.name for m in decoder.fused[node.name].members]
            assert node.name in [i.name for i in inside] or node.ty.startswith("("), "or it has several results"
            assert all(read < at or nodes[read].inside == at for i in inside for read in i.reads)
        elif node.kind == "kernel":
            assert not inside
    fused = {kernel.name: kernel.ops for kernel in decoder.kernels if len(kernel.ops) > 1}
    assert ["matmul", "add"] in fused.values() or any(ops[0] == "matmul" for ops in fused.values())


def test_every_edge_leads_to_an_earlier_node(decoder: Explanation) -> None:
    for graph in (decoder.imported, decoder.compiled):
        assert all(read < k for k, node in enumerate(graph.nodes) for read in node.reads)
        assert {node.kind for node in graph.nodes} >= {"input", "output"}


def test_branches_and_loops_hold_their_bodies() -> None:
    module = branches()
    main = module["main"]
    assert isinstance(main, Function)
    nodes = graph_of(main, module).nodes
    at = {node.what: k for k, node in enumerate(nodes)}
    assert nodes[at["if"]].kind == nodes[at["loop"]].kind == "control"
    assert {nodes[at[op]].inside for op in ("exp", "relu", "neg")} == {at["if"]}
    assert nodes[at["tanh"]].inside == at["loop"]
    assert nodes[at["tanh"]].reads == (at["if"],), "what the loop begins with"
    assert nodes[at["square"]].kind == "library" and nodes[at["square"]].reads == (at["loop"],)
    assert [node.ty for node in nodes if node.kind == "output"] == ["float32[n]", "float32[k]"]


# Kernels


def test_costs_of_calls_are_summed_in_the_models_symbols() -> None:
    module = two_products()
    found = explain(module)
    (kernel,) = [k for k in found.kernels if k.ops == ["matmul"]]
    assert len(kernel.calls) == 2
    at = found.values({"n": 3, "k": 70, "m": 5})
    assert kernel.cost is not None
    assert evaluate(kernel.cost.flops, at) == 2 * (3 + 70) * 8 * 8
    assert evaluate(kernel.cost.bytes_written, at) == 4 * (3 + 70) * 8
    ranked = [modelled_work(flops, nbytes) for _, flops, nbytes in found.costliest(at)]
    assert ranked == sorted(ranked, reverse=True) and len(ranked) == 2


def test_a_kernel_states_its_own_cost_where_it_is_called_once() -> None:
    context = PassContext(Target.parse("llvm"))
    found = explain(two_products(), context=context)
    (kernel,) = [k for k in found.kernels if k.ops == ["exp", "relu"]]
    assert kernel.cost == context.costs[kernel.name]


def test_library_calls_are_counted() -> None:
    found = explain(branches())
    assert found.library == {"lib_square": ["squared"]}
    assert "1 calls of the library routine lib_square" in summary_text(summary(found))


def test_code_is_made_of_every_kernel(decoder: Explanation) -> None:
    codes = list(codes_of(decoder.kernels, decoder.target))
    for kernel, code in zip(decoder.kernels, codes, strict=True):
        assert f"def {kernel.name}(" in code.loops and "define" in code.llvm and "ret" in code.assembly


def test_long_texts_are_deflated() -> None:
    assert pack_text("short") == {"text": "short"}
    text = "line é\n" * 5000
    assert zlib.decompress(base64.b64decode(pack_text(text)["zlib"])).decode() == text


# Passes


def test_a_difference_shows_what_goes_and_what_comes(decoder: Explanation) -> None:
    differences = Differences()
    for snapshot in decoder.snapshots.taken:
        text = differences.of(snapshot)
        before = {line for name, d in snapshot.before.items() for line in print_definition(name, d).splitlines()}
        after = {line for name, d in snapshot.after.items() for line in print_definition(name, d).splitlines()}
        lines = text.splitlines()
        assert {line[1:] for line in lines if line[:1] == "-"} <= before
        assert {line[1:] for line in lines if line[:1] == "+"} <= after
        assert before - after <= {line[1:] for line in lines if line[:1] == "-"}
        assert after - before <= {line[1:] for line in lines if line[:1] == "+"}
        assert bool(text) <= bool(snapshot.changed)


# Decisions


def decision(reason: str, subject: str = "a into b", *, taken: bool = False, step: str = "fuse") -> Decision:
    return Decision(step, subject, taken, reason)


def test_reasons_that_differ_in_names_and_numbers_stand_together() -> None:
    given = [
        decision("sum_3 is ROW", "x_1 into sum_3"),
        decision("it pays", taken=True),
        decision("/layer.0/Add is ROW", "y into /layer.0/Add"),
        decision("b is ROW"),
        decision("is too large", step="place"),
    ]
    groups = [(g.step, g.taken, len(g.decisions)) for g in group_decisions(given)]
    assert groups == [("fuse", False, 3), ("fuse", True, 1), ("place", False, 1)]


def test_decisions_are_found_by_what_they_are_about() -> None:
    given = [decision("no", "a into b"), decision("no", "c into d")]
    assert decisions_by_kernel(given, {"a": 4, "b": 4, "d": 2}) == {4: [given[0]], 2: [given[1]]}


# The summary


def test_a_summary_has_the_numbers_of_the_plan(decoder: Explanation) -> None:
    sizes = {"batch": 3, "seq": 7, "past": 5}
    data = summary(decoder, sizes)
    plan, at = decoder.memory_plans["main"], decoder.values(sizes)
    (memory,) = [item for item in data["memory"] if item["function"] == "main"]
    assert memory["arena_bytes"] == plan.arena_bytes(at) >= memory["lower_bound"] == plan.lower_bound(at) > 0
    assert {s["name"]: s["value"] for s in data["symbols"]} == sizes
    assert [list(s["symbols"].values()) for s in memory["samples"]] == [[1, 1, 1], [8, 64, 64], [8, 64, 64]]
    assert all(s["arena_bytes"] >= s["lower_bound"] > 0 for s in memory["samples"])
    assert [p["name"] for p in data["passes"]] == [step.name for step in default_pipeline()]
    assert json.loads(json.dumps(data)) == data


def test_a_summary_prints_what_matters(decoder: Explanation) -> None:
    text = summary_text(summary(decoder, {"batch": 1, "seq": 16, "past": 0}))
    for part in ("1 <= batch <= 8: dimension 0 of tokens", "operators became", "fuse_ops", "any plan needs", "matmul"):
        assert part in text, part
    assert re.search(r"the costliest kernels .* at batch = 1, seq = 16, past = 0", text)
    assert not [line for line in text.splitlines() if len(line) > 130 and not line.startswith(("inputs", "made by"))]


def test_a_compiled_file_says_what_it_holds() -> None:
    data = explain(two_products()).data
    found = compiled_summary("a.rlx", data)
    assert found["operators"] == 4 and found["decisions"] == []
    (product,) = [k for k in found["kernels"] if "matmul" in k["name"]]
    assert len(product["calls"]) == 2 and re.fullmatch(r"\w+\*128", product["flops"])
    text = summary_text(found)
    assert "4 operators became" in text and "fuse_ops" in text and "bytes" in text


# On the command line


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """toy.onnx: relu(x @ w), x: float32[batch, 4] with 1 <= batch <= 9; and toy.rlx."""
    from onnx import TensorProto, helper, numpy_helper, save  # an importer's format; tests only

    folder = tmp_path_factory.mktemp("explain")
    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], "a/product"),
        helper.make_node("Relu", ["y"], ["z"], "a/relu"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "toy", inputs, outputs, [weight])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "toy.onnx")
    assert command("compile", folder / "toy.onnx", "-o", folder / "toy.rlx") == 0
    return folder


def command(*args: object) -> int:
    from relaxlite import cli

    return cli.main([str(a) for a in args])


def test_the_command_prints_a_summary(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert command("explain", toy / "toy.onnx", "--bound", "batch=1..9", "--shapes", "x=5x4") == 0
    out = capsys.readouterr().out
    assert "1 <= batch <= 9" in out and "2 operators became 1 kernels" in out and "batch = 5" in out


@pytest.mark.parametrize("file", ["toy.onnx", "toy.rlx"])
def test_the_command_prints_json(toy: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    capsys.readouterr()
    assert command("explain", toy / file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["name"] == file and found["operators"] == 2
    assert [k["name"] for k in found["kernels"] if k["calls"]] == ["fused_matmul_relu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy.onnx", "--shapes", "y=1x4"], "the model has no input 'y'"),
        (["toy.onnx", "--shapes", "x=4"], "another number of dimensions"),
        (["toy.onnx", "--shapes", "x=1x5"], "the dimension 4 cannot be 5"),
        (["toy.onnx", "--bound", "batch=1..9", "--shapes", "x=10x4"], "exceeds its upper bound 9"),
        (["toy.onnx", "--json", "-o", "a.html"], "not both"),
        (["toy.onnx", "-o", "no/where.html"], "there is no folder 'no'"),
        (["toy.rlx", "-o", "a.html"], "-o needs an ONNX file"),
    ],
)
def test_mistakes_are_answered(
    toy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(toy)
    assert command("explain", *arguments) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (toy / "a.html").exists()


def test_sizes_that_disagree_are_refused(tmp_path: Path) -> None:
    from relaxlite.cli.explain import sizes_of
    from relaxlite.errors import InputError

    data = explain(two_products()).data
    assert sizes_of(data.signature.inputs, {"x": (3, 8), "z": (35,)}) == {"n": 3, "m": 35}
    with pytest.raises(InputError, match="no input 'w'"):
        sizes_of(data.signature.inputs, {"w": (3,)})
    with pytest.raises(InputError, match="not a multiple of 5"):
        sizes_of(data.signature.inputs, {"z": (3,)})
