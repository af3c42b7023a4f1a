"""Updates in place: a copy of a tensor of which some elements are replaced needs no copy where the original dies.

    y = call(scatter, x, places, values)      =>      call(scatter_in_place, places, values, x)      y is x from here on

What counts as an update, the loops say: a nest that copies an input to an output, and others that store into it and do
not read it. Other outputs stay: `t = call(scan, x, pool)` becomes `t = (call(scan_in_place, x, pool), pool)`. The
original may be overwritten where nothing reads its memory later (aliases.py), and the function has
made it, or was given it for good: parameters that its attribute `donated` names, by their numbers. The last results of
such a function are the new contents of these, in their order. This pass sees to it that they end in the callers' memory
and drops the results: `main(x, cache) -> (y, new cache)` becomes `main(x, cache) -> y`. An update that cannot be in
place, as the old contents are read later, is copied there at the end.

A call that fails may have overwritten donated memory; the interpreter runs it again on what is there. So an update must
not read what it replaces: values that are stored come from other operands, or, where the op says so, from what it has
read of the same one before it writes there (attribute READS_APART; no check depends on it).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from relaxlite.errors import PassError
from relaxlite.ir.attributes import DONATED, READS_APART, WRITES_INPUTS
from relaxlite.ir.expr import Attrs, Call, Expr, Function, GlobalVar, Let, Tuple, TupleGetItem, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Buffer, Check, Load, Stmt, TensorProgram, compute, seq
from relaxlite.ir.program_visitor import Substitute, loads, program_symbols, stores
from relaxlite.ir.types import UNIT, TensorType, TupleType
from relaxlite.ir.visitor import Rewriter
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.pattern import injective_store, perfect_nest, top_stages
from relaxlite.passes.memory.aliases import Aliases, find_aliases


def donated_params(function: Function) -> tuple[Var, ...]:
    """The parameters that the function takes over; as many of its last results are their new contents."""
    numbers = function.attrs.get(DONATED, ())
    assert isinstance(numbers, tuple)
    return tuple(function.params[k] for k in numbers)  # type: ignore[index]


def donate(module: IRModule, context: PassContext) -> IRModule:
    """Updates of what dies happen in place, and donated parameters hold their new contents at the end."""
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    originals = {name: update for name, p in module.programs().items() if (update := update_of(p)) is not None}
    for name, function in module.functions().items():
        if originals or donated_params(function):
            rewriter = _Donate(module, context, table, originals, function)
            definitions[name] = rewriter.donated(rewriter.function(function))
    return module.updated(definitions)


class Update(NamedTuple):
    """The number of an input, and of the output that is a copy of it with some elements replaced."""

    input: int
    output: int


def update_of(program: TensorProgram) -> Update | None:
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    store = injective_store(perfect_nest(stages[0])) if len(stages) > 1 else None
    if store is None or store.buffer not in program.outputs or not isinstance(store.value, Load):
        return None
    source, out = store.value.buffer, store.buffer
    if store.value.indices != store.indices or source not in program.inputs or source.shape != out.shape:
        return None
    rest, unread = seq(*stages[1:]), (out,) if program.attrs.get(READS_APART) else (source, out)
    if any(load.buffer in unread for load in loads(rest)):
        return None
    if any(s.buffer in program.inputs or (s.buffer is out and s.combine is not None) for s in stores(rest)):
        return None
    return Update(program.inputs.index(source), program.outputs.index(out))


def _in_place(program: TensorProgram, update: Update) -> TensorProgram:
    """The program without the copy: (other inputs..., the tensor that is updated, other outputs...)."""
    stages = list(top_stages(program))
    copy = next(k for k, s in enumerate(stages) if not isinstance(s, Check))
    source, out = program.inputs[update.input], program.outputs[update.output]
    kept = Substitute(buffers={source: out}).stmt(seq(*stages[:copy], *stages[copy + 1 :]))
    others = tuple(b for b in program.outputs if b is not out)
    params = (*(b for b in program.inputs if b is not source), out, *others)
    attrs = Attrs({**program.attrs, WRITES_INPUTS: True})
    return replace(program, params=params, body=kept, num_outputs=len(others), attrs=attrs)


class _Donate(Rewriter):
    def __init__(
        self,
        module: IRModule,
        context: PassContext,
        table: ProgramTable,
        originals: dict[str, Update],
        function: Function,
    ) -> None:
        super().__init__()
        self._module, self._context, self._table, self._originals = module, context, table, originals
        self._aliases: Aliases = find_aliases(function, module)
        self._given = donated_params(function)
        self._fields: dict[Expr, tuple[Expr, ...]] = {}  # of calls with several results
        self._others: list[Expr] = []  # of these, what is not updated: new memory

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if isinstance(value, TupleGetItem) and value.value in self._fields:
            return self._fields[value.value][value.index]
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        update, name = self._originals.get(value.callee.name), value.callee.name
        program = self._module[name]
        if update is None or not isinstance(program, TensorProgram) or len(value.args) != len(program.inputs):
            return None
        number = update.input
        x = self._before(var, number)
        reason = self._obstacle(var, x, update)
        self._context.decide("donate", f"{var.name} of {name} in {getattr(x, 'name', 'a constant')}", reason is None,
                             reason or "nothing reads the old contents later")  # fmt: skip
        if reason is not None:
            return None
        callee = self._table.add(f"{name}_in_place", _in_place(program, update))
        target = value.args[number]
        args = (*(arg for k, arg in enumerate(value.args) if k != number), target)
        if not isinstance(value.ty, TupleType):
            self.bb.emit(Call(callee, args, value.attrs, value.sym_args, UNIT, value.loc), "_")
            return target
        types = tuple(ty for k, ty in enumerate(value.ty.fields) if k != update.output)
        ty = types[0] if len(types) == 1 else TupleType(types)
        whole = self.bb.emit(Call(callee, args, value.attrs, value.sym_args, ty, value.loc), var.name)
        others = [whole] if len(types) == 1 else [self.bb.emit(TupleGetItem(whole, k)) for k in range(len(types))]
        self._others += others
        self._fields[var] = (*others[: update.output], target, *others[update.output :])
        return Tuple(self._fields[var])

    def _before(self, var: Var, number: int) -> Expr:
        """The operand as the function had it, by whose name alias sets know it."""
        binding = self._aliases.steps[self._aliases.step(var)]
        assert isinstance(binding, Let) and isinstance(binding.value, Call)
        return binding.value.args[number]

    def _obstacle(self, var: Var, x: Expr, update: Update) -> str | None:
        """Why the update cannot be in place, or None."""
        ty = var.ty.fields[update.output] if isinstance(var.ty, TupleType) else var.ty
        if not isinstance(x, Var) or x.ty != ty:
            return "the original is a constant, or of another type"
        step, roots = self._aliases.step(var), self._aliases.roots(x)
        is_given = len(roots) == 1 and roots[0] in self._given
        if not is_given and not self._aliases.dies_at(x, var):
            return f"'{x.name}' is read later, or is not this function's to overwrite"
        if is_given and self._aliases.last_use(roots[0]) > step:
            return f"'{x.name}' is read later"
        call = self._aliases.steps[step].value  # type: ignore[union-attr]
        assert isinstance(call, Call)
        others = (arg for k, arg in enumerate(call.args) if k != update.input)
        if any(self._aliases.may_alias(x, arg) for arg in others):
            return f"another operand shares the memory of '{x.name}'"
        return None

    def donated(self, function: Function) -> Function:
        """The function without the results that are in the callers' memory, which they are copied to where need be."""
        if not self._given:
            return function
        result = function.body.result
        fields = result.fields if isinstance(result, Tuple) else (result,)
        kept, new = fields[: -len(self._given)], fields[-len(self._given) :]
        known = [field for field in kept if field not in self._others]
        if any(root in self._given for field in known for root in self._aliases.roots(field)):
            raise PassError("a result lies in the memory of a donated parameter, which is overwritten")
        with self.bb.body() as scope:
            for binding in function.body.bindings():
                self.bb.append(binding)
            for param, value in zip(self._given, new, strict=True):
                if value is not param:
                    self._copy_back(param, value)
            self.bb.result(kept[0] if len(kept) == 1 else Tuple(kept))
        return replace(function, body=self.bb.finish(scope))

    def _copy_back(self, param: Var, value: Expr) -> None:
        if value in self._given:
            raise PassError(f"the new contents of '{param.name}' are the old ones of another donated parameter")
        assert isinstance(param.ty, TensorType) and param.ty.shape is not None
        source, out = (Buffer(name, param.ty.shape, param.ty.dtype) for name in ("x", "out"))
        body: Stmt = compute(out, lambda *i: source[i])
        params = (source, out)
        symbols = program_symbols(params, body)
        program = TensorProgram(params, symbols, body, 0, Attrs({WRITES_INPUTS: True}))
        self._context.decide(
            "donate", param.name, False, "its new contents are computed elsewhere and copied at the end"
        )
        self.bb.emit(Call(self._table.add("copy_in_place", program), (value, param), sym_args=symbols, ty=UNIT), "_")
