"""Library calls where they pay: what matches a rule becomes a program that calls the routine.

    y = matmul(a, b)    =>    y = call(P, a, b)   with   P:  if m <= 1 and library_found("openblas", "cblas_sgemv"):
                                                                 call_library("openblas", "cblas_sgemv", ...)
                                                             else: the loops of matmul

The loops say what the routine computes. They are what runs outside of the range that the rule is for, and where the
library is not there. The program is opaque to fusion; around it the graph goes on as ever. `relaxlite.register_library`
adds rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Block, Body, Call, Constant, Expr, Function, Let, TupleGetItem, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.pattern import Match, Matcher
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    CallLibrary,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    LibraryFound,
    Seq,
    Stmt,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, loads, program_symbols
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.ir.types import TensorType, TupleType, Type
from relaxlite.ir.visitor import Rewriter
from relaxlite.passes.eliminate import eliminate_dead
from relaxlite.passes.fuse_ops import fuse_ops
from relaxlite.passes.fuse_programs import fuse_programs
from relaxlite.passes.legalize import ProgramTable, legalize
from relaxlite.passes.library_rules import OUT, LibraryRule, can_hold, remaining_compares
from relaxlite.passes.loop_pattern import top_stages
from relaxlite.passes.manager import PassContext

_INT32_MAX = 2**31 - 1


def dispatch(module: IRModule, context: PassContext) -> IRModule:
    """Chains of ops that a rule of `context.libraries` matches become programs that call the rule's routine."""
    if not context.libraries:
        return module
    module = eliminate_dead(module)  # so that what nothing uses does not count as a use
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    for name, function in module.functions().items():
        definitions[name] = _Dispatch(context, table).function(function)
    return eliminate_dead(module.updated(definitions))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A rule that fits a place of the graph."""

    rule: LibraryRule
    found: Match
    dims: Mapping[str, SymExpr]


@dataclass(slots=True)
class _Meaning:
    """Loops that compute what was matched, of these operands; in the symbols of the function around."""

    args: tuple[Expr, ...]
    buffers: dict[str, Buffer]  # by the names of the rule
    params: tuple[Buffer, ...]
    num_outputs: int
    checks: tuple[Stmt, ...] = ()
    body: Stmt = field(default_factory=lambda: Seq(()))


class _Dispatch(Rewriter):
    """Chooses first, from the end of the function backwards, so that a pattern of several ops comes before one of a
    part of them; then replaces."""

    def __init__(self, context: PassContext, table: ProgramTable) -> None:
        super().__init__()
        self._context, self._table = context, table
        self._matcher = Matcher({})
        self._analyzer = Analyzer()
        self._chosen: dict[Var, tuple[TensorProgram, str, tuple[Expr, ...]]] = {}

    def function(self, function: Function) -> Function:
        self._matcher = Matcher.of_body(function.body)
        taken: set[Var] = set()
        for var, value in reversed(list(self._matcher.bindings.items())):
            if var not in taken and isinstance(value, Call) and isinstance(value.callee, Op):
                taken.update(self._choose(var, value))
        return super().function(function) if self._chosen else function

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if var not in self._chosen:
            return None
        assert isinstance(value, Call)
        program, name, args = self._chosen[var]
        callee = self._table.add(name, program)
        operands = tuple(map(self.operand, args))
        return Call(callee, operands, sym_args=program.symbols, ty=value.ty, loc=value.loc)

    def _choose(self, var: Var, value: Call) -> tuple[Var, ...]:
        """Decide about the operations that end in a call; gives those that a routine takes over."""
        candidates = self._candidates(var, value)
        if not candidates:
            return ()
        first = candidates[0]
        meaning = self._meaning(first, value)
        if isinstance(meaning, str):
            self._decide(var, first.rule, meaning)
            return ()
        for candidate in candidates:
            figures = {text: candidate.rule.evaluate(text, candidate.dims) for text in candidate.rule.when}
            self._decide(var, candidate.rule, None, **figures)
        self._chosen[var] = _program(candidates, meaning, self._analyzer), first.rule.name, meaning.args
        return first.found.inner

    def _decide(self, var: Var, rule: LibraryRule, problem: str | None, **figures: SymExpr) -> None:
        ranges = [f"{text} {_range_text(limits)}" for text, limits in rule.when.items()]
        where = f"where {', '.join(ranges)}" if ranges else "at all sizes"
        reason = problem or f"{where}: {rule.reason or 'the rule asks for it'}"
        subject = f"{var.name} to {rule.symbol} of {rule.library} ({rule.name})"
        amounts = {text: amount for text, amount in figures.items() if text.replace(" ", "") != str(amount)}
        notes = {name: sym(amount) for name, amount in rule.figures.items()} if problem is None else {}
        self._context.decide("dispatch", subject, problem is None, reason, **amounts, **notes)

    def _candidates(self, var: Var, value: Call) -> list[_Candidate]:
        """The rules that apply, in order, as far as they match the same operations as the first one."""
        assert isinstance(value.callee, Op)
        chosen: list[_Candidate] = []
        refusals: set[str] = set()  # rules of one kind are refused for one reason
        for rule in self._context.libraries or ():
            if value.callee.name not in rule.pattern.root_ops:
                continue
            found = self._matcher.match(rule.pattern, value)
            if found is None or (chosen and set(found.inner) != set(chosen[0].found.inner)):
                continue
            result = value.ty if isinstance(value.ty, TensorType) else None
            dims = rule.dimensions(found, result, self._analyzer)
            problem = dims if isinstance(dims, str) else self._refusal(rule, found, dims, value.ty)
            if problem is not None:
                if problem in refusals:
                    continue
                refusals.add(problem)
                figures = {} if isinstance(dims, str) else {k: rule.evaluate(k, dims) for k in rule.when}
                self._decide(var, rule, problem, **figures)
            elif not isinstance(dims, str):
                chosen.append(_Candidate(rule, found, dims))
                if not _conditions(chosen[-1], self._analyzer):
                    break  # it always applies
        return chosen

    def _refusal(self, rule: LibraryRule, found: Match, dims: Mapping[str, SymExpr], result: Type) -> str | None:
        if not found.is_removable:
            return "a value inside is used elsewhere too"
        types = {name: operand.ty for name, operand in found.captures.items()} | {OUT: result}
        if (wrong := rule.dtype_problem(types)) is not None:
            return wrong
        if rule.check is not None and (reason := rule.check(found)) is not None:
            return reason
        for text, limits in rule.when.items():
            if not can_hold(rule.evaluate(text, dims), limits, self._analyzer):
                return f"{text} is never {_range_text(limits)}, and there it is not worth while"
        return None

    def _meaning(self, candidate: _Candidate, value: Call) -> _Meaning | str:
        """The loops of what was matched: it goes through lowering and fusion as a module of its own."""
        rule, found = candidate.rule, candidate.found
        operands = {name: found[name] for name in rule.operands if not name.startswith(OUT)}
        params = {operand: Var(name, operand.ty) for name, operand in reversed(operands.items())}
        copied = _copy(value, found, self._matcher.bindings, params)
        if isinstance(copied, str):
            return copied
        function = Function(tuple(params.values()), copied)
        scratch = PassContext(self._context.target, verify=False, dump_dir=None)
        lowered = fuse_programs(fuse_ops(legalize(IRModule({"main": function})), scratch))
        main = lowered["main"]
        assert isinstance(main, Function)
        return _composed(main, lowered, {name: (params[operand], operand) for name, operand in operands.items()})


def _copy(value: Call, found: Match, bound: Mapping[Var, Expr], params: Mapping[Expr, Var]) -> Body | str:
    """The matched operations as a body over the parameters; or what it needs beside them."""
    done: dict[Expr, Expr] = dict(params)
    lets: list[Let] = []
    missing: list[str] = []

    def operand(expr: Expr) -> Expr:
        if expr not in done and isinstance(expr, Var):
            if expr in bound and expr in found.inner:
                done[expr] = emit(bound[expr], expr.name)
            else:
                missing.append(expr.name)
        return done.get(expr, expr)

    def emit(expr: Expr, name: str) -> Expr:
        if isinstance(expr, Call):
            expr = replace(expr, args=tuple(map(operand, expr.args)))
        elif isinstance(expr, TupleGetItem):
            expr = TupleGetItem(operand(expr.value), expr.index)
        else:
            return operand(expr)
        lets.append(Let(Var(name, expr.ty), expr))
        return lets[-1].var

    result = emit(value, "out")
    if missing:
        return f"its pattern also matches {missing[0]}, which is no operand of the rule; name it among the operands"
    return Body((Block(tuple(lets)),), result)


class _Compose:
    """The programs that a function of calls consists of, one after the other, as the loops of one program."""

    def __init__(self, module: IRModule) -> None:
        self._module = module
        self.buffers: dict[Expr, Buffer | tuple[Buffer, ...]] = {}
        self.constants: dict[Constant, Buffer] = {}
        self._made: list[Buffer] = []
        self._stmts: list[Stmt] = []

    def add(self, binding: Let) -> str | None:
        """Why this binding cannot be part of a program."""
        value = binding.value
        if isinstance(value, TupleGetItem):
            fields = self.buffers[value.value]
            assert isinstance(fields, tuple)
            self.buffers[binding.var] = fields[value.index]
            return None
        program = self._module.get(value.callee.name) if isinstance(value, Call) else None
        if not isinstance(value, Call) or not isinstance(program, TensorProgram):
            what = value.callee.name if isinstance(value, Call) else type(value).__name__
            return f"{what} is not computed by loops, so there would be nothing to fall back on"
        made = tuple(_buffer(f"{binding.var.name}{k or ''}", ty) for k, ty in enumerate(result_types(value.ty)))
        self.buffers[binding.var] = made if isinstance(value.ty, TupleType) else made[0]
        self._made += made
        passed = [*map(self._operand, value.args), *made]
        symbols = dict(zip(program.symbols, value.sym_args, strict=True))
        renamed = Substitute(symbols, dict(zip(program.params, passed, strict=True)), fresh=True)
        self._stmts += [renamed.stmt(s) for s in top_stages(program)]
        return None

    def _operand(self, expr: Expr) -> Buffer:
        if isinstance(expr, Constant):
            self.buffers[expr] = self.constants.setdefault(expr, _buffer(expr.name or "constant", expr.ty))
        found = self.buffers[expr]
        assert isinstance(found, Buffer)
        return found

    def finish(self, outputs: Sequence[Buffer]) -> tuple[list[Stmt], Stmt]:
        """The checks, which hold for any way to compute it, and the loops."""
        inner = [buffer for buffer in self._made if buffer not in outputs]
        checks: list[Stmt] = [
            s for s in self._stmts if isinstance(s, Check) and not any(load.buffer in inner for load in loads(s))
        ]
        body = seq(*(s for s in self._stmts if s not in checks))
        for buffer in inner:
            body = Allocate(buffer, body)
        return checks, body


def _buffer(name: str, ty: Type) -> Buffer:
    assert isinstance(ty, TensorType) and ty.shape is not None
    return Buffer(name, ty.shape, ty.dtype)


def _composed(main: Function, module: IRModule, operands: Mapping[str, tuple[Var, Expr]]) -> _Meaning | str:
    """`operands`: parameter and argument by the rule's names."""
    compose = _Compose(module)
    inputs: dict[Expr, Buffer] = {
        param: _buffer(name, param.ty) for name, (param, _) in reversed(list(operands.items()))
    }
    compose.buffers.update(inputs)
    for binding in main.body.bindings():
        assert isinstance(binding, Let)
        problem = compose.add(binding)
        if problem is not None:
            return problem
    found = compose.buffers[main.body.result]
    outputs = found if isinstance(found, tuple) else (found,)
    if any(buffer in inputs.values() for buffer in outputs):
        return "it is one of its operands"
    names = [OUT] if len(outputs) == 1 else [f"{OUT}{k}" for k in range(len(outputs))]
    buffers = {name: inputs[param] for name, (param, _) in operands.items()} | dict(zip(names, outputs, strict=True))
    args = {inputs[param]: arg for param, arg in operands.values()} | {b: c for c, b in compose.constants.items()}
    checks, body = compose.finish(outputs)
    return _Meaning(tuple(args.values()), buffers, (*args, *outputs), len(outputs), tuple(checks), body)


def _program(chosen: Sequence[_Candidate], meaning: _Meaning, analyzer: Analyzer) -> TensorProgram:
    """The first routine that is there and whose range holds these sizes; else the loops."""
    body = meaning.body
    for candidate in reversed(chosen):
        rule = candidate.rule
        conditions = _conditions(candidate, analyzer)
        conditions.append(LibraryFound(rule.library, rule.symbol, is_required=not rule.keeps_fallback))
        cond = reduce(lambda a, b: Binary("and", a, b), conditions)
        body = IfThenElse(cond, _call(candidate, meaning, analyzer), body)
    body = seq(*meaning.checks, body)
    return TensorProgram(meaning.params, program_symbols(meaning.params, body), body, meaning.num_outputs)


def _conditions(candidate: _Candidate, analyzer: Analyzer) -> list[Value]:
    """What has to be asked at run time: the rule's range, and whether C's 32 bits hold an argument."""
    rule, dims = candidate.rule, candidate.dims
    ranges = [(rule.evaluate(text, dims), limits) for text, limits in rule.when.items()]
    ranges += [(expr, (None, _INT32_MAX)) for expr in rule.narrow_arguments(dims)]
    compares = [c for expr, limits in ranges for c in remaining_compares(expr, limits, analyzer)]
    return list(
        {
            (expr, op, limit): Compare(op, IndexValue(expr), IndexValue(sym(limit))) for expr, op, limit in compares
        }.values()
    )


def _call(candidate: _Candidate, meaning: _Meaning, analyzer: Analyzer) -> Stmt:
    rule, values = candidate.rule, dict(candidate.dims)
    extents = {name: rule.evaluate(text, candidate.dims) for name, text in rule.loops.items()}
    variables = {name: SymVar(name) for name in extents}
    values.update(variables)
    args = rule.call_arguments(meaning.buffers, values)
    for name, extent in extents.items():
        analyzer = analyzer.with_range(variables[name], 0, extent)
    checks = [
        Check(_at_most(arg.index, _INT32_MAX), f"{rule.symbol}: an argument of {arg.index} does not fit 32 bits")
        for arg in args
        if isinstance(arg, IndexValue)
        and arg.dtype == "int32"
        and _varies(arg.index, variables)
        and remaining_compares(arg.index, (None, _INT32_MAX), analyzer)
    ]
    call = CallLibrary(rule.library, rule.symbol, args, rule.convention, rule.evaluate(rule.work, values))
    body = seq(*checks, call)
    for number, (name, extent) in reversed(list(enumerate(extents.items()))):
        body = For(variables[name], extent, body, "serial" if number else "parallel")
    return body


def _varies(expr: SymExpr, variables: Mapping[str, SymVar]) -> bool:
    return any(var in variables.values() for var in expr.free_vars())


def _at_most(expr: SymExpr, limit: int) -> Value:
    return Compare("le", IndexValue(expr), IndexValue(sym(limit)))


def _range_text(limits: tuple[int | None, int | None]) -> str:
    low, high = limits
    if low == high:
        return str(low)
    return f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
