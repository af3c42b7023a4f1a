"""relaxlite chat: a conversation in the terminal, or over a pipe."""

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
from relaxlite.cli.wording import with_option_names
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
REPLY_TOKENS = 256  # of the context that are reserved for a reply, at most half of the context


def execute(args: argparse.Namespace) -> None:
    llm = open_language_model(args)
    check_stdin("chat")
    if not llm.description.chat_template:
        raise InvalidArgumentError(f"{llm.description.name} has no chat template; `relaxlite generate` needs none")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # not available on every platform
            import readline  # noqa: F401  (lets `input` edit lines)
        print(f"{llm.description.name}, a context of {llm.context} tokens. /help says more.")
    system = argument_text(args.system) if args.system else None
    wording = partial(with_option_names, args=args)
    conversation = Conversation(llm, system, generation_options(args), is_terminal=is_terminal, wording=wording)
    conversation.run()
    if conversation.failures and not is_terminal:
        raise RelaxliteError(f"{conversation.failures} of {conversation.messages} messages got no reply")


class Conversation:
    """A conversation with a language model: reads lines, runs commands and prints replies.

    `wording` converts error texts. `messages` and `failures` count messages, and those whose reply was an error.
    """

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
        self.messages = self.failures = 0

    def run(self) -> None:
        """Process lines until the end of the input, or /exit."""
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
        """Print a reply, or an error; a message without a reply is removed from the conversation."""
        before = list(self._messages)
        self.messages += 1
        self._messages.append({"role": "user", "content": text})
        try:
            with _interruptible() as interruption:
                self._drop_old_turns()
                stream = self._llm.chat(self._messages, stream=True, **self._options)
                for piece in stream:
                    interruption.waits = True
                    print(piece, end="", flush=True)
                    if interruption.came:
                        break
        except KeyboardInterrupt:  # before the first token, or a second Ctrl-C
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

    def _drop_old_turns(self) -> None:
        """Drop the oldest turns, with a message, if the context does not have the tokens for a reply."""
        limit = self._options["max_new_tokens"]
        reserved = min(limit or REPLY_TOKENS, self._llm.context // 2)
        if limit and self._options["overflow"] == "error":
            reserved = limit  # without these tokens, a reply raises an error
        first, recent = len(self._start), list(self._messages)
        used = len(self._llm.encode_chat(recent))
        while len(recent) > first + 2 and used + reserved > self._llm.context:
            del recent[first : first + 2]  # a message and its reply
            used = len(self._llm.encode_chat(recent))
        dropped = len(self._messages) - len(recent)
        if dropped and used < self._llm.context:  # otherwise the last message alone is too long, an error
            self._messages = recent
            print(f"(the context is full: the {dropped} oldest messages are forgotten)", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Interruption:
    """State of Ctrl-C: it raises KeyboardInterrupt, but if `waits` is set, the first press only sets `came`."""

    waits: bool = False
    came: bool = False


@contextlib.contextmanager
def _interruptible() -> Iterator[_Interruption]:
    interruption = _Interruption()

    def handle(number: int, frame: FrameType | None) -> None:
        if interruption.came or not interruption.waits:
            raise KeyboardInterrupt
        interruption.came = True

    old_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, old_handler)
