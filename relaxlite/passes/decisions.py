"""What passes decided, and why: records that `relaxlite explain` and `inspect --notes` show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from relaxlite.ir.symbolic import SymExpr
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of a pass, for or against.

    `step` is the pass or the rule; `subject` says about what ("add_3 into matmul_2"); `reason` is for a person;
    `figures` are the amounts that it rests on, by name, as expressions of the symbols ("bytes saved": 4*n*m).
    """

    step: str
    subject: str
    taken: bool
    reason: str
    figures: Mapping[str, SymExpr] = field(default_factory=dict)

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {amount}" for name, amount in self.figures.items())
        text = f"{self.step}: {self.subject}: {'yes' if self.taken else 'no'}, {self.reason}"
        return f"{text} ({figures})" if figures else text
