"""The command line: `relaxlite compile`, `run`, `inspect`, `explain`, `opt` and the others of `relaxlite --help`.

`parser.py` defines every command's arguments; `execute` in the module named like the command implements the command.
That module is imported on demand, and the compiler only to compile a model: help and usage errors are fast, and
`relaxlite run model.rlx` needs only the runtime. Hence this package imports inside functions.

Exit codes: 0 success; 1 error in a model, file or input, reported on stderr; 2 wrong usage; 130 interrupted; 143
terminated. Results go to stdout; times, progress, warnings and errors to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from relaxlite.cli.parser import make_parser
from relaxlite.cli.wording import with_option_names
from relaxlite.errors import InvalidArgumentError, RelaxliteError

_PACKAGES = {"PIL": "pillow", "google": "protobuf"}  # packages whose names differ from their modules


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # closed, or replaced by an object that is no file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    status = 0
    try:
        status = _run(argv)
        print(end="", flush=True)
    except BrokenPipeError:  # the reader of the output (head, less) has exited
        _discard_output()
    except OSError as error:
        _discard_output()
        if status == 0:
            print(f"relaxlite: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        with _signals_as_exceptions() as received:
            return _execute(argv, received)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _execute(argv: Sequence[str] | None, received: list[int]) -> int:
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # --help, --version or a usage error, reported by argparse
        return int(end.code or 0)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _one_line_warnings(args.command):
            importlib.import_module(f"relaxlite.cli.{args.command}").execute(args)
        return 0
    except BrokenPipeError:
        raise
    except Exception as error:
        if received:  # an extension module may raise another error if its import is interrupted
            _raise_for_signal(received[-1], None)
        if getattr(args, "verbose", False):
            traceback.print_exc()
        print(f"relaxlite {args.command}: error: {_error_text(error, args)}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError) else 1


@contextlib.contextmanager
def _one_line_warnings(command: str) -> Iterator[None]:
    """Show warnings in the format of errors, without source locations."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"relaxlite {command}: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[list[int]]:
    """Turn SIGTERM and SIGINT into exceptions, so that partly written files are removed; yield the received signals."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _raise_for_signal(number, frame)

    defaults: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    is_main = threading.current_thread() is threading.main_thread()
    replaced = [number for number, handler in defaults.items() if is_main and signal.getsignal(number) == handler]
    try:
        for number in replaced:
            signal.signal(number, handle)
        yield received
    finally:
        for number in replaced:
            signal.signal(number, defaults[number])


def _raise_for_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _error_text(error: Exception, args: argparse.Namespace) -> str:
    """Return the message of an error; errors other than those of users are reported as bugs."""
    if isinstance(error, RelaxliteError):
        return with_option_names("\n  ".join([str(error), *getattr(error, "__notes__", ())]), args)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if (
        isinstance(error, ModuleNotFoundError)
        and (missing := (error.name or "relaxlite").partition(".")[0]) != "relaxlite"
    ):
        package = _PACKAGES.get(missing, missing)
        return f"this needs the Python package {package}, which is not installed; `pip install {package}` adds it"
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    return f"{type(error).__name__}: {error}\n  This is a bug in relaxlite; with -v you see where."


def _discard_output() -> None:
    """Redirect stdout to the null device, so that the interpreter's final flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
