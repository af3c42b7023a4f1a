"""Where OpenBLAS beats the kernels of this compiler: products of float32 matrices.

    python -m bench.library [KIND ...] [--seconds 0.05] [--sweeps 3] [--write]

KIND: gemv_t y[n] = x[k] B[k, n]; gemv_n y[n] = B[n, k] x[k]; gemv_a y[m] = A[m, k] x[k]; gemm_nn A[m, k] B[k, n];
gemm_nt A[m, k] B[n, k] transposed; constant A[m, k] B[k, n] of weights B, for which nothing is ever called (default:
all). At each size the two kernels run in turn, in one process and on one thread, with the operands in place; the
figures are the least microseconds of each. "range" is the box of sizes that gains most among those in which the library
was at least GAIN times as fast at most sizes, and lost nowhere. `--write` puts the figures and the ranges into
relaxlite/library/openblas_costs.json, from which compilation takes when to call the library.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

import relaxlite as rl
from relaxlite.driver import build
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.types import TensorType
from relaxlite.library.openblas import COSTS, KINDS, rules_of_kind
from relaxlite.machine import cpu_name
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.library_rules import LibraryRule
from relaxlite.runtime import threadpool
from relaxlite.runtime.replay import Recorder
from relaxlite.target import Target

GAIN = 1.1  # what a call of the library must gain at most measured sizes of a range, beyond noise
MAX = 0.8  # the share of the sizes that are most: how kernels run at the others changes with where arrays lie
MIN_US = 3.0  # sizes at which the generated kernel is quicker than that need not gain
NO_LOSS = 0.95  # nowhere in a range it may lose, give or take the noise
FEWEST = 8  # measured sizes in a range, and runs at each size
MANY = (16, 64, 200, 512, 1000, 2048, 4096)
GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "gemv_t": {"m": (1,), "k": MANY, "n": MANY},
    "gemv_n": {"m": (1,), "k": MANY, "n": MANY},
    "gemv_a": {"m": MANY, "k": MANY, "n": (1,)},
    "gemm_nn": {"m": (2, 4, 8, 16, 64, 200, 512), "k": (8, 64, 200, 1024), "n": (8, 64, 200, 1024)},
    "gemm_nt": {"m": (2, 4, 8, 16, 64, 200, 512), "k": (8, 64, 200, 1024), "n": (8, 64, 200, 1024)},
}
CONSTANT = "constant"
WEIGHTS = ((64, 64), (384, 384), (384, 1536), (1536, 384), (2048, 2048), (4096, 16), (16, 4096), (200, 10))
ROWS = (1, 2, 4, 16, 128)
Row = tuple[dict[str, int], float, float]  # sizes, microseconds of the generated kernel, and of the library


def module_of(kind: str, weight: np.ndarray | None = None) -> IRModule:
    """main(a, b): the product, as a graph has it; with a constant `weight` main(a)."""
    is_transposed = kind in ("gemv_n", "gemm_nt")
    bb = BlockBuilder()
    m, k, n = (bb.symbol(name) for name in "mkn")
    a = Var("a", TensorType.of((m, k), "float32"))
    b = Var("b", TensorType.of((n, k) if is_transposed else (k, n), "float32"))
    if weight is not None:
        a = Var("a", TensorType.of((m, weight.shape[0]), "float32"))
    with bb.function_with_params("main", (a, b) if weight is None else (a,)):
        right: Expr = b if weight is None else Constant.of(weight)
        right = bb.emit(get_op("transpose")(right, axes=(1, 0))) if is_transposed else right
        bb.result(bb.emit(get_op("matmul")(a, right)))
    return bb.module()


def measure(kind: str, seconds: float) -> Iterator[Row]:
    """Every size of the kind's grid; `seconds` for each."""
    rng = np.random.default_rng(0)
    if kind == CONSTANT:
        rules = tuple(replace(rule, check=None) for name in ("gemv_t", "gemm_nn") for rule in rules_of_kind(name))
        for k, n in WEIGHTS:
            weight = rng.standard_normal((k, n), np.float32)
            recorders = both(module_of(kind, weight), rules)
            for m in ROWS:
                yield time_of(
                    recorders, {"m": m, "k": k, "n": n}, {"a": rng.standard_normal((m, k), np.float32)}, seconds
                )
        return
    recorders, grid = both(module_of(kind), tuple(rules_of_kind(kind))), GRIDS[kind]
    for sizes in product(*grid.values()):
        at = dict(zip(grid, sizes, strict=True))
        m, k, n = at["m"], at["k"], at["n"]
        b = rng.standard_normal((n, k) if kind in ("gemv_n", "gemm_nt") else (k, n), np.float32)
        inputs = {"a": rng.standard_normal((m, k), np.float32), "b": b}
        yield time_of(recorders, at, inputs, seconds)


def both(module: IRModule, rules: tuple[LibraryRule, ...]) -> list[Recorder]:
    """The module with calls of the library and without."""
    called = PassContext(Target.host(), libraries=rules)
    return [Recorder(build(module, context=called)), Recorder(build(module, libraries="none"))]


def time_of(recorders: list[Recorder], at: dict[str, int], inputs: dict[str, np.ndarray], seconds: float) -> Row:
    replays = [recorder.record(inputs) for recorder in recorders]
    np.testing.assert_allclose(replays[0].outputs[0], replays[1].outputs[0], rtol=1e-3, atol=1e-3 * math.sqrt(at["k"]))
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < FEWEST:
        for which, replay in enumerate(replays):
            start = time.perf_counter()
            replay.run()
            times[which].append(time.perf_counter() - start)
    return at, min(times[1]) * 1e6, min(times[0]) * 1e6


def measure_often(kind: str, seconds: float, sweeps: int) -> list[Row]:
    """The least of several sweeps over all sizes: what disturbs a measurement seldom lasts from one to the next."""
    found = [list(measure(kind, seconds)) for _ in range(sweeps)]
    return [
        (rows[0][0], min(ours for _, ours, _ in rows), min(theirs for *_, theirs in rows))
        for rows in zip(*found, strict=True)
    ]


def best_range(rows: Sequence[Row]) -> tuple[dict[str, tuple[int | None, int | None]], list[Row]] | None:
    """The box of sizes with the greatest sum of logarithms of gains, and what was measured in it; None without one.

    A side that reaches the greatest measured size is open: nothing says that the library loses beyond it.
    """
    values = {name: sorted({row[0][name] for row in rows}) for name in "mkn"}
    sizes = np.array([[row[0][name] for name in "mkn"] for row in rows])
    gains = np.array([ours / theirs for _, ours, theirs in rows])
    is_long = np.array([ours >= MIN_US for _, ours, _ in rows])
    found, most = None, 0.0
    sides = [[(low, high) for low in values[name] for high in values[name] if low <= high] for name in "mkn"]
    for box in product(*sides):
        inside = np.logical_and.reduce(
            [(sizes[:, k] >= low) & (sizes[:, k] <= high) for k, (low, high) in enumerate(box)]
        )
        counted = inside & is_long
        total = float(np.log(gains[inside]).sum())
        if counted.sum() < FEWEST or total <= most or gains[inside].min() < NO_LOSS:
            continue
        if (gains[counted] >= GAIN).mean() < MAX:
            continue
        found, most = (box, [row for row, is_in in zip(rows, counted, strict=True) if is_in]), total
    if found is None:
        return None
    fixed = {name: len(values[name]) == 1 for name in "mkn"}
    when = {
        name: (low, high if fixed[name] or high < values[name][-1] else None)
        for name, (low, high) in zip("mkn", found[0], strict=True)
    }
    return when, found[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds", nargs="*", default=[*KINDS, CONSTANT], metavar="KIND", help=f"of {', '.join((*KINDS, CONSTANT))}"
    )
    parser.add_argument("--seconds", type=float, default=0.05, help="for each size and sweep (default: 0.05)")
    parser.add_argument("--sweeps", type=int, default=3, help="over all sizes (default: 3)")
    parser.add_argument("--write", action="store_true", help="write the file that compilation reads")
    args = parser.parse_args(arguments)
    threadpool.set_num_threads(1)
    kept = json.loads(COSTS.read_text("utf-8")) if COSTS.exists() else {}
    table, ranges = kept.get("table", {}), kept.get("ranges", {})
    for kind in args.kinds:
        print(f"{kind:<10}{'m':>6}{'k':>6}{'n':>6}{'generated us':>14}{'openblas us':>13}{'gain':>7}")
        rows = measure_often(kind, args.seconds, args.sweeps)
        for at, ours, theirs in rows:
            sizes = "".join(f"{at[name]:>6}" for name in "mkn")
            print(f"{'':<10}{sizes}{ours:>14.1f}{theirs:>13.1f}{ours / theirs:>7.2f}", flush=True)
        table[kind] = [[at["m"], at["k"], at["n"], round(ours, 2), round(theirs, 2)] for at, ours, theirs in rows]
        found = best_range(rows)
        ranges.pop(kind, None)
        if kind == CONSTANT:
            print(f"constant: at most {max(ours / theirs for _, ours, theirs in rows):.2f} times as fast")
            continue
        if found is None:
            print(f"{kind}: OpenBLAS gains nowhere enough")
            continue
        when, inside = found
        gains = [ours / theirs for _, ours, theirs in inside]
        ranges[kind] = {"when": when, "median_gain": round(statistics.median(gains), 3), "sizes": len(inside)}
        span = f"{min(gains):.2f} to {max(gains):.2f}, median {statistics.median(gains):.2f}"
        print(f"{kind}: range {when}, {span} times as fast at {len(inside)} sizes")
    if args.write:
        COSTS.write_text(_text(table, ranges), "utf-8")
        print(f"written: {COSTS}")


def _text(table: dict[str, list[list[float]]], ranges: dict[str, dict[str, object]]) -> str:
    """JSON with one line per measured size."""
    origin = {
        "made_by": "python -m bench.library --write",
        "relaxlite": rl.__version__,
        "cpu": cpu_name(),
        "threads": 1,
        "columns": ["m", "k", "n", "generated_us", "openblas_us"],
    }
    lines = []
    for kind, rows in table.items():
        body = ",\n      ".join(json.dumps(row) for row in rows)
        lines.append(f'    "{kind}": [\n      {body}\n    ]')
    boxes = ",\n".join(f'    "{kind}": {json.dumps(found)}' for kind, found in ranges.items())
    measured = ",\n".join(lines)
    return (
        f'{{\n  "origin": {json.dumps(origin)},\n  "ranges": {{\n{boxes}\n  }},\n  "table": {{\n{measured}\n  }}\n}}\n'
    )


if __name__ == "__main__":
    main()
