"""What compiling a model did and why: `explain(module)` compiles it and keeps everything there is to see.

explain.py      compiles with an observer, and collects: an Explanation
symbols.py      symbols by unique names, expressions as JSON
passes.py       what each pass changed
graph.py        a function as nodes to draw; fusion.py: which calls became one kernel
kernels.py      the kernels and their costs in the model's symbols; code.py: their loops, LLVM IR and assembly
summary.py      an Explanation as text
page.py         an Explanation as one HTML page: page.css, and page.js, graph.js, memory.js
compiled.py     what a compiled file still says, as the same data
"""

from __future__ import annotations

from relaxlite.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
