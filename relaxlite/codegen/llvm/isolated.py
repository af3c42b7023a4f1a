"""Run LLVM in child processes, so that a crash of LLVM ends a child, and the kernel that caused it is known.

LLVM aborts its process on what it cannot compile (an instruction that the target lacks, a failed assertion), which no
caller can catch. With the knob `isolate_codegen` each compiling thread has a child process, which receives the LLVM IR
of one kernel at a time and replies with an object file.
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
from relaxlite.gpus import Gpu
from relaxlite.target import Target

_HEAD = struct.Struct("<BQ")  # kind of message, size in bytes
_OBJECT, _ERROR = 0, 1
_START = (
    "import sys, json; sys.path[:], target = json.loads(sys.argv[1])\n"
    "from relaxlite.codegen.llvm import isolated; isolated.serve(target)"
)


class Compilers:
    """Context manager of child processes; entering returns a function (IR text) -> object file, as to_object."""

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
    """One child process, and the temporary file of its standard error."""

    def __init__(self, target: Target) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # not a pipe, which would fill up unread
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps((sys.path, asdict(target)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )

    def to_object(self, text: str) -> bytes:
        """Compile LLVM IR. CodegenError holds LLVM's message, also where LLVM ended the child."""
        assert self._process.stdin and self._process.stdout
        try:
            _send(self._process.stdin, _OBJECT, text.encode())
        except OSError as error:  # the child has closed its end of the pipe
            raise self._exit_error() from error
        answer = _receive(self._process.stdout)
        if answer is None:
            raise self._exit_error()
        kind, content = answer
        if kind == _ERROR:
            raise CodegenError(content.decode())
        return content

    def close(self) -> None:
        """Kill the child process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _exit_error(self) -> CodegenError:
        """Error with the exit status of the child and LLVM's message."""
        status = self._process.wait()
        self._stderr.seek(0)
        output = self._stderr.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in output if "error" in line.lower() or "assertion" in line.lower()] or output
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        return CodegenError(f"LLVM ended the process that compiled it ({how}): {lines[0] if lines else 'no message'}")


def serve(fields: dict[str, Any]) -> None:
    """Main loop of a child: LLVM IR from standard input, replies to standard output, until the input ends."""
    gpu = fields["gpu"] and Gpu(**{**fields["gpu"], "tensor_core_dtypes": tuple(fields["gpu"]["tensor_core_dtypes"])})
    target = Target(**{**fields, "features": tuple(fields["features"]), "gpu": gpu})
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
    """Read a message (kind, content); None at the end of the stream."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, size = _HEAD.unpack(head)
    content = stream.read(size)
    return (kind, content) if len(content) == size else None
