"""What passes are told and what they leave behind: `PassContext`, and the decisions that people are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from relaxlite import config
from relaxlite.ir.module import IRModule
from relaxlite.ir.program_cache import ProgramCache
from relaxlite.ir.symbolic import SymExpr
from relaxlite.records import dataclass
from relaxlite.target import Target

if TYPE_CHECKING:  # the rooms import this file, not the other way round
    from relaxlite.passes.cost import Cost
    from relaxlite.passes.fuse.library_rules import LibraryRule
    from relaxlite.passes.manager import Pass
    from relaxlite.passes.memory.plan import MemoryPlan
    from relaxlite.passes.schedule.tuning import Tuning

DEFAULT_PRECISION = "auto"


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


@dataclass(slots=True)
class PassContext:
    """What passes may ask (`target`, `precision`, `constant_memory`, `tuning`, and `libraries`, whose routines may be
    called) and what they leave: `timings` in seconds, `decisions`, `costs` of programs and `memory_plans` by name,
    what other processes may find in `program_cache`, and how much of each function `validations` compared."""

    target: Target
    precision: str = DEFAULT_PRECISION  # one of lower_precision.PRECISIONS
    constant_memory: bool = False  # offsets of intermediates for the largest sizes that the symbols' bounds allow
    tuning: Tuning | None = None  # None: not chosen yet, as by driver.build
    libraries: tuple[LibraryRule, ...] | None = None  # None: not chosen yet, as by driver.build
    verify: bool = field(default_factory=lambda: bool(config.get("verify_passes")))
    dump_dir: Path | None = field(default_factory=lambda: _path(config.get("dump_dir")))
    # Told of each pass that ran, what it was given and made, and its seconds. Modules are immutable: keep them freely.
    observers: list[Callable[[Pass, IRModule, IRModule, float], None]] = field(default_factory=list)
    timings: list[tuple[str, float]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    program_cache: ProgramCache = field(default_factory=ProgramCache)
    memory_plans: dict[str, MemoryPlan] = field(default_factory=dict)
    validations: list[str] = field(default_factory=list)

    def decide(self, step: str, subject: str, taken: bool, reason: str, **figures: SymExpr) -> None:
        """Keep a decision; names of figures take spaces for underscores."""
        amounts = {name.replace("_", " "): amount for name, amount in figures.items()}
        self.decisions.append(Decision(step, subject, taken, reason, amounts))

    @property
    def notes(self) -> list[str]:
        """The decisions against something, as sentences."""
        return [str(decision) for decision in self.decisions if not decision.taken]


def _path(value: object) -> Path | None:
    return Path(str(value)) if value else None
