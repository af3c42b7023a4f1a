"""No op reads or writes outside its operands, whatever their sizes are.

Type rules refuse sizes that provably do not fit; those that only a call tells have to be checked by the loops. So
each dimension of a sample's operands becomes a symbol of its own, and one after the other gets another size. The loops
run in Python, which notices every access outside a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.codegen.interpreter import Interpreter
from relaxlite.errors import OutOfBoundsError, RelaxliteError
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, Sample, all_ops
from tests.ir.ops.test_conformance import dims_of, draw, legalize, operand_dtypes, sample_module, sample_symbols

BASE = 3  # of what is symbolic in the sample
# Ops that only decompositions of ours emit, with operands whose sizes follow from one another
INTERNAL = ("phase_interleave", "unique_fill")
LONG = ("conv_integer", "qlinear_conv", "roi_align", "conv", "gated_linear_attention", "state_convolution")
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{k}", marks=[pytest.mark.exhaustive] if k >= most else [])
    for op in all_ops()
    if op.name not in INTERNAL
    for most in [1 if op.name in LONG else 4]
    for k, sample in enumerate(op.samples())
]


def taken_apart(sample: Sample, *, with_constants: bool) -> tuple[Sample, dict[str, int]]:
    """The sample with a symbol for each dimension of a tensor, or for each that has one; and sizes that fit."""
    known = dict.fromkeys(sample_symbols(sample), BASE)
    shapes, sizes = [], dict(known)
    for k, (shape, dtype) in enumerate(zip(sample.shapes, operand_dtypes(sample), strict=True)):
        if dtype == "shape":
            shapes.append(shape)
            continue
        dims = dims_of(shape, known)
        names: list[int | str] = list(shape)
        for axis, dim in enumerate(shape):
            if with_constants or isinstance(dim, str):
                names[axis] = f"x{k}_{axis}"
        sizes |= {name: size for name, size in zip(names, dims, strict=True) if isinstance(name, str)}
        shapes.append(tuple(names))
    return replace(sample, shapes=tuple(shapes)), sizes


def apart(op: Op, sample: Sample) -> tuple[IRModule, Sample, dict[str, int]] | None:
    """Its loops; None where the op needs to know more."""
    for with_constants in (True, False):
        made, sizes = taken_apart(sample, with_constants=with_constants)
        try:
            return legalize(sample_module(op, made)), made, sizes
        except (RelaxliteError, TypeError):  # a type rule, or an attribute of as many values as a constant says
            continue
    return None


def others(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    yield sizes
    for name, size in sizes.items():
        yield from ({**sizes, name: other} for other in (size + 1, size - 1, 2, 1, 0) if other >= 0 and other != size)


def arguments(made: Sample, sizes: dict[str, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = [np.zeros([sizes[name] for name in sample_symbols(made)], bool)]
    for k, (shape, dtype) in enumerate(zip(made.shapes, operand_dtypes(made), strict=True)):
        if dtype != "shape":
            dims = dims_of(shape, sizes)
            try:
                data = made.make[k](dims, rng) if k in made.make else draw(dims, dtype, rng)
            except ValueError:  # no such data of this size
                data = np.zeros(dims)
            arrays.append(np.asarray(data).astype(dtypes.to_numpy(dtype)))
    return arrays


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_loops_stay_inside_of_operands_of_any_size(op: Op, sample: Sample) -> None:
    found = apart(op, sample)
    if found is None:
        pytest.skip("the op has to know these sizes")
    module, made, sizes = found
    run = Interpreter(module)
    for changed in others(sizes):
        try:
            run.run("main", *arguments(made, changed))
        except OutOfBoundsError as error:
            pytest.fail(f"{op.name} of {made.shapes} with {dict(changed.items() - sizes.items())}: {error}")
        except RelaxliteError:  # refused
            assert changed is not sizes, "sizes that fit must run"
        except ValueError as error:  # NumPy's, of a result whose size would be negative
            assert "negative dimensions" in str(error)


def test_sizes_that_differ_are_noticed_by_this_test() -> None:
    """The samples run apart, and most of the ops that have several operands refuse some sizes."""
    found = {op.name: apart(op, next(iter(op.samples()))) for op in all_ops() if list(op.samples())}
    assert sum(made is not None for made in found.values()) > 0.8 * len(found)
    module, made, sizes = found["reverse_sequence"]  # type: ignore[misc]
    with pytest.raises(RelaxliteError, match="one value per sequence"):
        Interpreter(module).run("main", *arguments(made, {**sizes, "x1_0": 2}))
