"""`slipstream chat`: a conversation in the terminal.

`Conversation` holds the turns; `Session` reads lines, runs commands and prints. Neither knows the
engine: anything that streams deltas will do. `Voice` is what does, over the `Serving` seam: the
engine runs in its own thread, so that Ctrl-C never falls into the middle of a step.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TextIO

import typer

from slipstream.cli.drafts import Painter, legend, summary, wants_colour
from slipstream.cli.settings import Debug, with_config
from slipstream.config import Config
from slipstream.request import Output, Request, RequestError, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.protocols import Serving
    from slipstream.server.schema import TextSide

SETTINGS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "seed": int,
}

HELP = """\
/help              this list
/system TEXT       set the system message; without TEXT show it, with - remove it
/set NAME VALUE    set a sampling value; without VALUE show it, with - go back to the default:
                   temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, seed
/think on|off      turn a model's thinking on or off, if its template can; - is its default
/new               start afresh; system message and settings stay
/undo              take back the last turn
/retry             answer the last message again, or send the one that failed
/stats             speed, cache and drafts of the last answer
/exit              leave; so does Ctrl-D

End a line with \\ to go on with the next one, or put several lines between \"\"\" and \"\"\".
A message that begins with / is written with //. Ctrl-C stops an answer."""


class Tokenizer(Protocol):
    """Text to ids, special tokens meant as such."""

    def encode(self, text: str, /) -> list[int]: ...


class Template(Protocol):
    """Messages to text."""

    def render(self, messages: list[dict[str, Any]], **arguments: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in an answer. The last one has `finish`, and the output with all counts."""

    text: str
    finish: str | None = None
    output: Output | None = None


class Speaker(Protocol):
    """What answers. Closing the iterator aborts the answer."""

    def stream(self, prompt: list[int], params: SamplingParams, /) -> Iterator[Delta]: ...


class Voice:
    """Speaks through the `Serving` seam, one answer at a time."""

    def __init__(self, serving: Serving, text: TextSide) -> None:
        self._serving = serving
        self._text = text
        self._runner = asyncio.Runner()
        self._numbers = itertools.count()

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        """Answer a prompt. Ctrl-C in it is a KeyboardInterrupt, and the answer is aborted.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        from slipstream.server.answer import Answer, Open
        from slipstream.server.schema import ApiError

        request = Request(f"chat-{next(self._numbers)}", tuple(prompt), params)
        answer = Answer(self._serving, self._text, [request], params.stop, Open())
        run = self._runner.run  # turns Ctrl-C into the cancellation of what it runs
        run(answer.__aenter__())
        try:
            finish = None
            while finish is None:
                piece = run(answer.__anext__())
                finish = piece.finish
                yield Delta(piece.text, finish, piece.output)
        except ApiError as error:
            if error.status == 400:
                raise RequestError(error.message) from None
            raise RuntimeError(error.message) from None
        finally:
            run(answer.__aexit__(None, None, None))

    def close(self) -> None:
        """Let go of the event loop."""
        self._runner.close()


@dataclass(slots=True)
class Turn:
    """A message and its answer."""

    user: str
    answer: dict[str, Any]


class Conversation:
    """Earlier turns, and one question at a time."""

    def __init__(
        self, speaker: Speaker, tokenizer: Tokenizer, template: Template, context: int
    ) -> None:
        self._speaker = speaker
        self._tokenizer = tokenizer
        self._template = template
        self._context = context
        self.turns: list[Turn] = []
        self.system: str | None = None
        self.values: dict[str, int | float] = {}
        self.arguments: dict[str, Any] = {}

    def params(self, values: dict[str, int | float] | None = None) -> SamplingParams:
        """The sampling parameters of the next answer."""
        return SamplingParams(**(self.values if values is None else values))  # type: ignore[arg-type]

    def prompt(self, text: str) -> tuple[str, list[int]]:
        """The whole conversation with ``text`` at its end, rendered and as ids.

        Raises:
            RequestError: it leaves no room for an answer.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.user}, turn.answer]
        messages.append({"role": "user", "content": text})
        rendered = self._template.render(messages, **self.arguments)
        tokens = self._tokenizer.encode(rendered)
        if len(tokens) >= self._context:
            way = (
                "/undo takes back the last turn, /new starts afresh" if self.turns else "shorten it"
            )
            raise RequestError(
                f"the conversation has {len(tokens)} tokens and the context is {self._context}: {way}"
            )
        return rendered, tokens

    def ask(self, text: str, tokens: list[int]) -> Iterator[Delta]:
        """The model's answer. Remember it with `keep` when it is over."""
        return self._speaker.stream(tokens, self.params())

    def keep(self, text: str, rendered: str, answer: str) -> None:
        """Remember a turn."""
        self.turns.append(Turn(text, _message(rendered, answer)))


def _message(rendered: str, answer: str) -> dict[str, Any]:
    """An answer as later prompts repeat it: thinking apart, since templates frame it themselves."""
    opened = rendered.rstrip().endswith("<think>")
    if not opened and answer.lstrip().startswith("<think>"):
        opened, answer = True, answer.lstrip().removeprefix("<think>")
    if not opened:
        return {"role": "assistant", "content": answer}
    thought, _, content = answer.partition("</think>")
    return {
        "role": "assistant",
        "content": content.strip("\n"),
        "reasoning_content": thought.strip("\n"),
    }


class Numbers:
    """What an answer cost, from its last output."""

    def __init__(self, output: Output) -> None:
        self.usage = output.usage
        self.timing = output.timing
        self.speculation = output.speculation

    @property
    def speed(self) -> float:
        """Tokens per second after the first one."""
        seconds = self.timing.total - self.timing.first_token
        return (self.usage.completion_tokens - 1) / seconds if seconds > 0 else 0.0

    def line(self) -> str:
        """One line under an answer."""
        return (
            f"{self.usage.completion_tokens} tokens at {self.speed:.1f} tokens/s"
            f" · first after {self.timing.first_token:.2f} s"
            f" · {self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"
        )

    def table(self) -> list[tuple[str, str]]:
        """Everything, for /stats."""
        spec, timing = self.speculation, self.timing
        sources = ", ".join(f"{name} {n}" for name, n in spec.accepted_by_source.items())
        return [
            ("answer", f"{self.usage.completion_tokens} tokens at {self.speed:.1f} tokens/s"),
            ("prompt", f"{self.usage.prompt_tokens} tokens, {self.usage.cached_tokens} cached"),
            (
                "first token",
                f"after {timing.first_token:.3f} s, {timing.queued:.3f} s of it queued",
            ),
            ("whole answer", f"{timing.total:.3f} s"),
            ("tokens a step", f"{spec.tokens_per_step:.2f}"),
            (
                "drafts",
                f"{spec.accepted} of {spec.drafted} accepted" + (f" ({sources})" * bool(sources)),
            ),
        ]


class Session:
    """Reads lines until the end, and answers them.

    Args:
        talk: the conversation.
        read: gives the next line for a prompt string; EOFError at the end.
        out: where answers go.
        err: where notes go.
        live: a person watches: show prompts and a line of numbers.
        painter: makes what colours an answer by its drafters; None: no colours.
    """

    def __init__(
        self,
        talk: Conversation,
        read: Callable[[str], str],
        out: TextIO,
        err: TextIO,
        *,
        live: bool = False,
        painter: Callable[[], Painter] | None = None,
    ) -> None:
        self._painter = painter
        self._talk = talk
        self._read = read
        self._out = out
        self._err = err
        self._live = live
        self._unsent: str | None = None  # a message whose answer failed
        self._numbers: Numbers | None = None
        self.failed = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "system": self._system,
            "set": self._set,
            "think": self._think,
            "new": self._new,
            "undo": self._undo,
            "retry": self._retry,
            "stats": self._stats,
        }

    def run(self) -> None:
        """Until Ctrl-D, /exit, the end of the input, or Ctrl-C twice at the prompt."""
        interrupted = False
        while True:
            try:
                entry = self._entry()
            except EOFError:
                if self._live:
                    self._print("")
                return
            except KeyboardInterrupt:
                if interrupted:
                    self._print("")
                    return
                interrupted = True
                self._note("\nCtrl-C again, Ctrl-D or /exit leaves")
                continue
            try:
                if not self.take(entry):
                    return
                interrupted = False
            except KeyboardInterrupt:  # between an answer's end and the next prompt
                interrupted = True

    def take(self, entry: str) -> bool:
        """Run a command or answer a message. False: leave."""
        if not entry.strip():
            return True
        if entry.startswith("//"):
            self.answer(entry[1:])
        elif entry.startswith("/"):
            name, _, rest = entry[1:].partition(" ")
            if name in ("exit", "quit"):
                return False
            command = self._commands.get(name)
            if command is None:
                self._fail(f"there is no command /{name}: /help lists them, // begins a message")
            else:
                command(rest.strip())
        else:
            self.answer(entry)
        return True

    def answer(self, text: str) -> bool:
        """Ask and print. True if there is a turn to remember; otherwise /retry sends it again."""
        self._unsent = text
        parts: list[str] = []
        last: Delta | None = None
        stopped = False
        try:
            rendered, tokens = self._talk.prompt(text)
            stream = self._talk.ask(text, tokens)
            painter = self._painter() if self._painter else None
            try:
                for last in stream:
                    parts.append(last.text)
                    self._out.write(_painted(painter, last))
                    self._out.flush()
            finally:
                close = getattr(stream, "close", None)
                if close is not None:
                    close()
        except KeyboardInterrupt:
            stopped = True
        except BrokenPipeError:
            raise
        except Exception as error:
            self._end_line(parts)
            self._fail(f"{_reason(error)}; your message is kept, /retry sends it")
            return False
        said = "".join(parts)
        self._end_line(parts)
        if stopped:
            self._note("stopped" if said else "stopped before the first word; /retry asks again")
            if not said:
                return False
        elif last is not None and last.output is not None:
            self._numbers = Numbers(last.output)
            if last.finish == "length":
                self._note("cut: max_tokens or the end of the context is reached")
            if self._live:
                self._note(self._numbers.line())
            if painter:
                self._note(summary(last.output.speculation))
        self._talk.keep(text, rendered, said)
        self._unsent = None
        return True

    def _entry(self) -> str:
        line = self._read("> ")
        if line.lstrip().startswith('"""'):
            return self._fenced(line.lstrip()[3:])
        while line.endswith("\\"):
            try:
                line = f"{line[:-1]}\n{self._read('. ')}"
            except EOFError:
                return line[:-1]
        return line

    def _fenced(self, line: str) -> str:
        lines: list[str] = []
        try:
            while not line.rstrip().endswith('"""'):
                lines.append(line)
                line = self._read(". ")
            lines.append(line.rstrip()[:-3])
        except EOFError:
            pass
        text = "\n".join(lines).strip("\n")
        return f"/{text}" if text.startswith("/") else text  # fences hold messages, not commands

    def _help(self, rest: str) -> None:
        self._print(HELP)

    def _system(self, rest: str) -> None:
        if not rest:
            self._print(self._talk.system or "no system message")
            return
        self._talk.system = None if rest == "-" else rest
        self._note("system message removed" if rest == "-" else "system message set")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name and name not in SETTINGS:
            self._fail(f"there is no setting {name!r}: it is one of {', '.join(SETTINGS)}")
        elif not value:
            for known in [name] if name else SETTINGS:
                self._print(f"{known} {self._talk.values.get(known, 'default')}")
        elif value == "-":
            self._talk.values.pop(name, None)
        else:
            self._try(name, value.strip())

    def _try(self, name: str, value: str) -> None:
        kind = SETTINGS[name]
        try:
            values = {**self._talk.values, name: kind(value)}
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            self._fail(f"{name} is {value!r}: give {what}")
            return
        try:
            self._talk.params(values)
        except RequestError as error:
            self._fail(str(error))
            return
        self._talk.values = values

    def _think(self, rest: str) -> None:
        if rest == "-":
            self._talk.arguments.pop("enable_thinking", None)
        elif rest in ("on", "off"):
            self._talk.arguments["enable_thinking"] = rest == "on"
        else:
            self._fail("say /think on, /think off, or /think - for the template's default")

    def _new(self, rest: str) -> None:
        self._talk.turns.clear()
        self._note("a new conversation")

    def _undo(self, rest: str) -> None:
        if not self._talk.turns:
            self._fail("there is no turn to take back")
            return
        gone = self._talk.turns.pop()
        self._note(f"taken back: {_short(gone.user)}")

    def _retry(self, rest: str) -> None:
        if self._unsent is not None:
            self.answer(self._unsent)
            return
        if not self._talk.turns:
            self._fail("there is nothing to answer again")
            return
        turn = self._talk.turns.pop()
        if not self.answer(turn.user):
            self._talk.turns.append(turn)
            self._unsent = None

    def _stats(self, rest: str) -> None:
        if self._numbers is None:
            self._fail("there is no whole answer yet")
            return
        for name, value in self._numbers.table():
            self._print(f"{name:<14} {value}")

    def _end_line(self, parts: list[str]) -> None:
        text = "".join(parts)
        if text and not text.endswith("\n"):
            self._print("")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _note(self, text: str) -> None:
        print(f"\x1b[2m{text}\x1b[0m" if self._live else text, file=self._err, flush=True)

    def _fail(self, text: str) -> None:
        self.failed = True
        self._note(text)


def _painted(painter: Painter | None, delta: Delta) -> str:
    """A delta's text, coloured by who drafted it if there is a painter."""
    if painter is None:
        return delta.text
    output = delta.output
    return painter.feed(delta.text, output.tokens, output.sources) if output else delta.text


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError) and type(error).__module__.startswith("slipstream."):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else f"{flat[:57]}..."


def reader(source: TextIO, live: bool) -> Callable[[str], str]:
    """Gives the lines of a terminal, editable and with a history, or of a pipe."""
    if live:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines once this is imported
        return lambda prompt: _clean(input(prompt))

    def read(prompt: str) -> str:
        line = source.readline()
        if not line:
            raise EOFError
        return _clean(line.removesuffix("\n").removesuffix("\r"))

    return read


def _clean(line: str) -> str:
    """Bytes that are no UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def register(app: typer.Typer) -> None:
    app.command()(with_config(chat))


def chat(
    config: Config,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: the checkpoint's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Keep this many of the likeliest tokens; 0 is off.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest; 0 is off.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: repeated tokens become less likely.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most; default: to the context's end.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text repeatable.")] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour each token by who drafted it.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk with a model in the terminal.

    Ctrl-C stops an answer, /help lists the commands, Ctrl-D leaves. Without a terminal each line
    of standard input is a message or command, and only answers go to standard output.
    """
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    values = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**values)  # type: ignore[arg-type]  # before minutes of loading

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # for `_clean`; some locales are strict
    live = sys.stdin.isatty() and sys.stdout.isatty()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s") if debug else _OneLine("%(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[handler])
    if live:
        print(f"loading {config.model} ...", file=sys.stderr, flush=True)

    from slipstream.server import local
    from slipstream.server.text import CheckpointText

    made = local.load(config)
    try:
        if made.tokenizer is None or made.template is None:
            lacks = "tokenizer" if made.tokenizer is None else "chat template"
            raise RequestError(f"{config.model} has no {lacks}: use slipstream run --raw")
        side = CheckpointText(made.tokenizer, made.template)
        voice = Voice(made.serving, side)
        context = made.serving.about().context
        talk = Conversation(voice, made.tokenizer, made.template, context)
        talk.system, talk.values = system, values
        coloured = wants_colour(sys.stdout)
        session = Session(
            talk,
            reader(sys.stdin, live),
            sys.stdout,
            sys.stderr,
            live=live,
            painter=(lambda: Painter(side.decoder(), coloured)) if show_drafts else None,
        )
        if live:
            print("/help lists the commands, Ctrl-D leaves", file=sys.stderr, flush=True)
        if show_drafts:
            print(legend(wants_colour(sys.stderr)), file=sys.stderr, flush=True)
        session.run()
        voice.close()
    finally:
        made.close()
    if session.failed and not live:
        raise typer.Exit(1)


class _OneLine(logging.Formatter):
    """Names an exception without its traceback."""

    def formatException(self, ei: Any) -> str:
        return f"{ei[0].__name__}: {ei[1]}"
