"""Running passes: a pass is a named pure function IRModule -> IRModule; the manager verifies, times and dumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path

from relaxlite import config
from relaxlite.errors import PassError, RelaxliteError
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import print_module
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.verifier import verify
from relaxlite.passes.cost import Cost
from relaxlite.passes.decisions import Decision
from relaxlite.passes.kept import Kept
from relaxlite.passes.library_rules import LibraryRule
from relaxlite.passes.memory_plan import MemoryPlan
from relaxlite.passes.tuning import Tuning
from relaxlite.records import dataclass
from relaxlite.target import Target

DEFAULT_PRECISION = "auto"


@dataclass(slots=True)
class PassContext:
    """What passes may ask (`target`, `precision`, `constant_memory`, `tuning`, and `libraries`, whose routines may be
    called) and what they leave: `timings` in seconds, `decisions`, `costs` of programs and `memory_plans` by name,
    for other processes what is `kept`, and how much of each function `validations` compared."""

    target: Target
    precision: str = DEFAULT_PRECISION  # one of lower_precision.PRECISIONS
    constant_memory: bool = False  # offsets of intermediates for the largest sizes that the symbols' bounds allow
    tuning: Tuning = field(default_factory=lambda: _tuning(config.get("tuning")))
    libraries: tuple[LibraryRule, ...] | None = None  # None: not chosen yet, as by driver.build
    verify: bool = field(default_factory=lambda: bool(config.get("verify_passes")))
    dump_dir: Path | None = field(default_factory=lambda: _path(config.get("dump_dir")))
    # Told of each pass that ran, what it was given and made, and its seconds. Modules are immutable: keep them freely.
    observers: list[Callable[[Pass, IRModule, IRModule, float], None]] = field(default_factory=list)
    timings: list[tuple[str, float]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)
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


def _tuning(path: str) -> Tuning:
    return Tuning.load(path) if path else Tuning()


def _path(value: object) -> Path | None:
    return Path(str(value)) if value else None


@dataclass(frozen=True, slots=True)
class Pass:
    """`stage` names the rules that hold after the pass (ir/verifier.py)."""

    name: str
    run: Callable[[IRModule, PassContext], IRModule]
    stage: str
    doc: str = ""
    rounds: bool = False  # where the precision allows it, results change


def run_passes(module: IRModule, passes: Sequence[Pass], context: PassContext) -> IRModule:
    """The module after all passes. Raises PassError naming the pass that failed."""
    verified: tuple[IRModule, str] | None = None
    for number, step in enumerate(passes):
        given, start = module, time.perf_counter()
        try:
            module = step.run(module, context)
        except RelaxliteError as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"in pass {step.name}")
            raise
        except Exception as error:
            raise PassError(f"pass {step.name} failed: {type(error).__name__}: {error}") from error
        context.timings.append((step.name, time.perf_counter() - start))
        if context.verify:
            _verify_after(module, step, verified)
            verified = module, step.stage
        for observe in context.observers:
            observe(step, given, module, context.timings[-1][1])
        if context.dump_dir is not None:
            context.dump_dir.mkdir(parents=True, exist_ok=True)
            (context.dump_dir / f"{number:02d}_{step.name}.py").write_text(print_module(module))
    return module


def _verify_after(module: IRModule, step: Pass, verified: tuple[IRModule, str] | None) -> None:
    """Two passes out of three find nothing to do: what was proven of the same definitions stays true."""
    known, stage = verified or (None, None)
    if known is not None and stage == step.stage and _has_the_same_definitions(module, known):
        return
    try:
        verify(module, step.stage, known)
    except RelaxliteError as error:
        raise PassError(f"after pass {step.name}: {error}") from error


def _has_the_same_definitions(module: IRModule, known: IRModule) -> bool:
    """The same objects, which are immutable."""
    return len(module) == len(known) and all(known.get(name) is found for name, found in module.items())
