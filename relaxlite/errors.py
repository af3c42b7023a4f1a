"""Every error that relaxlite raises on purpose, in one hierarchy.

A message names the operand, the shapes, the place (ONNX node, Python line) and one hint.
"""

from __future__ import annotations


class RelaxliteError(Exception):
    """Base of all errors raised by relaxlite."""


class InvalidArgumentError(RelaxliteError, ValueError):
    """A public function was given a value it cannot take."""


class TypeInferenceError(RelaxliteError, TypeError):
    """Operands do not fit an operator: wrong rank, dtype or shapes that cannot agree."""


class VerifyError(RelaxliteError):
    """A module breaks a rule of the IR; says which rule, where, and after which pass."""


class ParseError(RelaxliteError, SyntaxError):
    """Text is not a relaxlite module; says the line and column (`lineno`, `offset`, `text` as in any SyntaxError)."""

    def __str__(self) -> str:
        return str(self.msg)  # which shows the place already


class ScheduleError(RelaxliteError, ValueError):
    """A schedule primitive cannot be applied; names the loop or buffer, the access that forbids it, and one hint."""


class PassError(RelaxliteError):
    """A compiler pass failed; names the pass and the piece of IR."""


class ValidationError(RelaxliteError):
    """A pass, or the compiled code, changes what a module computes; names it, the sizes, the result and the files."""


class CodegenError(RelaxliteError):
    """A tensor program could not be turned into machine code; names the program."""


class ImportModelError(RelaxliteError):
    """A model file could not be imported."""


class UnsupportedOpsError(ImportModelError):
    """A model uses operators that the importer does not know; lists all of them."""


class ArtifactError(RelaxliteError):
    """A saved artifact is truncated, corrupted, foreign, or of another version or CPU."""


class ExecutionError(RelaxliteError):
    """Running a compiled model failed."""


class LibraryError(RelaxliteError):
    """A library that a model calls, or a routine of it, is not there; names what to install or to register."""


class InputError(ExecutionError, ValueError):
    """An argument of a compiled model has a wrong name, dtype, rank or shape."""


class ShapeMismatchError(ExecutionError):
    """A run-time shape check (MatchShape) failed: names tensor, dimension, expected and got."""


class OutOfBoundsError(ExecutionError):
    """The interpreter found an access outside a buffer: the program lacks a check that machine code relies on."""


class OutOfMemoryError(ExecutionError, MemoryError):
    """A tensor or an arena needs more memory than can be had, or its size overflows 64 bits."""


class CacheFullError(ExecutionError):
    """A cache of keys and values has no pages left for the tokens that a step adds; nothing has changed."""


class NoFolderError(RelaxliteError):
    """What is kept on disk has no folder, as this user has no home folder; names the variable that chooses one."""


class FetchError(RelaxliteError):
    """A model could not be downloaded."""
