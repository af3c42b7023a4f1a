"""Declarations of the attributes of modules, functions and tensor programs: name, owner, kind of value, doc.

Attributes carry metadata from passes to later passes, code generation and the runtime. They are printed and parsed as
keywords: `@program(symbols=(), outputs=1, scheduled=True)`. The verifier rejects unlisted names and values of another
kind. A module may also have metadata of the imported model, under any name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

from relaxlite.records import dataclass

Owner: TypeAlias = Literal["module", "function", "program"]

# Of modules
BATCH_INVARIANT: Final = "batch_invariant"
TIED: Final = "tied_weights"
UNUSED: Final = "unused_weights"
WEIGHTS: Final = "weights"

# Of functions
CALL_STRUCTURE: Final = "call_structure"
COMPOSITE: Final = "composite"
DONATED: Final = "donated"
EXPORTED: Final = "exported"
INPUT_FORMS: Final = "input_forms"
INPUT_NAMES: Final = "input_names"
OUTPUT_FORMS: Final = "output_forms"
OUTPUT_NAMES: Final = "output_names"
RELAXED_PRECISION: Final = "relaxed_precision"
STATE: Final = "state"
STRINGS: Final = "strings"

# Of tensor programs
CHECKED: Final = "checked"
CONCATENATES: Final = "concatenates"
INHERITS_LAYOUT: Final = "inherits_layout"
IN_ORDER: Final = "in_order"
IN_PLACE: Final = "in_place"
MIN_PREPARED_ROWS: Final = "min_prepared_rows"
PANELS: Final = "panels"
PREFETCH_BYTES: Final = "prefetch_bytes"
READS_APART: Final = "reads_apart"
ROW_GROUPS: Final = "row_groups"
SCHEDULE: Final = "schedule"
SCHEDULED: Final = "scheduled"
STACKED: Final = "stacked"
WORKSPACES: Final = "workspaces"
WRITES_INPUTS: Final = "writes_inputs"


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Kind of attribute values: description for messages, and predicate."""

    text: str
    accepts: Callable[[object], bool]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(accepts, value))


_FLAG = ValueKind("True or False", lambda value: isinstance(value, bool))
_COUNT = ValueKind("a count", lambda value: _is_int(value) and value >= 0)  # type: ignore[operator]
_INTS = ValueKind("a tuple of integers", _all(_is_int))
_PAIRS = ValueKind(
    "a tuple of pairs of integers",
    _all(lambda pair: _INTS.accepts(pair) and len(pair) == 2),  # type: ignore[arg-type]
)
_NAMES = ValueKind("a tuple of strings", _all(lambda name: isinstance(name, str)))
_TEXT = ValueKind("text", lambda value: isinstance(value, str))
_NAME_PAIRS = ValueKind(
    "a tuple of pairs of strings",
    _all(lambda pair: _NAMES.accepts(pair) and len(pair) == 2),  # type: ignore[arg-type]
)


@dataclass(frozen=True, slots=True)
class Attribute:
    """Declaration of one attribute. Values refer to inputs and parameters by their indices."""

    name: str
    owner: Owner
    kind: ValueKind
    doc: str


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(BATCH_INVARIANT, "module", _FLAG, "Results of a row are the same bits whatever rows are beside it."),
    Attribute(TIED, "module", _NAME_PAIRS, "(another name of a weight, the name of its constant)."),
    Attribute(UNUSED, "module", _NAMES, "Weights of the imported model that no function uses."),
    Attribute(WEIGHTS, "module", _NAMES, "Names of the constants that are weights."),
    Attribute(CALL_STRUCTURE, "function", _TEXT, "Nesting of arguments and results, as JSON (nesting.py)."),
    Attribute(COMPOSITE, "function", _FLAG, "A group of calls that fusion will merge into one tensor program."),
    Attribute(DONATED, "function", _INTS, "Parameters whose memory the function takes over."),
    Attribute(EXPORTED, "function", _FLAG, 'Callers of the compiled model may run it, as they run "main".'),
    Attribute(INPUT_FORMS, "function", _NAME_PAIRS, "(argument, how it stands in parameters: forms.py)."),
    Attribute(INPUT_NAMES, "function", _NAMES, "Names of the parameters, as callers know them."),
    Attribute(OUTPUT_FORMS, "function", _NAME_PAIRS, "(result, how it stands in results: forms.py)."),
    Attribute(OUTPUT_NAMES, "function", _NAMES, "Names of the results, as callers know them."),
    Attribute(RELAXED_PRECISION, "function", _FLAG, "Its products may round more than those of other functions."),
    Attribute(STATE, "function", _NAMES, "Names of the last parameters, which the executable keeps between calls."),
    Attribute(STRINGS, "function", _NAMES, "The text that it may give."),
    Attribute(CHECKED, "program", _FLAG, "Integer arithmetic is tested for overflow: it computes sizes."),
    Attribute(CONCATENATES, "program", _INTS, "The inputs that its output consists of, one after another."),
    Attribute(INHERITS_LAYOUT, "program", _FLAG, "It reads weights as other programs have them packed."),
    Attribute(IN_ORDER, "program", _INTS, "Inputs whose loads stay in their order."),
    Attribute(IN_PLACE, "program", _PAIRS, "(input, output that may take over the input's memory)."),
    Attribute(MIN_PREPARED_ROWS, "program", _COUNT, "Rows from which on the strategy with prepared rows runs."),
    Attribute(PANELS, "program", _PAIRS, "(input, columns of a panel) that constant weights are to be packed in."),
    Attribute(PREFETCH_BYTES, "program", _PAIRS, "(input, prefetch distance in bytes)."),
    Attribute(READS_APART, "program", _FLAG, "It reads no element of an operand after it stored another in its place."),
    Attribute(ROW_GROUPS, "program", _PAIRS, "(input, rows of a panel that lie beside each other)."),
    Attribute(SCHEDULE, "program", _NAMES, "How it was scheduled, one step a line."),
    Attribute(SCHEDULED, "program", _FLAG, "Its loops are final: no rule schedules it."),
    Attribute(STACKED, "program", _INTS, "Inputs that are several matrices, packed each on its own."),
    Attribute(WORKSPACES, "program", _COUNT, "How many of its outputs, the last ones, are workspaces."),
    Attribute(WRITES_INPUTS, "program", _FLAG, "It may store into its inputs."),
)
BY_OWNER: Mapping[Owner, Mapping[str, Attribute]] = {
    owner: {a.name: a for a in ATTRIBUTES if a.owner == owner} for owner in ("module", "function", "program")
}


def attribute_problem(owner: Owner, attrs: Mapping[str, object]) -> str | None:
    """Validate the attributes of a module, function or tensor program: an error message, or None."""
    for name, value in attrs.items():
        declaration = BY_OWNER[owner].get(name)
        if declaration is None and owner != "module":
            return f"there is no attribute {name!r} of a {owner}; there are {', '.join(BY_OWNER[owner])}"
        if declaration is not None and not declaration.kind.accepts(value):
            return f"attribute {name!r} takes {declaration.kind.text}, got {value!r}"
    return None
