"""A peer in a process of its own, which does what it is told over a pipe.

    parent -> worker              worker -> parent
    ("start",)                    version
    ("open", workload)            seconds
    ("prepare", case)             outputs, as arrays
    ("time", seconds, most)       seconds of each run
    ("once", case)                seconds, of making nothing ready and running once
    None                          the process ends

An answer is ("done", value), ("unsupported", reason) or ("failed", reason).
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from bench.cpu.cases import Case, Workload
from bench.cpu.peers import Peer, Prepared, Unsupported
from bench.timing import settle, timed_runs
from relaxlite.config import system_variables

PEERS = {
    "machine": "machine.Machine",
    "relaxlite": "peers.Relaxlite",
    "relaxlite-compile": "peers.RelaxliteCompile",
    "relaxlite-bf16": "peers.RelaxliteBf16",
    "relaxlite-kernels": "peers.RelaxliteKernels",
    "onnxruntime": "peers.OnnxRuntime",
    "openvino": "peers.OpenVino",
    "openvino-default": "peers.OpenVinoDefault",
    "torch": "torch_peers.Torch",
    "torch-compile": "torch_peers.TorchCompile",
    "onednn": "torch_peers.OneDnn",
    "mkl": "torch_peers.Mkl",
    "openblas": "peers.OpenBlas",
    "tvm": "peers.Tvm",
}
NOT_FLOAT32 = ("relaxlite-bf16", "openvino-default")  # their outputs may differ, and they are compared apart
ANSWER_SECONDS = 600.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS")


class PeerError(Exception):
    """What a peer could not do, in its own words. `is_expected`: as it is not installed, or not made for it."""

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected


class Worker:
    """The parent's end. Every method raises PeerError; a process that has died is gone for good."""

    def __init__(self, name: str, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, name, threads), daemon=True)
        with system_variables(**dict.fromkeys(THREAD_VARIABLES, str(threads))):
            self._process.start()
        theirs.close()
        self.is_alive = True

    def start(self) -> str:
        return str(self._ask("start"))

    def open(self, workload: Workload) -> float:
        return float(self._ask("open", workload))

    def prepare(self, case: Case) -> list[Any]:
        return list(self._ask("prepare", case))

    def time(self, seconds: float, most: int) -> list[float]:
        """Seconds of each of up to `most` runs in about `seconds`, at least MIN_RUNS; one more, before, warms up."""
        return list(self._ask("time", seconds, most))

    def once(self, case: Case) -> float:
        """Seconds of the first run at a shape."""
        return float(self._ask("once", case))

    def close(self) -> None:
        if self.is_alive:
            self.is_alive = False
            try:
                self._pipe.send(None)
                self._process.join(5)
            except OSError:
                pass
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()

    def _ask(self, *message: Any) -> Any:
        if not self.is_alive:
            raise PeerError("its process has died before")
        try:
            self._pipe.send(message)
            if not self._pipe.poll(ANSWER_SECONDS):
                self.is_alive = False
                raise PeerError(f"no answer to {message[0]!r} in {ANSWER_SECONDS:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.is_alive = False
            self._process.join(5)
            raise PeerError(f"its process died with exit code {self._process.exitcode}") from error
        if kind != "done":
            raise PeerError(value, is_expected=kind == "unsupported")
        return value


# The other end


def _serve(pipe: Connection, name: str, threads: int) -> None:
    server = _Server(name, threads)
    while (message := _received(pipe)) is not None:
        verb, *arguments = message
        try:
            pipe.send(("done", getattr(server, verb)(*arguments)))
        except (Unsupported, ModuleNotFoundError) as error:
            pipe.send(("unsupported", str(error)))
        except Exception as error:  # of any library; the parent reports it
            text = f"{type(error).__name__}: {error}"
            pipe.send(("failed", text if len(text) <= 300 else text[:300] + "..."))


def _received(pipe: Connection) -> Any:
    """None also when the parent has gone."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


class _Server:
    def __init__(self, name: str, threads: int) -> None:
        self._name, self._threads = name, threads
        self._peer: Peer | None = None
        self._prepared: Prepared | None = None

    def start(self) -> str:
        return self._get().version()

    def open(self, workload: Workload) -> float:
        start = time.perf_counter()
        self._prepared = None
        self._get().open(workload)
        seconds = time.perf_counter() - start
        settle()
        return seconds

    def prepare(self, case: Case) -> list[Any]:
        self._prepared = None
        self._prepared = self._get().prepare(case)
        outputs = self._prepared.arrays(self._prepared.run())
        settle()
        return list(outputs)

    def time(self, seconds: float, most: int) -> list[float]:
        assert self._prepared is not None
        times = timed_runs(self._prepared.run, seconds, most)
        settle()
        return [self._prepared.scale * t for t in times]

    def once(self, case: Case) -> float:
        prepared = self._get().prepare(case)
        start = time.perf_counter()
        prepared.run()
        return time.perf_counter() - start

    def _get(self) -> Peer:
        """Created at the first use, which imports its library."""
        if self._peer is None:
            module, _, name = PEERS[self._name].partition(".")
            self._peer = getattr(importlib.import_module(f"bench.cpu.{module}"), name)(self._threads)
        return self._peer
