"""The command line: `relaxlite compile`, `run`, `inspect`, `explain`, `opt` and the others of `relaxlite --help`.

`parser.py` holds every command's arguments; `execute` of the module named like the command does the work. That module
is imported when its command is given, and the compiler only where a model is compiled, so that help and mistakes are
answered at once and `relaxlite run model.rlx` needs the runtime alone: hence this package imports inside functions.

Exit codes: 0 success; 1 a model, file or input is at fault, and stderr says what; 2 wrong usage; 130 interrupted; 143
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
from relaxlite.cli.wording import as_typed
from relaxlite.errors import InvalidArgumentError, RelaxliteError

_PACKAGES = {"PIL": "pillow", "google": "protobuf"}  # those that are named unlike their modules


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # closed, or replaced by something that is no file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    status = 0
    try:
        status = _run(argv)
        print(end="", flush=True)
    except BrokenPipeError:  # who reads our output (head, less) has had enough
        _discard_output()
    except OSError as error:
        _discard_output()
        if status == 0:
            print(f"relaxlite: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        with _ended_in_order() as received:
            return _execute(argv, received)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _execute(argv: Sequence[str] | None, received: list[int]) -> int:
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # --help, --version or a mistake, which argparse has answered
        return int(end.code or 0)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with _warnings_in_a_line(args.command):
            importlib.import_module(f"relaxlite.cli.{args.command}").execute(args)
        return 0
    except BrokenPipeError:
        raise
    except Exception as error:
        if received:  # an extension module whose import was interrupted raises an error of its own
            _end(received[-1], None)
        if getattr(args, "verbose", False):
            traceback.print_exc()
        print(f"relaxlite {args.command}: error: {_explain(error, args)}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError) else 1


@contextlib.contextmanager
def _warnings_in_a_line(command: str) -> Iterator[None]:
    """Warnings are shown as errors are, without the place in the source that they come from."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"relaxlite {command}: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _ended_in_order() -> Iterator[list[int]]:
    """SIGTERM ends the command as an exception does, so that no half-written files stay. Gives the numbers of this and
    of SIGINT as they are received."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _end(number, frame)

    defaults: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in defaults.items() if is_main and signal.getsignal(number) == handler]
    try:
        for number in ours:
            signal.signal(number, note)
        yield received
    finally:
        for number in ours:
            signal.signal(number, defaults[number])


def _end(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _explain(error: Exception, args: argparse.Namespace) -> str:
    """What a person can do something about; a bug is called one."""
    if isinstance(error, RelaxliteError):
        return as_typed("\n  ".join([str(error), *getattr(error, "__notes__", ())]), args)
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
    """Nothing more is written to stdout, also not when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
