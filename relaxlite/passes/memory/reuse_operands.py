"""In-place results: a result reuses the memory of an operand that dies at the call, where the program supports it.

    y = memory.alloc_tensor(shape(n, m))          y = memory.part(x, shape(0), shape(n, m))
    call(add_relu, x, b, y)                =>     call(add_relu, x, b, y)              x is not read any more

The attribute IN_PLACE of a program lists the outputs that may take over inputs (in_place.py). The operand must be
memory that this body has allocated, all of it dead after the call (aliases.py), and no other operand of the call may
overlap it. A result that escapes the body takes over all memory of the operand or none, so that it owns no more than it
needs.
"""

from __future__ import annotations

from dataclasses import field

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import IN_PLACE
from relaxlite.ir.expr import Binding, Body, Call, Expr, GlobalVar, Let, ShapeValue, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, inner_bodies, used_vars
from relaxlite.passes.context import PassContext
from relaxlite.passes.memory.aliases import Aliases, find_aliases
from relaxlite.passes.memory.plan_memory import tensor_bytes
from relaxlite.records import dataclass

_ANALYZER = Analyzer()


def reuse_operands(module: IRModule, context: PassContext) -> IRModule:
    """Place results in the memory of operands that die at the call."""
    definitions: dict[str, Definition] = dict(module)
    for name, function in module.functions().items():
        result = _FindOperands(module, context, find_aliases(function, module))
        result.body(function.body)
        definitions[name] = _TakeOver(result.operand_of).function(function)
    return module.updated(definitions)


@dataclass(slots=True)
class _Memory:
    """Allocations of one body: `fresh` without any use so far, `used` with uses."""

    fresh: set[Var] = field(default_factory=set)
    used: set[Var] = field(default_factory=set)


class _FindOperands:
    """Select the operand, if any, whose memory each result takes over."""

    def __init__(self, module: IRModule, context: PassContext, aliases: Aliases) -> None:
        self._module, self._context, self._aliases = module, context, aliases
        self.operand_of: dict[Var, Var] = {}  # allocation of a result -> operand whose memory it reuses
        self._taken: dict[Var, Var] = {}  # allocation -> allocation whose memory it reuses

    def body(self, body: Body) -> None:
        memory = _Memory()
        for binding in body.bindings():
            self._binding(binding, memory)

    def _binding(self, binding: Binding, memory: _Memory) -> None:
        value = binding.value if isinstance(binding, Let) else binding.source
        for inner in inner_bodies(value):
            self.body(inner)
        if isinstance(value, Call) and isinstance(value.callee, GlobalVar):
            program = self._module[value.callee.name]
            if isinstance(program, TensorProgram) and len(value.args) == len(program.params):
                self._call(binding.var, value, program, memory)
        newly_used = memory.fresh.intersection(root for var in used_vars(value) for root in self._aliases.roots(var))
        memory.fresh -= newly_used
        memory.used |= newly_used
        if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "memory.alloc_tensor":
            memory.fresh.add(binding.var)

    def _call(self, at: Var, call: Call, program: TensorProgram, memory: _Memory) -> None:
        pairs = program.attrs.get(IN_PLACE, ())
        assert isinstance(pairs, tuple) and isinstance(call.callee, GlobalVar)
        used: set[Var] = set()
        for input_number, output_number in pairs:  # type: ignore[misc, str-unpack]
            x, out = call.args[input_number], call.args[output_number]  # type: ignore[index]
            if not isinstance(x, Var) or not isinstance(out, Var) or x in used or out in self.operand_of:
                continue
            reason = self._obstacle(at, call, x, out, memory)
            self._decide(call.callee.name, x, out, reason)
            owner = self._owner(x)
            if reason is None and owner is not None:
                used.add(x)
                self.operand_of[out] = x
                self._taken[out] = owner

    def _decide(self, name: str, x: Var, out: Var, reason: str | None) -> None:
        assert isinstance(out.ty, TensorType)
        text = reason or f"'{x.name}' is not read any more, and each element is read before it is written"
        self._context.decide(
            "reuse_operands", f"{out.name} of {name} in {x.name}", reason is None, text, bytes=tensor_bytes(out.ty)
        )

    def _obstacle(self, at: Var, call: Call, x: Var, out: Var, memory: _Memory) -> str | None:
        """Reason against reusing the operand's memory, or None."""
        roots = self._aliases.roots(x)
        if out not in memory.fresh or self._aliases.step(x) > self._aliases.step(out):
            return "the result is not allocated for this call alone"
        if len(roots) != 1 or roots[0] not in memory.used:
            return f"'{x.name}' may lie in memory that was not allocated in the same body: an argument, a constant"
        if not self._aliases.dies_at(x, at):
            return f"'{x.name}' is read later"
        owner = self._owner(x)
        assert owner is not None
        if sum(self._owner(arg) is owner for arg in call.args if isinstance(arg, Var)) > 1:
            return f"another operand shares the memory of '{x.name}'"
        if not self._fits(out, x):
            return f"it is not proven that the result is not larger than '{x.name}'"
        escapes = self._aliases.last_use(out) >= self._aliases.end
        if escapes and not self._fills(out, owner):
            return f"the result leaves the function, and '{x.name}' is only a part of its memory"
        return None

    def _owner(self, var: Var) -> Var | None:
        """The allocation in which the variable lies; None if unknown."""
        roots = self._aliases.roots(var)
        root = roots[0] if len(roots) == 1 and isinstance(roots[0], Var) else None
        while root is not None and root in self._taken:
            root = self._taken[root]
        return root

    def _fits(self, out: Var, x: Var) -> bool:
        """Whether the result provably fits into the operand."""
        assert isinstance(out.ty, TensorType) and isinstance(x.ty, TensorType)
        size, capacity = tensor_bytes(out.ty), tensor_bytes(x.ty)
        return size is capacity or _ANALYZER.can_prove_le(size, capacity)

    def _fills(self, out: Var, x: Var) -> bool:
        """Whether the result provably has the size of the allocation."""
        assert isinstance(out.ty, TensorType) and isinstance(x.ty, TensorType)
        size, capacity = tensor_bytes(out.ty), tensor_bytes(x.ty)
        return size is capacity or _ANALYZER.can_prove_equal(size, capacity)


class _TakeOver(Rewriter):
    """Replace allocations of results by parts of operands."""

    def __init__(self, operand_of: dict[Var, Var]) -> None:
        super().__init__()
        self._operand_of = operand_of

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if var not in self._operand_of:
            return None
        assert isinstance(var.ty, TensorType) and var.ty.shape is not None
        x, start, shape = self._operand_of[var], ShapeValue((sym(0),)), ShapeValue(var.ty.shape)
        return get_op("memory.part")(x, start, shape, dtype=var.ty.dtype)
