"""What LLVM knows about processors and features by name: which there are, and which features a processor has.

LLVM ends the process when it generates code for a processor that it does not know, and prints a line each time that it
meets a feature that it does not know; so a child process tries new names.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

import llvmlite.binding as llvm

from relaxlite.features import USED


@cache
def host_features() -> tuple[str, ...]:
    """All features of the machine that this process runs on, each with its sign."""
    result = llvm.get_host_cpu_features()
    return tuple(f"{'+' if on else '-'}{name}" for name, on in sorted(result.items()))


@cache
def is_known_cpu(triple: str, cpu: str) -> bool:
    """Whether LLVM knows a processor's name for a triple."""
    code = (
        "import sys, llvmlite.binding as llvm\n"
        "llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()\n"
        "machine = llvm.Target.from_triple(sys.argv[1]).create_target_machine(cpu=sys.argv[2])\n"
        "machine.emit_object(llvm.parse_assembly('define void @f() { ret void }'))"
    )
    done = subprocess.run([sys.executable, "-c", code, triple, cpu], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "not a recognized processor" not in done.stderr


@cache
def unknown_features(triple: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of these features, without signs, that LLVM does not know for a triple."""
    code = (
        "import sys, llvmlite.binding as llvm\n"
        "llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()\n"
        "llvm.Target.from_triple(sys.argv[1]).create_target_machine(features=sys.argv[2])"
    )
    features = ",".join(f"+{name}" for name in names)
    done = subprocess.run([sys.executable, "-c", code, triple, features], capture_output=True, text=True, check=False)
    result = re.findall(r"'[+-](\S+)' is not a recognized feature", done.stderr)
    return tuple(dict.fromkeys(result))


def known_features(names: Iterable[str]) -> list[str]:
    """Of these features of x86 those that LLVM knows, as far as can be told here: it prints warnings about others."""
    result = llvm.get_host_cpu_features()
    return [name for name in names if name in result] if "sse2" in result else list(names)


@cache
def enabled_features(triple: str, cpu: str, features: tuple[str, ...]) -> frozenset[str]:
    """The features that LLVM has for a CPU by its name, with others switched on and off.

    LLVM inlines a function into another only where that one's features contain its own, so it inlines one that is
    compiled for the target into one for the target without a feature just where the target does not have that.
    """
    named = {f[1:] for f in features if f[0] == "+"} - {f[1:] for f in features if f[0] == "-"}
    if (cpu, features) == (llvm.get_host_cpu_name(), host_features()):
        return frozenset(named)  # all features of the host are named
    names = list(USED.get(triple.split("-")[0], ()))
    names = known_features(names) if "avx" in names else names
    without = {name: f"without.{number}" for number, name in enumerate(names)}
    lines = [f'target triple = "{triple}"', *_probe("with", cpu, features, "store i32 0, ptr %to")]
    for name, function in without.items():
        lines += _probe(function, cpu, (*features, f"-{name}"), "call void @with(ptr %to)")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly("\n".join(lines))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    builder.getModulePassManager().run(module, builder)
    result = {name for name, function in without.items() if "@with(" in str(module.get_function(function))}
    return frozenset(result | (named - set(names)))


def _probe(name: str, cpu: str, features: Iterable[str], statement: str) -> list[str]:
    attributes = f'"target-cpu"="{cpu}" "target-features"="{",".join(features)}"'
    return [f"define void @{name}(ptr %to) {attributes} {{", statement, "ret void", "}"]
