"""Running passes: a pass is a named pure function IRModule -> IRModule; the manager verifies, times and dumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from relaxlite.errors import PassError, RelaxliteError
from relaxlite.ir.module import IRModule
from relaxlite.ir.printer import print_module
from relaxlite.ir.verifier import verify
from relaxlite.passes.context import PassContext
from relaxlite.records import dataclass
from relaxlite.target import Kind


@dataclass(frozen=True, slots=True)
class Pass:
    """`stage` names the rules that hold after the pass (ir/verifier.py), `why` what places it in a pipeline. Where the
    passes `after` and `before` are in the pipeline too, this one stands after and before them. `kinds`: the kinds of
    targets whose pipeline it is in."""

    name: str
    run: Callable[[IRModule, PassContext], IRModule]
    stage: str
    doc: str = ""
    rounds: bool = False  # where the precision allows it, results change
    why: str = ""
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ("llvm", "cuda")


def checked_order(*passes: Pass, is_complete: bool = False) -> tuple[Pass, ...]:
    """A pipeline of these passes. Raises PassError for two of one name, for a pass that stands before one that it needs
    or after one that it must precede, and in a complete one for a name in `after` or `before` that is no pass of it."""
    place: dict[str, int] = {}
    for number, step in enumerate(passes):
        if step.name in place:
            raise PassError(f"two passes of a pipeline are named {step.name}")
        place[step.name] = number
    for number, step in enumerate(passes):
        unknown = [name for name in (*step.after, *step.before) if is_complete and name not in place]
        if unknown:
            raise PassError(f"pass {step.name} must come after or before {unknown[0]}, which is no pass")
        late = [name for name in step.after if place.get(name, -1) > number]
        early = [name for name in step.before if place.get(name, number) < number]
        if late or early:
            wrong = f"must come after {late[0]}" if late else f"must come before {early[0]}"
            raise PassError(f"pass {step.name} {wrong}: {step.why}")
    return passes


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
    return len(module) == len(known) and all(known.get(name) is result for name, result in module.items())
