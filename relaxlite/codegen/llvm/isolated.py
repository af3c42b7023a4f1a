"""LLVM in child processes: what would end the user's process ends a child, and the kernel that did it is known.

LLVM ends its process when it meets what it cannot do (an instruction that the target lacks, a failed assertion), which
no caller can catch. With the knob `isolate_codegen` each thread that compiles has a child, which is sent one kernel's
LLVM IR after another and answers each with an object file.
"""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from relaxlite.codegen.llvm import machine_code
from relaxlite.errors import CodegenError
from relaxlite.target import Target

_HEAD = struct.Struct("<BQ")  # what an answer is, and its bytes
_OBJECT, _ERROR = 0, 1
_START = (
    "import sys, json; sys.path[:], target = json.loads(sys.argv[1])\n"
    "from relaxlite.codegen.llvm import isolated; isolated.serve(target)"
)


class Compilers:
    """A context manager that gives a function like machine_code.to_object; children end with it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._local = threading.local()
        self._children: list[_Child] = []

    def __enter__(self) -> Callable[[str], bytes]:
        return self._to_object

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close()

    def _to_object(self, text: str) -> bytes:
        child: _Child | None = getattr(self._local, "child", None)
        if child is None:
            self._local.child = child = _Child(self._target)
            self._children.append(child)
        return child.to_object(text)


class _Child:
    def __init__(self, target: Target) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe that nobody reads would fill up
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps((sys.path, asdict(target)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def to_object(self, text: str) -> bytes:
        """CodegenError says what LLVM said, also when it ended the child with it."""
        assert self._process.stdin and self._process.stdout
        try:
            _send(self._process.stdin, _OBJECT, text.encode())
        except OSError as error:  # a pipe that is closed at the other end
            raise self._obituary() from error
        answer = _receive(self._process.stdout)
        if answer is None:
            raise self._obituary()
        kind, content = answer
        if kind == _ERROR:
            raise CodegenError(content.decode())
        return content

    def close(self) -> None:
        """End the child, which waits for more, or is no more."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _obituary(self) -> CodegenError:
        status = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in said if "error" in line.lower() or "assertion" in line.lower()] or said
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return CodegenError(f"LLVM ended the process that compiled it ({how}): {lines[0] if lines else 'no message'}")


def serve(fields: dict[str, Any]) -> None:
    """What a child does: LLVM IR from standard input, an answer to standard output, until the input ends."""
    target = Target(**{**fields, "features": tuple(fields["features"])})
    source, out = sys.stdin.buffer, sys.stdout.buffer
    while (message := _receive(source)) is not None:
        try:
            _send(out, _OBJECT, machine_code.to_object(message[1].decode(), target))
        except CodegenError as error:
            _send(out, _ERROR, str(error).encode())


def _send(stream: IO[bytes], kind: int, content: bytes) -> None:
    stream.write(_HEAD.pack(kind, len(content)))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[int, bytes] | None:
    """The next message; None when the other side has ended."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, size = _HEAD.unpack(head)
    content = stream.read(size)
    return (kind, content) if len(content) == size else None
