"""Verifier of modules: rules of functions, and the constructs that each stage of compilation allows.

`verify(module, stage)` raises VerifyError for the first violated rule, with function, rule, binding, source location.
program_verifier.py verifies tensor programs, signatures.py compares types and signatures.

Symbols must be defined before use, in every scope. Parameters of a function define the symbols that are a whole
dimension of their types; parameters of a loop and a MatchShape define those that are new. Definitions in a branch or a
loop body end with it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from relaxlite import dtypes
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import attribute_problem
from relaxlite.ir.expr import (
    Binding,
    Body,
    Call,
    Constant,
    ControlFlow,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.printer import excerpt, print_type
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.program_verifier import verify_program, violation
from relaxlite.ir.signatures import bind_symbols, call_mismatch, dims_of, instantiate, is_destination_passing, mismatch
from relaxlite.ir.simplify import has_many_atoms, num_atoms
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.types import (
    FuncType,
    ShapeType,
    TensorType,
    TupleType,
    Type,
    defined_symbols,
    type_symbols,
)
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Constructs allowed in functions at one stage of compilation.

    `ops`: glob patterns of op names. `calls`: allowed forms of calls of programs and library routines.
    """

    doc: str
    ops: tuple[str, ...]
    calls: tuple[str, ...]  # "value": returns outputs; "dps": outputs are arguments
    is_typed: bool = True  # whether types, symbols and signatures are checked


_RUNTIME_OPS = ("reshape", "tensor_to_shape", "memory.*")
_MAX_ATOMS = 4  # atoms of an expression assumed equal to its symbol: types need no more, and proofs are slow
_VM_OPS = ("tensor_to_shape", "memory.copy", "vm.*")

STAGES: dict[str, Stage] = {
    "graph": Stage("operators, and programs by value", ops=("*",), calls=("value",)),
    "lowered": Stage("programs by value, and what the runtime does itself", ops=_RUNTIME_OPS, calls=("value",)),
    "dps": Stage("programs with explicit outputs, and memory", ops=_RUNTIME_OPS, calls=("dps",)),
    "vm": Stage("slots instead of symbols", ops=_VM_OPS, calls=("dps",), is_typed=False),
}

RULES = {
    "stage": "only what the stage allows (STAGES in ir/verifier.py)",
    "attribute": "attributes are those of ir/attributes.py, with values of their kinds",
    "variable": "a variable is bound once, before it is used, in a scope that contains the use",
    "symbol": "a symbol is defined before it is used, in a scope that contains the use",
    "operand": "operands are variables, constants, shapes and names of definitions; all else is bound to a variable",
    "definition": "a name of a definition is one of the module's",
    "constant": "the type of a constant is that of its elements",
    "type": "a variable has the type of its value",
    "operator": "an op has the operands and attributes that it declares, and the type that it infers",
    "signature": "a call fits what it calls: number, dtypes, ranks and shapes, proven equal",
    "dataflow": "a dataflow block holds no control flow",
    "condition": "a condition is a bool tensor of one element",
    "branch": "both branches yield what the If says",
    "loop": "what enters a loop, and what its body yields, fits its parameters",
    "match": "a MatchShape has its source's dtype and rank, and its own shape",
}


def verify(module: IRModule, stage: str = "graph", known: IRModule | None = None) -> None:
    """Raise VerifyError if the module violates a rule of the stage.

    `known`: a verified module, whose programs are skipped, as all stages have the same rules for programs.
    """
    if stage not in STAGES:
        raise InvalidArgumentError(f"unknown stage {stage!r}; known: {', '.join(STAGES)}")
    if (problem := attribute_problem("module", module.attrs)) is not None:
        raise violation("module", RULES["attribute"], problem, "its attributes")
    for name, definition in module.items():
        if isinstance(definition, TensorProgram):
            if known is None or known.get(name) is not definition:
                verify_program(name, definition)
        elif isinstance(definition, Function):
            _FunctionVerifier(module, name, stage).function(definition)
        elif not 0 <= definition.num_outputs <= len(definition.params):
            message = f"{definition.num_outputs} outputs of {len(definition.params)} parameters"
            raise violation(f"extern {name}", RULES["signature"], message, definition.symbol)


class _FunctionVerifier:
    """Verifier of one function; tracks variables, symbols and equalities of symbols (`_analyzer`) in scope."""

    def __init__(self, module: IRModule, name: str, stage: str) -> None:
        self._module, self._name, self._stage_name, self._stage = module, name, stage, STAGES[stage]
        self._variables: set[Var] = set()
        self._all_bound: set[Var] = set()
        self._symbols: set[SymVar] = set()
        self._analyzer = Analyzer()
        self._at: Binding | Expr | None = None

    def _fail(self, rule: str, message: str) -> NoReturn:
        at = self._at
        loc = None
        if isinstance(at, Let | MatchShape):
            loc = at.loc if isinstance(at, MatchShape) else getattr(at.value, "loc", None)
            loc = loc or at.var.loc
        shown = f"function {self._name}" if at is None else excerpt(at)
        shown = shown if isinstance(at, Let | MatchShape) or at is None else f"return {shown}"
        raise violation(f"function {self._name}", RULES[rule], message, shown, loc)

    def _require(self, rule: str, what: str, reason: str | None) -> None:
        if reason is not None:
            self._fail(rule, f"{what}: {reason}")

    # scopes

    @contextmanager
    def _nested_scope(self) -> Iterator[None]:
        outer = self._variables, self._symbols, self._analyzer, self._at
        self._variables, self._symbols = set(self._variables), set(self._symbols)
        yield
        self._variables, self._symbols, self._analyzer, self._at = outer

    def _bind(self, var: Var) -> None:
        self._type(var.ty)
        if var in self._all_bound:
            self._fail("variable", f"variable {var.name} is bound a second time")
        self._all_bound.add(var)
        self._variables.add(var)

    def _type(self, ty: Type) -> None:
        if self._stage.is_typed:
            self._require_defined(type_symbols(ty), lambda: print_type(ty))
        for part in ty.fields if isinstance(ty, TupleType) else (ty,):
            if isinstance(part, TensorType) and part.dtype not in dtypes.ALL:
                self._fail("type", f"unknown dtype {part.dtype!r}")
            dims = dims_of(part)
            if isinstance(part, TensorType | ShapeType) and dims is not None and part.rank not in (None, len(dims)):
                self._fail("type", f"{print_type(part)} says rank {part.rank}")

    def _exprs(self, exprs: Iterable[SymExpr]) -> None:
        if self._stage.is_typed:
            for expr in exprs:
                self._require_defined(expr.free_vars(), lambda expr=expr: str(expr))  # type: ignore[misc]

    def _require_defined(self, symbols: tuple[SymVar, ...], shown: Callable[[], str]) -> None:
        for symbol in symbols:
            if symbol not in self._symbols:
                has_namesake = any(s.name == symbol.name for s in self._symbols)
                hint = f" (a different symbol of that name, {symbol.name}, is)" if has_namesake else ""
                self._fail("symbol", f"symbol {symbol.name} in {shown()} is not defined here{hint}")

    # definitions and bodies

    def function(self, function: Function) -> None:
        self._require("attribute", "its attributes", attribute_problem("function", function.attrs))
        for param in function.params:
            self._symbols.update(defined_symbols(param.ty))
        for param in function.params:
            self._bind(param)
        self._body(function.body)

    def _body(self, body: Body) -> None:
        for block in body.blocks:
            for binding in block.bindings:
                self._at = binding
                if block.is_dataflow and isinstance(binding, Let) and isinstance(binding.value, ControlFlow):
                    self._fail("dataflow", f"{type(binding.value).__name__} in a dataflow block")
                if isinstance(binding, MatchShape):
                    self._match_shape(binding)
                else:
                    self._let(binding)
        self._at = body.result
        self._result(body.result)

    def _result(self, result: Expr) -> None:
        for field in result.fields if isinstance(result, Tuple) else (result,):
            self._leaf(field)

    def _let(self, let: Let) -> None:
        self._type(let.var.ty)  # first: with an undefined symbol, every comparison fails
        self._value(let.value)
        self._at = let
        self._bind(let.var)
        if self._stage.is_typed:
            self._require("type", let.var.name, mismatch(let.var.ty, let.value.ty, self._analyzer, is_exact=True))

    def _match_shape(self, match: MatchShape) -> None:
        self._leaf(match.source)
        source = match.source.ty
        if not isinstance(source, TensorType | ShapeType):
            self._fail("match", f"the source is {print_type(source)}, neither tensor nor shape")
        if source.rank not in (None, len(match.shape)):
            self._fail("match", f"the source has rank {source.rank}, the shape {len(match.shape)} dimensions")
        shape = ShapeType(match.shape, len(match.shape))
        expected = TensorType(shape.values, source.dtype, shape.rank) if isinstance(source, TensorType) else shape
        self._symbols.update(defined_symbols(shape))
        self._exprs(match.shape)
        for old, new in zip(dims_of(source) or (), match.shape, strict=False):
            is_short = num_atoms(old) <= _MAX_ATOMS if isinstance(match.source, ShapeValue) else not has_many_atoms(old)
            if old is not new and self._stage.is_typed and is_short:
                self._analyzer = self._analyzer.assume_equal(new, old)
        self._bind(match.var)
        self._require("match", match.var.name, mismatch(match.var.ty, expected, self._analyzer, is_exact=True))

    # expressions

    def _leaf(self, expr: Expr) -> None:
        if isinstance(expr, Var):
            if expr not in self._variables:
                reason = "is out of scope here" if expr in self._all_bound else "is used before it is bound"
                self._fail("variable", f"variable {expr.name} {reason}")
        elif isinstance(expr, Constant):
            if expr.ty.shape != expr.value.shape or expr.ty.dtype != dtypes.from_numpy(expr.value.dtype):
                self._fail("constant", f"elements of {expr.value.shape} {expr.value.dtype}, type {expr.ty}")
        elif isinstance(expr, ShapeValue):
            self._exprs(expr.values)
        elif isinstance(expr, GlobalVar):
            if expr.name not in self._module:
                self._fail("definition", f"{expr.name} is not defined in the module")
        else:
            self._fail("operand", f"{type(expr).__name__} as an operand")

    def _value(self, value: Expr) -> None:
        if isinstance(value, Call):
            self._call(value)
        elif isinstance(value, Tuple):
            self._result(value)
        elif isinstance(value, TupleGetItem):
            self._leaf(value.value)
            ty = value.value.ty
            if not isinstance(ty, TupleType) or not 0 <= value.index < len(ty.fields):
                self._fail("type", f"field {value.index} of {print_type(ty)}")
        elif isinstance(value, If):
            self._if(value)
        elif isinstance(value, Loop):
            self._loop(value)
        else:
            self._leaf(value)

    def _call(self, call: Call) -> None:
        for arg in call.args:
            self._leaf(arg)
        self._exprs(call.sym_args)
        callee = call.callee
        if isinstance(callee, Op):
            self._op(call, callee)
            return
        self._leaf(callee)
        definition = self._module[callee.name] if isinstance(callee, GlobalVar) else callee.ty
        if not isinstance(definition, Function | TensorProgram | ExternFunction | FuncType):
            self._fail("signature", f"{callee.name} is {print_type(definition)}, no function")
        if isinstance(definition, TensorProgram | ExternFunction):
            form = "dps" if is_destination_passing(call) else "value"
            if form not in self._stage.calls and definition.num_outputs > 0:
                self._fail("stage", f"a call in {form} form at stage {self._stage_name!r}")
        if self._stage.is_typed:
            self._require("signature", callee.name, call_mismatch(call, definition, self._analyzer))

    def _op(self, call: Call, op: Op) -> None:
        if not any(fnmatch.fnmatchcase(op.name, pattern) for pattern in self._stage.ops):
            self._fail("stage", f"op {op.name} at stage {self._stage_name!r}")
        try:
            op.check_count(len(call.args))
            if op.check_attrs(call.attrs) != call.attrs:
                self._fail("operator", f"attributes {call.attrs} are not what {op.name} makes of them")
            inferred = op.infer(*call.args, **call.attrs) if self._stage.is_typed else call.ty
        except RelaxliteError as error:
            self._fail("operator", str(error))
        except Exception as error:  # raised inside a type rule that does not expect such operands
            self._fail("operator", f"the type rule of {op.name} failed: {type(error).__name__}: {error}")
        self._require("operator", f"{op.name} infers another type", mismatch(call.ty, inferred, self._analyzer))

    # control flow

    def _condition(self, cond: Expr) -> None:
        self._leaf(cond)
        ty = cond.ty
        is_one = isinstance(ty, TensorType) and ty.shape is not None and all(dim == 1 for dim in ty.shape)
        if not isinstance(ty, TensorType) or ty.dtype != "bool" or not is_one:
            self._fail("condition", f"the condition is {print_type(ty)}")

    def _if(self, value: If) -> None:
        self._condition(value.cond)
        for which, body in (("then", value.then_body), ("else", value.else_body)):
            at = self._at
            with self._nested_scope():
                self._body(body)
                self._at = at
                if self._stage.is_typed:
                    self._require("branch", which, mismatch(value.ty, body.result.ty, self._analyzer))

    def _loop(self, loop: Loop) -> None:
        self._condition(loop.cond)
        for init in loop.inits:
            self._leaf(init)
        if len(loop.inits) != len(loop.params):
            self._fail("loop", f"{len(loop.params)} parameters, {len(loop.inits)} initial values")
        types = tuple(param.ty for param in loop.params)
        outer, at = frozenset(self._symbols), self._at
        self._check_loop_values("initial value", types, tuple(init.ty for init in loop.inits), outer)
        with self._nested_scope():
            for ty in types:
                self._symbols.update(defined_symbols(ty))
            for param in loop.params:
                self._bind(param)
            self._body(loop.body)
            self._at = at
            result = loop.body.result
            if not isinstance(result, Tuple) or len(result.fields) != len(loop.params) + 1:
                self._fail("loop", f"the body must yield a tuple of the condition and {len(loop.params)} values")
            self._condition(result.fields[0])
            self._check_loop_values("next value", types, tuple(field.ty for field in result.fields[1:]), outer)
        if self._stage.is_typed:
            result_type = instantiate(TupleType(types), {}, outer)
            self._require("loop", "what the loop yields", mismatch(loop.ty, result_type, self._analyzer))

    def _check_loop_values(
        self, what: str, params: tuple[Type, ...], values: tuple[Type, ...], outer: frozenset[SymVar]
    ) -> None:
        """Compare values that enter a loop with its parameters; symbols that the loop defines may have any value."""
        if not self._stage.is_typed:
            return
        bindings: dict[SymVar, SymExpr] = {}
        bind_symbols(params, values, bindings)
        bindings = {symbol: value for symbol, value in bindings.items() if symbol not in outer}
        for k, (param, value) in enumerate(zip(params, values, strict=True)):
            self._require("loop", f"{what} {k}", mismatch(instantiate(param, bindings, outer), value, self._analyzer))
            if dims_of(param) is not None and dims_of(value) is None:
                self._fail("loop", f"{what} {k}: {print_type(param)} against an unknown shape; match it first")
