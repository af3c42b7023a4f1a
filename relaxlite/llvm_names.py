"""Queries of LLVM about CPU names and features: known names, and the features of a CPU.

LLVM aborts the process when it generates code for an unknown CPU, and prints a line for each unknown feature; so new
names are tried in child processes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

import llvmlite.binding as llvm

from relaxlite.features import CODEGEN_FEATURES


@cache
def host_features() -> tuple[str, ...]:
    """Return all features of the host, each with the sign + or -."""
    features = llvm.get_host_cpu_features()
    return tuple(f"{'+' if is_enabled else '-'}{name}" for name, is_enabled in sorted(features.items()))


@cache
def is_known_cpu(triple: str, cpu: str) -> bool:
    """Whether LLVM knows a CPU name for a triple."""
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
    """Return the features, without signs, that LLVM does not know for a triple."""
    code = (
        "import sys, llvmlite.binding as llvm\n"
        "llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()\n"
        "llvm.Target.from_triple(sys.argv[1]).create_target_machine(features=sys.argv[2])"
    )
    features = ",".join(f"+{name}" for name in names)
    done = subprocess.run([sys.executable, "-c", code, triple, features], capture_output=True, text=True, check=False)
    unknown = re.findall(r"'[+-](\S+)' is not a recognized feature", done.stderr)
    return tuple(dict.fromkeys(unknown))


def known_features(names: Iterable[str]) -> list[str]:
    """Return the x86 features that LLVM knows, or all on hosts that are not x86; unknown ones print warnings."""
    host = llvm.get_host_cpu_features()
    return [name for name in names if name in host] if "sse2" in host else list(names)


@cache
def enabled_features(triple: str, cpu: str, features: tuple[str, ...]) -> frozenset[str]:
    """Return the features that LLVM enables for a CPU name and explicit features, each with a sign.

    LLVM inlines a callee only if the caller has all of its features. So a callee compiled for the target is inlined
    into a caller compiled for the target without a feature exactly if the target does not have the feature.
    """
    explicit = {f[1:] for f in features if f[0] == "+"} - {f[1:] for f in features if f[0] == "-"}
    if (cpu, features) == (llvm.get_host_cpu_name(), host_features()):
        return frozenset(explicit)  # `features` lists all of the host
    names = list(CODEGEN_FEATURES.get(triple.split("-")[0], ()))
    names = known_features(names) if "avx" in names else names
    callers = {name: f"without.{number}" for number, name in enumerate(names)}
    lines = [f'target triple = "{triple}"', *_probe_function("with", cpu, features, "store i32 0, ptr %to")]
    for name, function in callers.items():
        lines += _probe_function(function, cpu, (*features, f"-{name}"), "call void @with(ptr %to)")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly("\n".join(lines))
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    builder.getModulePassManager().run(module, builder)
    enabled = {name for name, function in callers.items() if "@with(" in str(module.get_function(function))}
    return frozenset(enabled | (explicit - set(names)))


def _probe_function(name: str, cpu: str, features: Iterable[str], statement: str) -> list[str]:
    attributes = f'"target-cpu"="{cpu}" "target-features"="{",".join(features)}"'
    return [f"define void @{name}(ptr %to) {attributes} {{", statement, "ret void", "}"]
