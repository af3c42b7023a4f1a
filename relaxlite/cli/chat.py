"""relaxlite chat: a conversation in the terminal, or with a program at the other end of a pipe."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from relaxlite.cli.generate import stats_text
from relaxlite.cli.language import argument_text, check_stdin, generation_options, open_language_model
from relaxlite.cli.wording import as_typed
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.llm.generation import Result
from relaxlite.llm.model import LanguageModel
from relaxlite.records import dataclass

HELP = """\
/stats   tokens and speed of the last reply, and how full the context is
/reset   forget the conversation
/help    this text
/exit    end; Ctrl-D does too
Ctrl-C stops a reply."""
REPLY_ROOM = 256  # tokens of the context that are left to a reply, where there are that many


def execute(args: argparse.Namespace) -> None:
    llm = open_language_model(args)
    check_stdin("chat")
    if not llm.description.chat_template:
        raise InvalidArgumentError(f"{llm.description.name} has no chat template; `relaxlite generate` needs none")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # not on every platform
            import readline  # noqa: F401  (lets `input` edit lines)
        print(f"{llm.description.name}, a context of {llm.context} tokens. /help says more.")
    system = argument_text(args.system) if args.system else None
    wording = partial(as_typed, args=args)
    conversation = Conversation(llm, system, generation_options(args), is_terminal=is_terminal, wording=wording)
    conversation.run()
    if conversation.failures and not is_terminal:
        raise RelaxliteError(f"{conversation.failures} of {conversation.messages} messages got no reply")


class Conversation:
    """`wording`: of an error's text."""

    def __init__(
        self,
        llm: LanguageModel,
        system: str | None,
        options: dict[str, Any],
        *,
        is_terminal: bool,
        wording: Callable[[str], str] = str,
    ) -> None:
        self._llm, self._options, self._wording, self._is_terminal = llm, options, wording, is_terminal
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._last: Result | None = None
        self.messages = self.failures = 0  # how many were given, and how many of them got an error for a reply

    def run(self) -> None:
        """Until the end of the input."""
        for line in self._lines():
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                print(self._command(text), flush=True)
            elif text:
                self._reply(text)

    def _lines(self) -> Iterator[str]:
        if not self._is_terminal:
            yield from sys.stdin
            return
        while True:
            try:
                yield input("\n> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\nCtrl-D or /exit ends the chat.")

    def _command(self, text: str) -> str:
        if text == "/reset":
            self._messages = list(self._start)
            self._last = None
            self._llm.forget()
            return "The conversation is forgotten."
        if text == "/stats":
            if self._last is None:
                return "There is no reply yet."
            usage = self._last.usage
            used = usage.prompt_tokens + usage.new_tokens - usage.forgotten_tokens
            return f"{stats_text(self._last)}\ncontext: {used} of {self._llm.context} tokens"
        return HELP if text == "/help" else f"There is no command {text}.\n{HELP}"

    def _reply(self, text: str) -> None:
        """Answer, or say why not; then the message counts as not written."""
        before = list(self._messages)
        self.messages += 1
        self._messages.append({"role": "user", "content": text})
        try:
            with _interruptible() as interruption:
                self._make_room()
                stream = self._llm.chat(self._messages, stream=True, **self._options)
                for piece in stream:
                    interruption.waits = True
                    print(piece, end="", flush=True)
                    if interruption.came:
                        break
        except KeyboardInterrupt:  # nothing was said yet, or a second one
            self._messages = before
            print("\n(stopped)", flush=True)
            return
        except RelaxliteError as error:
            self._messages = before
            self.failures += 1
            print(f"relaxlite chat: {self._wording(str(error))}", file=sys.stderr, flush=True)
            return
        interrupted = interruption.came
        stream.close()
        print("\n(stopped)" if interrupted else "", flush=True)
        self._last = stream.result()
        self._messages.append({"role": "assistant", "content": self._last.text})

    def _make_room(self) -> None:
        """Forget the oldest turns where the context has no room for a reply, and say so."""
        given = self._options["max_new_tokens"]
        wanted = min(given or REPLY_ROOM, self._llm.context // 2)
        if given and self._options["overflow"] == "error":
            wanted = given  # which a reply is refused without
        first, kept = len(self._start), list(self._messages)
        used = len(self._llm.encode_chat(kept))
        while len(kept) > first + 2 and used + wanted > self._llm.context:
            del kept[first : first + 2]  # what was said and what was answered
            used = len(self._llm.encode_chat(kept))
        gone = len(self._messages) - len(kept)
        if gone and used < self._llm.context:  # else the last message alone is too long, and is refused
            self._messages = kept
            print(f"(the context is full: the {gone} oldest messages are forgotten)", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Interruption:
    """Ctrl-C. It interrupts at once, unless it `waits`: then its first press only says that it `came`."""

    waits: bool = False
    came: bool = False


@contextlib.contextmanager
def _interruptible() -> Iterator[_Interruption]:
    result = _Interruption()

    def note(number: int, frame: FrameType | None) -> None:
        if result.came or not result.waits:
            raise KeyboardInterrupt
        result.came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield result
    finally:
        signal.signal(signal.SIGINT, before)
