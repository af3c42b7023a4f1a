"""Forms: how arguments and results that are no plain tensors stand in tensors.

A form is a text: "" (a tensor), an element type that the IR lacks ("float8_e4m3fn", "int4", "string"),
`sequence(FORM)`, `optional(FORM)` or `maps(LABELS)`, with the labels as JSON. Maps are a matrix: a row for each map, a
column for each label. A sequence is two tensors: its elements one after another, flat, and their shapes,
(length, rank). An optional is a flag, then what it holds; where it is absent, zeros of the least sizes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

Form = str
STRING = "string"


def inner(form: Form) -> tuple[str, Form]:
    """Kind of a form, "sequence", "optional", "maps" or "tensor", and what it holds, or labels of maps."""
    for kind in ("sequence", "optional", "maps"):
        if form.startswith(f"{kind}("):
            return kind, form[len(kind) + 1 : -1]
    return "tensor", form


def num_tensors(form: Form) -> int:
    """Number of tensors that a value of this form stands in."""
    kind, held = inner(form)
    return {"tensor": 1, "sequence": 2, "optional": 1, "maps": 1}[kind] + (
        num_tensors(held) if kind == "optional" else 0
    )


def part_names(name: str, form: Form) -> tuple[str, ...]:
    """Names of the tensors that a value stands in."""
    kind, held = inner(form)
    if kind == "sequence":
        return f"{name}.elements", f"{name}.shapes"
    return (f"{name}.is_present", *part_names(name, held)) if kind == "optional" else (name,)


def part_elements(form: Form) -> tuple[str, ...]:
    """Element types of the tensors that a value stands in, "" for those that the IR has."""
    kind, held = inner(form)
    if kind == "sequence":
        return element_of(held), ""
    if kind == "maps":
        return ("map",)
    return ("", *part_elements(held)) if kind == "optional" else (form,)


def element_of(form: Form) -> str:
    """The element type of a form, "" for one that the IR has."""
    kind, held = inner(form)
    if kind == "maps":
        return ""
    return form if kind == "tensor" else element_of(held)


def maps_form(labels: Sequence[str | int]) -> Form:
    """The form of maps with these labels."""
    return f"maps({json.dumps(list(labels), ensure_ascii=False)})"


def maps_labels(held: str) -> list[str | int]:
    """Labels of what `inner` gives for a form of maps."""
    labels: list[str | int] = json.loads(held)
    return labels
