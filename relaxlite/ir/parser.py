"""Parser of modules: text -> IRModule, the inverse of the printer for every construct.

The docstrings of printer.py and program_printer.py define the syntax. Nothing in the text is evaluated.
"""

from __future__ import annotations

import ast
import base64
import binascii
from collections.abc import Sequence

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ParseError
from relaxlite.ir.expr import (
    Array,
    Attrs,
    Constant,
    ExternFunction,
)
from relaxlite.ir.function_parser import FunctionParser
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.parser_base import CallArguments, ParserBase, is_call, place_error
from relaxlite.ir.program_parser import ProgramParser
from relaxlite.ir.text import content_digest
from relaxlite.ir.types import TensorType

_NOT_TOP = "expected @function, @program, `name = extern(...)`, `n = symbol(...)`, `constants = [...]` or `module(...)`"


def parse_module(text: str, constants: Sequence[Constant | Array] = ()) -> IRModule:
    """Parse the text of `print_module`. `constants`: those of `module_constants`, unless the text embeds them.

    Raises ParseError with line and column.
    """
    lines = text.split("\n")
    try:
        return ModuleParser(lines, constants).module(ast.parse(text))
    except ParseError:
        raise
    except SyntaxError as error:
        raise place_error(lines, error.lineno or 1, max((error.offset or 1) - 1, 0), error.msg) from None
    except (MemoryError, RecursionError):
        raise place_error(lines, 1, 0, "the text nests too deep") from None
    except ValueError as error:  # null bytes, in some versions of Python
        raise place_error(lines, 1, 0, str(error)) from None


class ModuleParser(ParserBase):
    """Parser of the statements of a module."""

    def __init__(self, lines: list[str], constants: Sequence[Constant | Array]) -> None:
        super().__init__(lines)
        self._constant_values = constants
        self._constants: list[Constant] = []
        self._attrs = Attrs()
        self._definitions: dict[str, Definition] = {}

    def module(self, tree: ast.Module) -> IRModule:
        """Parse all definitions. Raises ParseError."""
        names = self._global_names(tree.body)
        for stmt in tree.body:
            if self.symbol_statement(stmt):
                continue
            if isinstance(stmt, ast.FunctionDef):
                self._add(stmt, names[stmt.name], self._definition(stmt, names))
            elif isinstance(stmt, ast.Assign) and is_call(stmt.value, "extern"):
                self._add(stmt, names[self.target(stmt)], self._extern(stmt.value))
            elif isinstance(stmt, ast.Assign) and self.target(stmt) == "constants":
                self._table(stmt.value)
            elif isinstance(stmt, ast.Expr) and is_call(stmt.value, "module"):
                self._attrs = Attrs(self.attrs(self.arguments(stmt.value)))
            else:
                self.fail(stmt, _NOT_TOP)
        return IRModule(self._definitions, self._attrs)

    def _global_names(self, stmts: list[ast.stmt]) -> dict[str, str]:
        """Collect identifier -> name of every definition, as calls may precede definitions."""
        names = {}
        for stmt in stmts:
            call: ast.expr | None = None
            if isinstance(stmt, ast.FunctionDef):
                ident, call = stmt.name, stmt.decorator_list[0] if stmt.decorator_list else None
            elif isinstance(stmt, ast.Assign) and is_call(stmt.value, "extern"):
                ident, call = self.target(stmt), stmt.value
            else:
                continue
            if ident in names:
                self.fail(stmt, f"{ident} is defined already")
            name = self.arguments(call).take("name") if isinstance(call, ast.Call) else None
            names[ident] = ident if name is None else self.string(name)
        return names

    def _add(self, stmt: ast.stmt, name: str, definition: Definition) -> None:
        if name in self._definitions:
            self.fail(stmt, f"{name} is defined already")
        self._definitions[name] = definition
        self.scope = {}  # symbols belong to the definition that follows them

    def _definition(self, node: ast.FunctionDef, names: dict[str, str]) -> Definition:
        decorator = node.decorator_list[0] if len(node.decorator_list) == 1 else node
        if node.returns is not None:
            self.fail(node.returns, "the type of the result is that of what the body returns")
        if is_call(decorator, "program"):
            return ProgramParser(self.lines).program(node, self.arguments(decorator), self.scope)
        arguments = CallArguments(node, [])
        if is_call(decorator, "function"):
            arguments = self.arguments(decorator)
        elif not isinstance(decorator, ast.Name) or decorator.id != "function":
            self.fail(node, "a definition begins with @function or @program(...)")
        arguments.take("name")
        attrs = Attrs(self.attrs(arguments))
        return FunctionParser(self.lines, self.scope, names, self._constants).function(node, attrs)

    def _extern(self, call: ast.Call) -> ExternFunction:
        arguments = self.arguments(call)
        outputs = arguments.take("outputs")
        arguments.take("name")
        attrs = Attrs(self.attrs(arguments))
        self.finish(arguments, (2,), "extern")
        symbol, params = arguments.positional
        types = tuple(map(self.type, self.items(params)))
        return ExternFunction(self.string(symbol), types, 1 if outputs is None else self.integer(outputs), attrs)

    # constants

    def _table(self, node: ast.expr) -> None:
        if not isinstance(node, ast.List):
            self.fail(node, "the constants are a list: constants = [constant(...), ...]")
        for row in node.elts:
            if not isinstance(row, ast.Call) or not is_call(row, "constant"):
                self.fail(row, 'a row is written constant((2, 3), "float32", hash="...")')
            self._constants.append(self._row(row))

    def _row(self, call: ast.Call) -> Constant:
        arguments = self.arguments(call)
        data, digest, name = (arguments.take(key) for key in ("data", "hash", "name"))
        self.finish(arguments, (2,), "constant")
        shape = tuple(map(self.integer, self.items(call.args[0])))
        dtype, title = self.dtype(call.args[1]), self.optional_string(name)
        if data is not None:
            array = self._decoded(data, shape, dtype)
            return Constant(array, TensorType.of(array.shape, dtype), title)
        index = len(self._constants)
        if index >= len(self._constant_values):
            self.fail(call, f"the elements of constants[{index}] are not in the text; pass parse_module(constants=...)")
        source = self._constant_values[index]
        constant = source if isinstance(source, Constant) else Constant.of(source, name=title)
        if constant.value.shape != shape or constant.ty.dtype != dtype:
            self.fail(call, f"constants[{index}] is given as {constant.ty}, the text says {shape} {dtype}")
        if digest is not None and content_digest(constant.value) != self.string(digest):
            self.fail(call, f"constants[{index}] has other elements than the text was printed with (its hash differs)")
        return constant

    def _decoded(self, node: ast.expr, shape: tuple[int, ...], dtype: str) -> Array:
        try:
            raw = base64.b64decode(self.string(node), validate=True)
            return np.frombuffer(raw, dtypes.to_numpy(dtype)).reshape(shape)
        except (ValueError, binascii.Error) as error:
            self.fail(node, f"this is no data of {shape} {dtype}: {error}")
