"""State of the code generator while it emits code for a program with launches."""

from __future__ import annotations

from dataclasses import field

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Val
from relaxlite.ir.launch import Launch
from relaxlite.records import dataclass


@dataclass(slots=True)
class HostContext(KernelContext):
    """The host's part of a program; `launches` collects the launches that it starts, in order."""

    launches: list[Launch] = field(default_factory=list)


@dataclass(slots=True)
class DeviceContext(KernelContext):
    """A device function. A failed check stores its status to the word at `status`, and the thread returns."""

    status: Val | None = None

    def finish(self) -> None:
        """Emit the return of a thread."""
        self.e.line("ret void")

    def return_if(self, cond: Val, status: Val) -> None:
        """Emit: store `status` and return if `cond` holds."""
        assert self.status is not None
        failed, passed = self.e.fresh("failed"), self.e.fresh("passed")
        self.e.branch_if(cond, failed, passed)
        self.e.start(failed)
        self.e.line(f"%{self.e.fresh('before')} = atomicrmw umax {self.status}, {status} monotonic")
        self.e.line("ret void")
        self.e.start(passed)
