"""Hierarchy of the errors that relaxlite raises.

A message names the operand, the shapes, the source location (ONNX node, Python line) and gives one hint.
"""

from __future__ import annotations


class RelaxliteError(Exception):
    """Base of all errors raised by relaxlite."""


class InvalidArgumentError(RelaxliteError, ValueError):
    """An argument of a public function has an invalid value."""


class TypeInferenceError(RelaxliteError, TypeError):
    """Operands of an op have a wrong rank, a wrong dtype or incompatible shapes."""


class VerifyError(RelaxliteError):
    """A module violates a rule of the IR; names the rule, the place, and the pass that ran before."""


class ParseError(RelaxliteError, SyntaxError):
    """Text is no valid module; gives line and column (`lineno`, `offset`, `text` as in any SyntaxError)."""

    def __str__(self) -> str:
        return str(self.msg)  # the message contains line and column


class ScheduleError(RelaxliteError, ValueError):
    """A schedule primitive is not legal; names the loop or buffer, the access that prevents it, and one hint."""


class PassError(RelaxliteError):
    """A compiler pass failed; names the pass and shows an excerpt of the IR."""


class ValidationError(RelaxliteError):
    """A pass or the compiled code changes a module's results; names the pass, sizes, result and dumped files."""


class CodegenError(RelaxliteError):
    """Code generation of a tensor program failed; names the program."""


class ImportModelError(RelaxliteError):
    """A model file could not be imported."""


class UnsupportedOpsError(ImportModelError):
    """A model uses ops that the importer does not support; lists all of them."""


class ArtifactError(RelaxliteError):
    """A saved model is truncated, corrupted, in another format, or of another version or CPU."""


class ExecutionError(RelaxliteError):
    """The execution of a compiled model failed."""


class LibraryError(RelaxliteError):
    """A library that a model calls, or a routine of the library, is missing; names what to install or register."""


class InputError(ExecutionError, ValueError):
    """An argument of a compiled model has a wrong name, dtype, rank or shape."""


class ShapeMismatchError(ExecutionError):
    """A run-time shape check (MatchShape) failed; names tensor, dimension, expected and actual size."""


class OutOfBoundsError(ExecutionError):
    """The interpreter of tensor programs found an access outside a buffer, which machine code does not check."""


class KernelFaultError(ExecutionError):
    """The interpreter of GPU programs found a race, a read of unwritten memory, or a barrier that threads miss."""


class OutOfMemoryError(ExecutionError, MemoryError):
    """An allocation of a tensor or an arena failed, or its size overflows 64 bits."""


class CacheFullError(ExecutionError):
    """A KV cache has too few free pages for the new tokens of a step; the cache is unchanged."""


class NoFolderError(RelaxliteError):
    """There is no cache folder, as the user has no home folder; names the environment variable that sets one."""


class FetchError(RelaxliteError):
    """A model could not be downloaded."""
