"""What compiling a model did and why: `explain(module)` compiles it and keeps everything there is to see.

explanation.py  compiles with an observer, and collects: an Explanation
symbols.py      symbols by unique names, expressions as JSON
passes.py       what each pass changed
graph.py        a function as nodes to draw; fusion.py: which calls became one kernel
kernels.py      the kernels and their costs in the model's symbols; code.py: their loops, LLVM IR and assembly
decisions.py    decisions in an order for reading
summary.py      an Explanation as text, and what a compiled file still says
page.py         an Explanation as one HTML page: sections.py, markup.py; page.css, page.js, graph.js, memory.js
"""

from __future__ import annotations

from relaxlite.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
