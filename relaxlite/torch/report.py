"""Report of `torch.compile(backend="relaxlite")`: what became of the graphs that Dynamo gave."""

from __future__ import annotations

import os
import traceback
import warnings
from dataclasses import field

from relaxlite.errors import RelaxliteError
from relaxlite.records import dataclass


@dataclass
class GraphReport:
    """What became of one graph: operators, seconds of compilation, and why parts of it run in eager.

    reused: number of its parts that run the code of an earlier graph, which covers their sizes.
    """

    operators: int
    compilations: int = 0
    seconds: float = 0.0
    reused: int = 0
    eager: list[str] = field(default_factory=list)

    def add_failure(self, error: Exception) -> None:
        """Record why a part of the graph runs in eager; an error that is a bug of relaxlite gives a warning, too."""
        reason = str(error) if isinstance(error, RelaxliteError) else _as_bug(error)
        if reason in self.eager:
            return
        self.eager.append(reason)
        if not isinstance(error, RelaxliteError):
            warnings.warn(f"a part of a graph runs in eager: {reason}", RuntimeWarning, stacklevel=2)

    def __str__(self) -> str:
        parts = f"{self.reused} part{'s run' if self.reused > 1 else ' runs'}"
        reused = f"; its {parts} code of an earlier graph" if self.reused else ""
        compiled = f"compiled {self.compilations} times in {self.seconds:.2f} s"
        lines = [f"graph of {self.operators} operators: {compiled}{reused}"]
        return "\n".join(lines + [f"  in eager: {reason}" for reason in self.eager])


def _as_bug(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return f"internal error, please report it: {type(error).__name__}: {error} ({place})"


@dataclass
class Report:
    """The graphs that `torch.compile` gave to relaxlite in this process."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def compilations(self) -> int:
        """Number of compilations of all graphs."""
        return sum(graph.compilations for graph in self.graphs)

    def add(self, operators: int) -> GraphReport:
        """Add a graph."""
        self.graphs.append(GraphReport(operators))
        return self.graphs[-1]

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "no graph has been compiled"


_report = Report()


def report() -> Report:
    """Return what `torch.compile(backend="relaxlite")` compiled in this process, and what runs in eager and why."""
    return _report


def reset_report() -> None:
    """Forget the graphs of the report."""
    _report.graphs.clear()
