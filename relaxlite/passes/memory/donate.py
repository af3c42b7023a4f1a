"""In-place updates: a copy with some elements replaced reuses the memory of a dead original.

    y = call(scatter, x, places, values)      =>      call(scatter_in_place, places, values, x)      y is x from here on

The loops define an update: one nest copies an input to an output, and later nests store to the output without reading
it. Other outputs stay: `t = call(scan, x, pool)` becomes `t = (call(scan_in_place, x, pool), pool)`. The original may
be overwritten where its memory is dead afterwards (aliases.py) and the function owns it: the function allocated it, or
its attribute `donated` lists the number of the parameter. The last results of such a function are the new contents of
its donated parameters, in order. This pass places them in the memory of the caller and drops these results: `main(x,
cache) -> (y, new cache)` becomes `main(x, cache) -> y`. Where an update cannot be in place, as the old contents are
read later, the new contents are copied back at the end.

A call that fails may have overwritten donated memory; the interpreter then runs it again on the present contents. So an
update must not read the elements that it replaces: stored values come from other operands or, with the attribute
READS_APART of the op, from elements read before they are overwritten; no check depends on them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from relaxlite.errors import PassError
from relaxlite.ir.attributes import DONATED, READS_APART, WRITES_INPUTS
from relaxlite.ir.expr import NO_ATTRS, Attrs, Call, Expr, Function, GlobalVar, Let, Tuple, TupleGetItem, Var
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
    """Parameters whose memory the function owns. As many of its last results are their new contents."""
    numbers = function.attrs.get(DONATED, ())
    assert isinstance(numbers, tuple)
    return tuple(function.params[k] for k in numbers)  # type: ignore[index]


def donate(module: IRModule, context: PassContext) -> IRModule:
    """Update dead tensors in place, and store the new contents of donated parameters in their memory."""
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    originals = {name: update for name, p in module.programs().items() if (update := match_update(p)) is not None}
    for name, function in module.functions().items():
        if originals or donated_params(function):
            rewriter = _Donate(module, context, table, originals, function)
            definitions[name] = rewriter.donated(rewriter.function(function))
    return module.updated(definitions)


class Update(NamedTuple):
    """Numbers of an input and of the output that is a copy of the input with some elements replaced."""

    input: int
    output: int


def match_update(program: TensorProgram) -> Update | None:
    """Match a program that copies an input to an output and then stores to it; None for other programs."""
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    store = injective_store(perfect_nest(stages[0])) if len(stages) > 1 else None
    if store is None or store.buffer not in program.outputs or not isinstance(store.value, Load):
        return None
    source, out = store.value.buffer, store.buffer
    if store.value.indices != store.indices or source not in program.inputs or source.shape != out.shape:
        return None
    rest, forbidden = seq(*stages[1:]), (out,) if program.attrs.get(READS_APART) else (source, out)
    if any(load.buffer in forbidden for load in loads(rest)):
        return None
    if any(s.buffer in program.inputs or (s.buffer is out and s.combine is not None) for s in stores(rest)):
        return None
    return Update(program.inputs.index(source), program.outputs.index(out))


def _in_place(program: TensorProgram, update: Update) -> TensorProgram:
    """The program without the copy, with parameters (other inputs..., updated tensor, other outputs...)."""
    stages = list(top_stages(program))
    copy = next(k for k, s in enumerate(stages) if not isinstance(s, Check))
    source, out = program.inputs[update.input], program.outputs[update.output]
    body = Substitute(buffers={source: out}).stmt(seq(*stages[:copy], *stages[copy + 1 :]))
    others = tuple(b for b in program.outputs if b is not out)
    params = (*(b for b in program.inputs if b is not source), out, *others)
    attrs = Attrs({**program.attrs, WRITES_INPUTS: True})
    return replace(program, params=params, body=body, num_outputs=len(others), attrs=attrs)


class _Donate(Rewriter):
    """Rewriter of calls of updates in one function."""

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
        self._donated_params = donated_params(function)
        self._fields: dict[Expr, tuple[Expr, ...]] = {}  # results of calls with several outputs
        self._new_memory: list[Expr] = []  # outputs of these calls in new memory

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
        result = self.bb.emit(Call(callee, args, value.attrs, value.sym_args, ty, value.loc), var.name)
        new_outputs = (
            [result] if len(types) == 1 else [self.bb.emit(TupleGetItem(result, k)) for k in range(len(types))]
        )
        self._new_memory += new_outputs
        self._fields[var] = (*new_outputs[: update.output], target, *new_outputs[update.output :])
        return Tuple(self._fields[var])

    def _original_operand(self, var: Var, number: int) -> Expr:
        """The operand before rewriting, under the name that the alias sets hold."""
        binding = self._aliases.steps[self._aliases.step(var)]
        assert isinstance(binding, Let) and isinstance(binding.value, Call)
        return binding.value.args[number]

    def _obstacle(self, var: Var, x: Expr, update: Update) -> str | None:
        """Reason against the update in place, or None."""
        ty = var.ty.fields[update.output] if isinstance(var.ty, TupleType) else var.ty
        if not isinstance(x, Var) or x.ty != ty:
            return "the original is a constant, or of another type"
        step, roots = self._aliases.step(var), self._aliases.roots(x)
        is_donated = len(roots) == 1 and roots[0] in self._donated_params
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
        """The function without the results that lie in donated parameters, which are copied back where necessary."""
        if not self._donated_params:
            return function
        result = function.body.result
        fields = result.fields if isinstance(result, Tuple) else (result,)
        results, new_contents = fields[: -len(self._donated_params)], fields[-len(self._donated_params) :]
        with self.bb.body() as scope:
            for binding in function.body.bindings():
                self.bb.append(binding)
            results = tuple(self._copied(field) if self._is_donated(field) else field for field in results)
            for param, value in zip(self._donated_params, new_contents, strict=True):
                if value is not param:
                    self._copy_back(param, value)
            self.bb.result(results[0] if len(results) == 1 else Tuple(results))
        return replace(function, body=self.bb.finish(scope))

    def _is_donated(self, result: Expr) -> bool:
        """Whether a result lies in the memory of a donated parameter, which later calls overwrite."""
        if result in self._new_memory:
            return False
        return any(root in self._donated_params for root in self._aliases.roots(result))

    def _copied(self, value: Expr) -> Expr:
        """A copy of a result in new memory."""
        assert isinstance(value.ty, TensorType) and value.ty.shape is not None
        source, out = (Buffer(name, value.ty.shape, value.ty.dtype) for name in ("x", "out"))
        body = compute(out, lambda *i: source[i])
        symbols = program_symbols((source, out), body)
        program = TensorProgram((source, out), symbols, body, 1, NO_ATTRS)
        name = getattr(value, "name", "constant")
        self._context.decide("donate", name, False, "a result in donated memory is copied")
        return self.bb.emit(Call(self._table.add("copy", program), (value,), sym_args=symbols, ty=value.ty), name)

    def _copy_back(self, param: Var, value: Expr) -> None:
        if value in self._donated_params:
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
