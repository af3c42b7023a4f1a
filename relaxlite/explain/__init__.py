"""Compilation reports: `explain(module)` compiles a module and records what each pass did and why.

explanation.py  compilation with an observer, recorded as an Explanation
symbols.py      unique names of symbols, and expressions as JSON
passes.py       changes of the IR by each pass
graph.py        a function as a graph to draw; fusion.py: calls that were fused into one kernel
kernels.py      kernels and their costs in the model's symbols; code.py: their loops, LLVM IR and assembly
decisions.py    decisions, grouped by reason
summary.py      an Explanation as text, and the summary of a compiled file
page.py         an Explanation as one HTML page: sections.py, markup.py; page.css, page.js, graph.js, memory.js
"""

from __future__ import annotations

from relaxlite.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
