"""What symbolic integers cost, against sympy, and what a question to the Analyzer costs.

    python bench/symbolic.py

Best of several rounds, in microseconds of processor time for each operation; each round makes fresh expressions, so
that no cache of results is measured. Questions include building their expressions; "again" asks the same one again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sympy

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.symbolic import SymVar, ceildiv, smax, smin

ROUNDS = 5
COUNT = 200


def microseconds(run: Callable[[int], object], count: int = COUNT) -> float:
    """Of one call; the argument differs from call to call."""
    best = float("inf")
    for round_ in range(ROUNDS):
        start = time.process_time()
        for index in range(count):
            run(round_ * count + index + 1)
        best = min(best, time.process_time() - start)
    return best / count * 1e6


OPERATIONS: list[tuple[str, int, Callable[[Any, Any, int, Any], object]]] = [
    ("linear: (n*c + m*(c + 1) + 4) - (n + m)", 6, lambda n, m, c, f: (n * c + m * (c + 1) + 4) - (n + m)),
    ("product: (n + c)*(m + c)", 3, lambda n, m, c, f: f.expand((n + c) * (m + c))),
    ("floor: (n + c)//1601", 2, lambda n, m, c, f: (n + c) // 1601),
    ("mod: (n*3 + c) % 1601", 3, lambda n, m, c, f: (n * 3 + c) % 1601),
    ("min: min(n, m + c)", 2, lambda n, m, c, f: f.min(n, m + c)),
]


class Ours:
    min = staticmethod(smin)

    @staticmethod
    def expand(expr: Any) -> Any:
        return expr  # always


class Sympys:
    min = sympy.Min
    expand = staticmethod(sympy.expand)


def compare_operations() -> None:
    ours = SymVar("n"), SymVar("m")
    theirs = sympy.symbols("n m", integer=True, nonnegative=True)
    print(f"{'microseconds for each operation':44}{'relaxlite':>10}{'sympy':>10}")
    for name, operations, run in OPERATIONS:
        us = [
            microseconds(lambda c, run=run, n=n, m=m, f=f: run(n, m, c, f)) / operations  # type: ignore[misc]
            for (n, m), f in ((ours, Ours), (theirs, Sympys))
        ]
        print(f"{name:44}{us[0]:10.1f}{us[1]:10.1f}")


def time_questions() -> None:
    n, m, k, i, j = (SymVar(name) for name in "nmkij")
    loops = Analyzer().with_range(i, 0, n).with_range(j, 0, m)
    root = Analyzer()
    questions: list[tuple[str, Callable[[int], object]]] = [
        ("a size: n*m*4 <= n*m*c*8", lambda c: root.can_prove_le(n * m * 4, n * m * c * 8)),
        ("a loop: i*c + 3 < n*c + 4", lambda c: loops.can_prove_lt(i * c + 3, n * c + 4)),
        ("two loops: i*m + j < n*m + c", lambda c: loops.can_prove_lt(i * m + j, n * m + c)),
        ("not true: n*m*4 + c <= n*k*4", lambda c: root.can_prove_le(n * m * 4 + c, n * k * 4)),
        ("ceildiv: n <= ceildiv(n, c)*c", lambda c: root.can_prove_le(n, ceildiv(n, c) * c)),
        ("max: n + c <= max(n + c, m)", lambda c: root.can_prove_le(n + c, smax(n + c, m))),
        ("simplify (i*m + j + c*m)//m", lambda c: loops.simplify((i * m + j + m * c) // m)),
        ("bounds of n - i + c", lambda c: loops.bounds(n - i + c)),
    ]
    print(f"\n{'microseconds for each question':44}{'fresh':>10}{'again':>10}")
    for name, ask in questions:
        print(f"{name:44}{microseconds(ask):10.1f}{microseconds(lambda _, ask=ask: ask(7)):10.1f}")  # type: ignore[misc]


if __name__ == "__main__":
    compare_operations()
    time_questions()
