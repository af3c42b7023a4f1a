"""In-place updates: copying a tensor and replacing some elements needs no copy where the original is dead.

    y = call(scatter, x, places, values)      =>      call(scatter_in_place, places, values, x)      y is x from here on

Updates are recognized by their loops: a nest that copies an input to an output, and others that store to the output and
do not read it. Other outputs stay: `t = call(scan, x, pool)` becomes `t = (call(scan_in_place, x, pool), pool)`. The
original may be overwritten where nothing reads its memory later (aliases.py) and the function owns it: memory that it
allocated, or donated parameters, which its attribute `donated` lists by number. The last results of such a function are
the new contents of the donated parameters, in order. This pass places them in the callers' memory and drops the
results: `main(x, cache) -> (y, new cache)` becomes `main(x, cache) -> y`. New contents that cannot be computed in
place, as the old contents are read later, are copied at the end.

A failed call may have overwritten donated memory; the interpreter repeats the call on the overwritten memory. So an
update must not read what it replaces: stored values come from other operands, or, where the op declares it, from
elements of the same operand that were read before they are written (attribute READS_APART; no check depends on it).
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
    """Return the donated parameters of a function; as many of its last results are their new contents."""
    numbers = function.attrs.get(DONATED, ())
    assert isinstance(numbers, tuple)
    return tuple(function.params[k] for k in numbers)  # type: ignore[index]


def donate(module: IRModule, context: PassContext) -> IRModule:
    """Make updates of dead tensors in place, and store the new contents of donated parameters in their memory."""
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    originals = {name: update for name, p in module.programs().items() if (update := update_of(p)) is not None}
    for name, function in module.functions().items():
        if originals or donated_params(function):
            rewriter = _Donate(module, context, table, originals, function)
            definitions[name] = rewriter.donated(rewriter.function(function))
    return module.updated(definitions)


class Update(NamedTuple):
    """The position of an input, and of the output that is a copy of it with some elements replaced."""

    input: int
    output: int


def update_of(program: TensorProgram) -> Update | None:
    """Match a program as an update of one of its inputs; None: no match."""
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
    """Return the program without the copy; parameters: (other inputs..., the updated tensor, other outputs...)."""
    stages = list(top_stages(program))
    copy = next(k for k, s in enumerate(stages) if not isinstance(s, Check))
    source, out = program.inputs[update.input], program.outputs[update.output]
    body = Substitute(buffers={source: out}).stmt(seq(*stages[:copy], *stages[copy + 1 :]))
    other_outputs = tuple(b for b in program.outputs if b is not out)
    params = (*(b for b in program.inputs if b is not source), out, *other_outputs)
    attrs = Attrs({**program.attrs, WRITES_INPUTS: True})
    return replace(program, params=params, body=body, num_outputs=len(other_outputs), attrs=attrs)


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
        self._donated = donated_params(function)
        self._fields: dict[Expr, tuple[Expr, ...]] = {}  # of calls with several results
        self._new_results: list[Expr] = []  # results of such calls in new memory

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
        x = self._original_operand(var, number)
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
        results = [whole] if len(types) == 1 else [self.bb.emit(TupleGetItem(whole, k)) for k in range(len(types))]
        self._new_results += results
        self._fields[var] = (*results[: update.output], target, *results[update.output :])
        return Tuple(self._fields[var])

    def _original_operand(self, var: Var, number: int) -> Expr:
        """Return the operand before rewriting, whose name the alias analysis knows."""
        binding = self._aliases.steps[self._aliases.step(var)]
        assert isinstance(binding, Let) and isinstance(binding.value, Call)
        return binding.value.args[number]

    def _obstacle(self, var: Var, x: Expr, update: Update) -> str | None:
        """Return why the update cannot be in place; None: it can."""
        ty = var.ty.fields[update.output] if isinstance(var.ty, TupleType) else var.ty
        if not isinstance(x, Var) or x.ty != ty:
            return "the original is a constant, or of another type"
        step, roots = self._aliases.step(var), self._aliases.roots(x)
        is_donated = len(roots) == 1 and roots[0] in self._donated
        if not is_donated and not self._aliases.dies_at(x, var):
            return f"'{x.name}' is read later, or is not this function's to overwrite"
        if is_donated and self._aliases.last_use(roots[0]) > step:
            return f"'{x.name}' is read later"
        call = self._aliases.steps[step].value  # type: ignore[union-attr]
        assert isinstance(call, Call)
        other_args = (arg for k, arg in enumerate(call.args) if k != update.input)
        if any(self._aliases.may_alias(x, arg) for arg in other_args):
            return f"another operand shares the memory of '{x.name}'"
        return None

    def donated(self, function: Function) -> Function:
        """Drop the results that are new contents of donated parameters, and copy them to the parameters where
        needed."""
        if not self._donated:
            return function
        result = function.body.result
        fields = result.fields if isinstance(result, Tuple) else (result,)
        remaining, new_contents = fields[: -len(self._donated)], fields[-len(self._donated) :]
        old_results = [field for field in remaining if field not in self._new_results]
        if any(root in self._donated for field in old_results for root in self._aliases.roots(field)):
            raise PassError("a result lies in the memory of a donated parameter, which is overwritten")
        with self.bb.body() as scope:
            for binding in function.body.bindings():
                self.bb.append(binding)
            for param, value in zip(self._donated, new_contents, strict=True):
                if value is not param:
                    self._copy_back(param, value)
            self.bb.result(remaining[0] if len(remaining) == 1 else Tuple(remaining))
        return replace(function, body=self.bb.finish(scope))

    def _copy_back(self, param: Var, value: Expr) -> None:
        if value in self._donated:
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
