"""How long compiling takes, with the cache of kernels empty and full, and where the time goes.

    python -m bench.compile_time [MODEL ...] [--repeats 3] [--json FILE]

MODEL: an ONNX file, or the name of a model of `relaxlite fetch` (default: minilm-l6-onnx and the two of ppocrv4).
Each measurement is a process of its own: first with an empty cache folder (cold), then with what the first one left
there (warm). The table gives the least wall-clock seconds of the repetitions: on a shared machine the others say more
about the neighbours. "python" is importing Python modules, "import" from_onnx, "load" linking and checking; the passes
that take less than 2 % of the cold time are summed up. "of the processor" is the sum over all threads, which neighbours
change less. "command" is all of `relaxlite compile`, started and ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from relaxlite import models

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("minilm-l6-onnx", "ppocrv4-rec", "ppocrv4-det")
CODEGEN = {"look_up": "codegen: look up", "emit": "codegen: emit IR", "llvm": "codegen: LLVM"}
_SMALL = 0.02  # share of the cold time below which a pass is not listed


def measure_here(path: str) -> dict[str, float]:
    """Compile a model in this process; seconds by stage."""
    start = time.perf_counter()
    import relaxlite.driver
    import relaxlite.frontend.onnx
    import relaxlite.runtime.module
    from relaxlite.passes.context import PassContext
    from relaxlite.target import Target

    imported, cpu = time.perf_counter(), time.process_time()
    module = relaxlite.frontend.onnx.from_onnx(path)
    read = time.perf_counter()
    context = PassContext(Target.host())
    data = relaxlite.driver.build(module, context=context)
    built = time.perf_counter()
    relaxlite.runtime.module.Executable(data)
    loaded = time.perf_counter()
    stages = {"python": imported - start, "import": read - imported}
    stages |= {name: seconds for name, seconds in context.timings if name != "codegen"}
    stages |= {CODEGEN[name]: seconds for name, seconds in data.metadata.info["codegen_s"].items()}
    stages["verify, bytecode"] = built - read - sum(seconds for _, seconds in context.timings)
    stages["load"] = loaded - built
    stages["from_onnx and compile"] = loaded - imported
    stages["of the processor"] = time.process_time() - cpu
    stages["kernels"] = data.metadata.info["kernels"]
    stages["kernels compiled"] = data.metadata.info["kernels_compiled"]
    return stages


def measure(path: Path, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """The least seconds by stage, with an empty and with a full cache."""
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "RELAXLITE_KERNEL_CACHE": folder}
            for results in (cold, warm):
                child = [sys.executable, "-m", "bench.compile_time", "--here", str(path)]
                done = subprocess.run(child, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
                results.append(json.loads(done.stdout))
                if results is warm:
                    results[-1]["command"] = _time_command(path, Path(folder) / "model.rlx", environment)
    return tuple({name: min(run[name] for run in runs) for name in runs[0]} for runs in (cold, warm))  # type: ignore[return-value]


def _time_command(path: Path, output: Path, environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "relaxlite.cli", "compile", str(path), "-o", str(output)]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def table(cold: dict[str, float], warm: dict[str, float]) -> str:
    total = cold["from_onnx and compile"]
    last = ("from_onnx and compile", "of the processor", "command", "kernels", "kernels compiled")
    shown = [name for name in cold if name not in last and max(cold[name], warm[name]) >= _SMALL * total]
    small = [name for name in cold if name not in (*last, *shown)]
    rows = [(name, f"{cold[name]:8.3f}", f"{warm[name]:8.3f}") for name in shown]
    rows.append(("the rest", f"{sum(map(cold.get, small)):8.3f}", f"{sum(map(warm.get, small)):8.3f}"))  # type: ignore[arg-type]
    rows += [(name, f"{cold[name]:8.3f}", f"{warm[name]:8.3f}") for name in last[:2]]
    rows.append(("command", "", f"{warm['command']:8.3f}"))
    rows += [(name, f"{cold[name]:8.0f}", f"{warm[name]:8.0f}") for name in last[3:]]
    return "\n".join(f"  {name:<24}{a:>10}{b:>10}" for name, a, b in [("seconds", "cold", "warm"), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=MODELS)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure (default 3)")
    parser.add_argument("--json", metavar="FILE", help="also write all figures here")
    parser.add_argument("--here", metavar="FILE", help=argparse.SUPPRESS)  # what each child does
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options.here)))
        return
    found: dict[str, Any] = {}
    for model in options.model:
        path = Path(model) if Path(model).is_file() else models.fetch(model)
        cold, warm = measure(path.resolve(), options.repeats)
        found[model] = {"cold": cold, "warm": warm}
        print(f"{model}\n{table(cold, warm)}\n", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
