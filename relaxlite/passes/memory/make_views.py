"""Replace copies of contiguous ranges by views: slices and splits of leading dimensions, a gather of one index.

    y = call(slice, x)        =>        y = memory.part(x, shape(offset), shape(n, m))        no kernel, no memory

Contiguity is derived from the loops (contiguous.py), so that fused programs qualify too. Results of a body keep their
kernel, as they must own their memory. A view extends the lifetime of all of x: where x is much larger than the view and
would otherwise be dead, the copy stays.
"""

from __future__ import annotations

from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import CONCATENATES
from relaxlite.ir.expr import Attrs, Body, Call, Expr, Function, GlobalVar, ShapeValue, Tuple, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import product, substitute
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, bodies
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.contiguous import (
    CopiedRange,
    CopiedRanges,
    concatenated_inputs,
    copied_range,
    copied_ranges,
)
from relaxlite.passes.memory.aliases import Aliases, Root, find_aliases

MAX_FREE_STEPS = 2  # lifetime of a view, in steps, up to which its source may be of any size
MAX_RETAINED_RATIO = 4  # of source size to view size, for longer lifetimes
_ANALYZER = Analyzer()


def make_views(module: IRModule, context: PassContext) -> IRModule:
    """Replace copies of contiguous ranges by views, and mark contiguous concatenations for join_parts."""
    copied = {name: copied_ranges(program) for name, program in module.programs().items()}
    ranges = {name: copied_range(program, copied[name]) for name, program in module.programs().items()}
    definitions: dict[str, Definition] = dict(module)
    definitions.update({name: _with_joins(program, copied[name]) for name, program in module.programs().items()})
    for name, function in module.functions().items():
        definitions[name] = _MakeViews(module, context, ranges, function).function(function)
    return module.updated(definitions)


def _with_joins(program: TensorProgram, copied: CopiedRanges) -> TensorProgram:
    """The program with the attribute CONCATENATES if it concatenates contiguous ranges."""
    inputs = concatenated_inputs(program, copied)
    if inputs is None:
        return program
    places = tuple(program.inputs.index(x) for x in inputs)
    return replace(program, attrs=Attrs({**program.attrs, CONCATENATES: places}))


class _MakeViews(Rewriter):
    """Rewriter of calls of copying programs in one function."""

    def __init__(
        self, module: IRModule, context: PassContext, ranges: dict[str, CopiedRange | str | None], function: Function
    ) -> None:
        super().__init__()
        self._module, self._context, self._ranges = module, context, ranges
        self._aliases = find_aliases(function, module)
        self._result_roots = {root for body in bodies(function) for root in _results(body, self._aliases)}

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        program, result = self._module[value.callee.name], self._ranges.get(value.callee.name)
        if not isinstance(program, TensorProgram) or result is None or len(value.args) != len(program.inputs):
            return None
        if isinstance(result, str):
            self._context.decide("make_views", f"{var.name} of {value.callee.name}", False, result)
            return None
        x = value.args[program.inputs.index(result.source)]
        assert isinstance(var.ty, TensorType) and var.ty.shape is not None
        nbytes = product(var.ty.shape) * dtypes.itemsize(var.ty.dtype)
        reason = self._obstacle(var, x)
        subject = f"{var.name} of {value.callee.name} in {getattr(x, 'name', None) or 'a constant'}"
        text = reason or "it is a contiguous range: nothing is copied"
        self._context.decide("make_views", subject, reason is None, text, bytes=nbytes)
        if reason is not None:
            return None
        at = dict(zip(program.symbols, value.sym_args, strict=True))
        start = substitute(result.start, at) * dtypes.itemsize(var.ty.dtype)
        return get_op("memory.part")(x, ShapeValue((start,)), ShapeValue(var.ty.shape), dtype=var.ty.dtype)

    def _obstacle(self, var: Var, x: Expr) -> str | None:
        """Reason for keeping the copy, or None."""
        if var in self._result_roots:
            return "it is a result, which has memory of its own"
        assert isinstance(x.ty, TensorType) and isinstance(var.ty, TensorType)
        roots = self._aliases.roots(x)
        last_uses = [self._aliases.last_use(root) for root in roots if isinstance(root, Var)]
        own_last_use = self._aliases.last_use(var)
        is_local = all(isinstance(root, Var) and self._aliases.step(root) >= 0 for root in roots)
        if (
            not is_local
            or max(last_uses, default=own_last_use) >= own_last_use
            or own_last_use - self._aliases.step(var) <= MAX_FREE_STEPS
        ):
            return None
        size, retained = (product(ty.shape or ()) * dtypes.itemsize(ty.dtype) for ty in (var.ty, x.ty))
        if _ANALYZER.can_prove_lt(size * MAX_RETAINED_RATIO, retained):
            return f"it would keep alive the {retained} bytes that it is a small part of"
        return None


def _results(body: Body, aliases: Aliases) -> list[Root]:
    """Roots of the results of a body."""
    fields = body.result.fields if isinstance(body.result, Tuple) else (body.result,)
    return [root for field in fields for root in aliases.roots(field)]
