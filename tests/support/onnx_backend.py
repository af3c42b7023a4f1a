"""The ONNX package's own node tests (`onnx.backend.test`), imported and executed by relaxlite.

    python -m tests.onnx_backend                    # all of them; a table per op and the totals
    python -m tests.onnx_backend softmax_ --compiled  # those whose name contains the text, through the compiled path
    python -m tests.onnx_backend --update            # write the list of expected failures anew

Expected failures stand in onnx_backend_expected.txt: the name of a test, then why it cannot pass.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import ImportModelError, RelaxliteError, UnsupportedOpsError
from relaxlite.frontend.onnx import from_onnx
from relaxlite.frontend.onnx.narrow_types import NARROW_TYPES, NarrowType
from relaxlite.ir.module import IRModule

EXPECTED_FILE = Path(__file__).with_name("onnx_backend_expected.txt")

# Why numbers differ, by how the test's name begins.
_WHY = {
    "test_bernoulli": "random numbers, of another generator",
    "test_attention": "half precision: one unit in the last place, as sums are kept in float32 and rounded once",
    "test_resize_downsample_scales": "align_corners with a scale: onnxruntime computes what we do",
    "test_basic_deform_conv": "rounding: sampled at normalized coordinates",
    "test_dft_inverse": "rounding, of sums that cancel",
    "test_training_dropout": "training",
    "test_ada": "training",
    "test_momentum": "training",
    "test_nesterov": "training",
}

Execute = Callable[[IRModule, Sequence[Any]], Any]


@dataclass(frozen=True)
class Outcome:
    """What came of one test: `kind` is passed, import, run or numbers."""

    name: str
    op: str
    kind: str
    reason: str = ""


def interpret(module: IRModule, inputs: Sequence[Any]) -> Any:
    return Interpreter(module).run("main", *inputs)


def run_compiled(module: IRModule, inputs: Sequence[Any]) -> Any:
    import relaxlite

    return relaxlite.compile(module)(*inputs)  # type: ignore[attr-defined]


def collect() -> list[Any]:
    """All node tests of the installed onnx package (about ten seconds: their data is computed)."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [case for case in collect_testcases(None) if case.model is not None]


def main_op(model: onnx.ModelProto) -> str:
    """The op that a test is about: that of its only node, or the commonest one."""
    counts = collections.Counter(f"{n.domain}.{n.op_type}".lstrip(".") for n in model.graph.node)
    return counts.most_common(1)[0][0] if counts else "none"


def run_case(case: Any, execute: Execute) -> Outcome:
    """Import, execute on every data set, compare with the tolerance that the test gives."""
    op = main_op(case.model)
    try:
        module, held = import_case(case)
    except UnsupportedOpsError as error:
        return Outcome(case.name, op, "import", "unknown op: " + "; ".join(str(error).splitlines()[1:-1]).strip())
    except ImportModelError as error:
        return Outcome(case.name, op, "import", str(error).splitlines()[0])
    except Exception as error:
        return Outcome(case.name, op, "import", f"CRASH {type(error).__name__}: {error}")
    for inputs, expected in case.data_sets:
        try:
            found = execute(module, _carried(module, [_plain(x) for k, x in enumerate(inputs) if k not in held]))
        except RelaxliteError as error:
            return Outcome(case.name, op, "run", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        except Exception as error:
            return Outcome(case.name, op, "run", f"CRASH {type(error).__name__}: {error}")
        results = _uncarried(module, found if isinstance(found, tuple) else (found,))
        difference = compare(results, expected, case.rtol, case.atol)
        if difference:
            return Outcome(case.name, op, "numbers", difference)
    return Outcome(case.name, op, "passed")


def import_case(case: Any) -> tuple[IRModule, set[int]]:
    """The module, and the inputs that are constants in it.

    Many tests pass what models have as constants (axes, pads, scales) as inputs. Where the import must
    know a value at compile time, the integer inputs, then all but the first, become constants.
    """
    try:
        return from_onnx(case.model), set()
    except UnsupportedOpsError:
        raise
    except ImportModelError as error:
        if "must be known" not in str(error):
            raise
        first = error
    if any(isinstance(x, list | dict) or x is None for x in case.data_sets[0][0]):
        raise first
    values = [_plain(x) for x in case.data_sets[0][0]]
    integers = {k for k, v in enumerate(values) if k and v.dtype.kind in "iub"}
    for held in (integers, set(range(1, len(values))), set(range(len(values)))):
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        for k in sorted(held):
            model.graph.initializer.append(onnx.numpy_helper.from_array(values[k], model.graph.input[k].name))
        with contextlib.suppress(ImportModelError):
            return from_onnx(model), held
    raise first


def _plain(x: Any) -> Any:
    if isinstance(x, list | dict) or x is None:
        raise ImportModelError(f"an input is a {type(x).__name__}")
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else np.asarray(x)


def _narrow_types(module: IRModule, names: Any) -> list[NarrowType | None]:
    marks: Any = dict(module["main"].attrs.get("narrow_types", ()))  # type: ignore[union-attr]
    return [NARROW_TYPES.get(marks.get(name, "")) for name in names]


def _carried(module: IRModule, arrays: Sequence[Any]) -> list[Any]:
    """Inputs of narrow types as the 8-bit tensors that carry them."""
    types = _narrow_types(module, module["main"].attrs["input_names"])  # type: ignore[union-attr]
    return [x if ty is None else ty.to_storage(x) for x, ty in zip(arrays, types, strict=True)]


def _uncarried(module: IRModule, arrays: Sequence[Any]) -> list[Any]:
    types = _narrow_types(module, module["main"].attrs["output_names"])  # type: ignore[union-attr]
    return [
        x if ty is None else (x.view(ty.dtype) if ty.is_float else x.astype(ty.dtype))
        for x, ty in zip(arrays, types, strict=True)
    ]


def compare(found: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float) -> str:
    """What is wrong with the results; empty if nothing is."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for k, (have, want) in enumerate(zip(found, expected, strict=True)):
        if isinstance(want, list | dict) or want is None:
            return f"result {k} should be a {type(want).__name__}"
        have, want = np.asarray(have), _plain(want)
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"result {k} is {have.dtype}{have.shape} instead of {want.dtype}{want.shape}"
        if want.dtype == object:
            if not np.array_equal(have, want):
                return f"result {k} differs"
            continue
        wide = [v.astype(np.float64) if v.dtype.kind not in "fiubc" else v for v in (have, want)]
        if not np.allclose(wide[0], wide[1], rtol=rtol, atol=atol, equal_nan=want.dtype.kind in "fcV"):
            gap = np.max(np.abs(wide[0].astype(np.float64) - wide[1].astype(np.float64)))
            return f"result {k} differs by up to {gap:.3g}"
    return ""


_cases: list[Any] = []


def _run_index(job: tuple[int, bool]) -> Outcome:
    index, compiled = job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_case(_cases[index], run_compiled if compiled else interpret)


def run_all(cases: Iterable[Any], *, compiled: bool = False, processes: int | None = None) -> list[Outcome]:
    """Every case, spread over processes."""
    _cases[:] = cases
    jobs = [(k, compiled) for k in range(len(_cases))]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.map(_run_index, jobs, chunksize=8)


def expected_failures(*, compiled: bool = False, path: Path = EXPECTED_FILE) -> dict[str, str]:
    """Test name -> reason; a name with "@compiled" counts for the compiled path only."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    entries = {name: reason for name, _, reason in (line.partition(" ") for line in lines)}
    return {name.removesuffix("@compiled"): r for name, r in entries.items() if compiled or "@" not in name}


def write_expected(outcomes: Iterable[Outcome], *, compiled: bool = False) -> None:
    """Renew the entries of one path; those of the other one stay."""
    failed = {o.name: _reason(o) for o in outcomes if o.kind != "passed"}
    plain = expected_failures()
    if compiled:
        entries = {**plain, **{f"{name}@compiled": reason for name, reason in failed.items() if name not in plain}}
    else:
        special = {n: r for n, r in expected_failures(compiled=True).items() if n not in plain and n not in failed}
        entries = {**failed, **{f"{name}@compiled": reason for name, reason in special.items()}}
    header = "# ONNX node tests that cannot pass, with the reason. Written by: python -m tests.onnx_backend --update\n"
    EXPECTED_FILE.write_text(header + "".join(f"{name} {reason}\n" for name, reason in sorted(entries.items())))


def _reason(outcome: Outcome) -> str:
    why = next((text for start, text in _WHY.items() if outcome.name.startswith(start)), "")
    return f"{outcome.kind}: {outcome.reason[:160]}" + (f" ({why})" if why else "")


def table(outcomes: Iterable[Outcome]) -> str:
    """Passed and total per op, the incomplete ones with the first reason."""
    by_op: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        by_op[outcome.op].append(outcome)
    lines = []
    for op, found in sorted(by_op.items()):
        passed = sum(o.kind == "passed" for o in found)
        first = next((o for o in found if o.kind != "passed"), None)
        note = f"  {first.name}: {first.reason[:110]}" if first else ""
        lines.append(f"{op:28} {passed:4}/{len(found):<4}{note}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filter", nargs="?", default="", help="run only tests whose name contains this")
    parser.add_argument("--compiled", action="store_true", help="through the compiled path instead of the interpreter")
    parser.add_argument("--update", action="store_true", help="write the list of expected failures")
    parser.add_argument("--failures", action="store_true", help="print every failure with its reason")
    options = parser.parse_args()
    start = time.time()
    cases = [c for c in collect() if options.filter in c.name]
    outcomes = run_all(cases, compiled=options.compiled)
    print(table(outcomes))
    if options.failures:
        print(*(f"{o.name} {o.kind}: {o.reason}" for o in outcomes if o.kind != "passed"), sep="\n")
    counts = collections.Counter(o.kind for o in outcomes)
    detail = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(f"{counts['passed']} of {len(outcomes)} pass ({detail}) in {time.time() - start:.0f} s")
    if options.update:
        write_expected(outcomes, compiled=options.compiled)
    expected = expected_failures(compiled=options.compiled)
    return 0 if all(o.kind == "passed" or o.name in expected for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
