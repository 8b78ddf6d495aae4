"""The terminal chat: turns, commands, interrupts, and what becomes of a message that failed."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake import ByteText, FakeEngine

from slipstream.cli.chat import Conversation, Delta, Session, Voice
from slipstream.request import Output, RequestError, SamplingParams, Speculation, Timing, Usage

ROOT = Path(__file__).resolve().parent.parent


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Marks:
    """A template that shows its messages; `opening` ends it as a thinking model's would."""

    def __init__(self, opening: str = "") -> None:
        self.opening = opening

    def render(self, messages: list[dict[str, Any]], **arguments: Any) -> str:
        if arguments.get("enable_thinking") is False:
            self.opening = ""
        shown = []
        for m in messages:
            thought = m.get("reasoning_content")
            shown.append(f"<{m['role']}>" + (f"({thought})" if thought else "") + m["content"])
        return "".join(shown) + "<assistant>" + self.opening


def output(prompt: int, completion: int) -> Output:
    return Output(
        "",
        usage=Usage(prompt, completion, 3),
        timing=Timing(0.1, 0.5, 2.5),
        speculation=Speculation(2, 5, 6, 3, {"lookup": 3, "mtp": 0}),
    )


class Speaker:
    """Answers with the pieces of `answers`, one list a question; an exception among them is raised."""

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.answers = list(answers)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.closed = 0
        self.finish = "stop"

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
        self.prompts.append(bytes(prompt).decode())
        self.params.append(params)
        pieces = self.answers.pop(0) if self.answers else [f"answer {len(self.prompts)}"]
        try:
            for piece in pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield Delta(piece)
            yield Delta("", self.finish, output(len(prompt), len(pieces)))
        finally:
            self.closed += 1


class Talk:
    """A session whose lines come from a list; an exception among them is raised."""

    def __init__(
        self,
        *lines: str | BaseException,
        speaker: Speaker | None = None,
        context: int = 1000,
        template: Marks | None = None,
        live: bool = False,
    ) -> None:
        self.speaker = speaker or Speaker()
        self.talk = Conversation(self.speaker, Bytes(), template or Marks(), context)
        self.out, self.err = io.StringIO(), io.StringIO()
        self._lines = list(lines)
        self.asked: list[str] = []
        self.session = Session(self.talk, self._read, self.out, self.err, live=live)
        self.session.run()

    def _read(self, prompt: str) -> str:
        self.asked.append(prompt)
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    @property
    def said(self) -> str:
        return self.out.getvalue()

    @property
    def notes(self) -> str:
        return self.err.getvalue()


def test_earlier_turns_stay() -> None:
    talk = Talk("one", "", "two", "three")
    assert talk.said == "answer 1\nanswer 2\nanswer 3\n"
    assert talk.speaker.prompts[2] == (
        "<user>one<assistant>answer 1<user>two<assistant>answer 2<user>three<assistant>"
    )
    assert talk.notes == ""
    assert not talk.session.failed
    assert talk.speaker.closed == 3


def test_text_is_printed_as_it_comes() -> None:
    seen: list[str] = []

    class Watching(Speaker):
        def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Delta]:
            for piece in ("a", "b\n"):
                yield Delta(piece)
                seen.append(out.getvalue())

    out = io.StringIO()
    speaker = Watching()
    session = Session(
        Conversation(speaker, Bytes(), Marks(), 100), lambda _: "", out, io.StringIO()
    )
    assert session.take("hi")
    assert seen == ["a", "ab\n"]
    assert out.getvalue() == "ab\n"  # no second line end


def test_an_interrupt_stops_the_answer_and_not_the_program() -> None:
    speaker = Speaker(["par", "tial", KeyboardInterrupt()])
    talk = Talk("one", "two", speaker=speaker)
    assert talk.said == "partial\nanswer 2\n"
    assert "stopped" in talk.notes
    assert speaker.prompts[1] == "<user>one<assistant>partial<user>two<assistant>"
    assert speaker.closed == 2


def test_the_consumer_closes_what_it_leaves() -> None:
    """A Ctrl-C between two deltas, while the text is being printed, must reach the engine too."""

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if text == "b":
                raise KeyboardInterrupt
            return super().write(text)

    speaker = Speaker(["a", "b", "c"])
    talk = Conversation(speaker, Bytes(), Marks(), 100)
    session = Session(talk, lambda _: "", Interrupting(), io.StringIO())
    held = []
    original = talk.ask
    talk.ask = lambda *args: held.append(original(*args)) or held[0]  # type: ignore[method-assign, func-returns-value]
    session.take("hi")
    assert speaker.closed == 1  # `held` keeps the iterator from being collected


def test_an_interrupt_before_the_first_word_keeps_the_message() -> None:
    talk = Talk("one", "/retry", speaker=Speaker([KeyboardInterrupt()]))
    assert "/retry" in talk.notes
    assert talk.speaker.prompts == ["<user>one<assistant>"] * 2
    assert talk.said == "answer 2\n"


def test_interrupts_at_the_prompt() -> None:
    talk = Talk("one", KeyboardInterrupt(), KeyboardInterrupt(), "never")
    assert len(talk.speaker.prompts) == 1
    assert "/exit" in talk.notes
    again = Talk(KeyboardInterrupt(), "one", KeyboardInterrupt(), "two")
    assert len(again.speaker.prompts) == 2


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_leaving(word: str) -> None:
    assert Talk(word, "never").speaker.prompts == []


def test_new_undo_retry() -> None:
    talk = Talk(
        "one", "two", "/undo", "three", "/retry", "/new", "four", "/undo", "/undo", "/retry"
    )
    assert talk.speaker.prompts[2:] == [
        "<user>one<assistant>answer 1<user>three<assistant>",
        "<user>one<assistant>answer 1<user>three<assistant>",
        "<user>four<assistant>",
    ]
    assert "taken back: two" in talk.notes
    assert "no turn to take back" in talk.notes
    assert "nothing to answer again" in talk.notes
    assert talk.session.failed


def test_a_failed_retry_keeps_the_old_answer() -> None:
    speaker = Speaker(["first"], [RuntimeError("engine fell")])
    talk = Talk("one", "/retry", "two", speaker=speaker)
    assert "RuntimeError: engine fell" in talk.notes
    assert speaker.prompts[2] == "<user>one<assistant>first<user>two<assistant>"


def test_a_message_survives_an_error() -> None:
    speaker = Speaker(["half", RequestError("no room for 7 more pages: wait")])
    talk = Talk("one", "/retry", speaker=speaker)
    assert "no room for 7 more pages" in talk.notes and "RequestError" not in talk.notes
    assert "/retry" in talk.notes
    assert speaker.prompts == ["<user>one<assistant>"] * 2
    assert talk.said == "half\nanswer 2\n"
    assert len(talk.talk.turns) == 1


def test_a_conversation_that_is_too_long() -> None:
    talk = Talk("one", "two", "x" * 40, "/undo", "/retry", context=90)
    size = len("<user>one<assistant>answer 1<user>two<assistant>answer 2<user><assistant>") + 40
    assert f"has {size} tokens and the context is 90" in talk.notes
    assert "/undo" in talk.notes and "/new" in talk.notes
    assert talk.speaker.prompts[-1] == (f"<user>one<assistant>answer 1<user>{'x' * 40}<assistant>")
    alone = Talk("x" * 100, context=90)
    assert "shorten it" in alone.notes
    assert alone.speaker.prompts == []


def test_settings() -> None:
    talk = Talk(
        "/set temperature 0.5", "/set top_k 7", "/set seed -3", "/set max_tokens 9", "one",
        "/set top_k -", "/set temperature", "/set", "two",
    )  # fmt: skip
    first, second = talk.speaker.params
    assert first == SamplingParams(temperature=0.5, top_k=7, seed=-3, max_tokens=9)
    assert second == SamplingParams(temperature=0.5, seed=-3, max_tokens=9)
    assert "temperature 0.5\n" in talk.said
    assert "top_k default\n" in talk.said


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("/set heat 1", "'heat'"),
        ("/set temperature hot", "a number"),
        ("/set top_k 1.5", "whole number"),
        ("/set temperature -1", "-1"),
        ("/set max_tokens 0", "max_tokens is 0"),
        ("/think maybe", "/think on"),
        ("/walk", "/walk"),
        ("/usr/bin is what?", "//"),
        ("/stats", "no whole answer"),
    ],
)
def test_wrong_commands_change_nothing(line: str, word: str) -> None:
    talk = Talk("/set top_p 0.5", line, "one")
    assert word in talk.notes
    assert talk.speaker.params == [SamplingParams(top_p=0.5)]
    assert talk.session.failed


def test_system_message() -> None:
    talk = Talk(
        "/system", "/system be brief", "one", "/system", "/new", "two", "/system -", "three"
    )
    assert talk.speaker.prompts == [
        "<system>be brief<user>one<assistant>",
        "<system>be brief<user>two<assistant>",
        "<user>two<assistant>answer 2<user>three<assistant>",
    ]
    assert talk.said.startswith("no system message\n")
    assert "be brief\n" in talk.said


def test_several_lines() -> None:
    talk = Talk(
        "one \\", "two\\", "three", '"""four', "", "  five", '"""', '"""six"""', '"""/seven', '"""',
        "//eight", "nine\\",
    )  # fmt: skip
    users = [prompt.rpartition("<user>")[2] for prompt in talk.speaker.prompts]
    assert users == [
        f"{text}<assistant>"
        for text in ("one \ntwo\nthree", "four\n\n  five", "six", "/seven", "/eight", "nine")
    ]
    assert talk.asked[:3] == ["> ", ". ", ". "]


def test_thinking_is_kept_apart() -> None:
    speaker = Speaker(["hm\n", "</think>", "\n\nyes"], ["cut"], ["<think>so</think>\nno"])
    talk = Talk(
        "one", "two", "/think off", "three", "four", speaker=speaker, template=Marks("<think>\n")
    )
    assert speaker.prompts[3] == (
        "<user>one<assistant>(hm)yes<user>two<assistant>(cut)"
        "<user>three<assistant>(so)no<user>four<assistant>"
    )
    assert talk.talk.arguments == {"enable_thinking": False}


def test_stats_and_the_line_under_an_answer() -> None:
    talk = Talk("one", "/stats", live=True, speaker=Speaker(["a", "b", "c"]))
    assert "3 tokens at 1.0 tokens/s" in talk.notes
    assert "first after 0.50 s · 3 of 20 prompt tokens cached" in talk.notes
    assert "drafts         3 of 6 accepted (lookup 3, mtp 0)" in talk.said
    assert "tokens a step  2.50" in talk.said


def test_a_cut_answer_says_so() -> None:
    speaker = Speaker()
    speaker.finish = "length"
    assert "max_tokens" in Talk("one", speaker=speaker).notes


@contextlib.contextmanager
def voice(engine: FakeEngine) -> Iterator[Voice]:
    with contextlib.closing(Voice(engine, ByteText())) as made:
        yield made
    engine.close()


def test_a_voice_over_an_engine() -> None:
    engine = FakeEngine(answer=lambda r: "früh END spät", block=2)
    with voice(engine) as speaker:
        for stop, text, finish in [((), "früh END spät", "stop"), (("END",), "früh ", "stop")]:
            deltas = list(speaker.stream([1, 2], SamplingParams(stop=stop, max_tokens=99)))
            assert "".join(d.text for d in deltas) == text
            assert [d.finish for d in deltas] == [None] * (len(deltas) - 1) + [finish]
            last = deltas[-1].output
            assert last is not None and last.usage.prompt_tokens == 2
        assert engine.wait_idle()
        assert engine.aborted == [engine.submitted[1].id]  # the stop string


def test_leaving_a_voice_aborts() -> None:
    engine = FakeEngine(answer=lambda r: "x" * 1000, block=1, pace=0.01)
    with voice(engine) as speaker:
        stream = speaker.stream([1], SamplingParams(max_tokens=1000))
        assert next(stream).text == "x"
        stream.close()  # type: ignore[attr-defined]
        assert engine.wait_idle()
        assert engine.aborted == [engine.submitted[0].id]


def test_what_a_voice_is_refused() -> None:
    engine = FakeEngine(
        refuse=lambda r: "9 pages are not there" if r.tokens == (1,) else None,
        fail=lambda r, done: "secret",
    )
    with voice(engine) as speaker:
        with pytest.raises(RequestError, match="9 pages"):
            list(speaker.stream([1], SamplingParams(max_tokens=5)))
        with pytest.raises(RuntimeError, match="engine failed"):
            list(speaker.stream([2], SamplingParams(max_tokens=5)))


PROGRAM = """
import sys
sys.path.insert(0, "tests")
from fake import ByteText, FakeEngine
from slipstream.__main__ import main
from slipstream.server import local, text

class Text:
    def encode(self, text): return list(text.encode())
    def render(self, messages, **arguments):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

def answer(request):
    prompt = bytes(request.tokens).decode()
    if prompt.endswith("slow"):
        return "begun " + "." * 900
    return f"got {prompt} at {request.params.temperature}"

def load(config):
    engine = FakeEngine(answer=answer, block=8, pace=0.05, context=2000)
    def close():
        engine.close()
        print("aborted", len(engine.aborted), file=sys.stderr)
    return local.Loaded(engine, Text(), Text(), close)

local.load = load
text.CheckpointText = lambda tokenizer, template: ByteText()
main(["chat", "--max-tokens", "1000", *sys.argv[1:]])
"""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # locales differ in it
def test_piped(errors: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--system", "s", "--temperature", "0.5"],
        input="one\r\n/walk\nzwei \xff".encode("latin-1"),
        capture_output=True,
        cwd=ROOT,
        timeout=20,
        env={**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"},
    )
    assert done.stdout.decode() == (
        "got <system>s<user>one at 0.5\n"
        "got <system>s<user>one<assistant>got <system>s<user>one at 0.5<user>zwei � at 0.5\n"
    )
    assert b"there is no command /walk" in done.stderr
    assert b"aborted 0" in done.stderr
    assert done.returncode == 1  # a script learns that something failed


def test_bad_values_are_found_before_loading() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--temperature", "-1"], capture_output=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: temperature is -1")


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self) -> None:
        self.fd, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            stdin=other, stdout=other, stderr=other, cwd=ROOT, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
            env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def until(self, ready: Callable[[str], bool], seconds: float = 15) -> str:
        end = time.monotonic() + seconds
        while not ready(self.seen):
            assert time.monotonic() < end, self.seen
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    break
        seen, self.seen = self.seen, ""
        return seen

    def send(self, keys: str) -> None:
        os.write(self.fd, keys.encode())


def test_in_a_terminal() -> None:
    terminal = Terminal()
    try:
        terminal.until(lambda text: text.endswith("> "))
        terminal.send("slow\n")
        terminal.until(lambda text: "begun" in text)
        terminal.send("\x03")
        assert "stopped" in terminal.until(lambda text: text.endswith("> "))
        terminal.send("fast\n")
        seen = terminal.until(lambda text: "got" in text and text.endswith("> "))
        assert re.search(r"got <user>slow<assistant>begun \.*<user>fast at None", seen)
        terminal.send("\x03")
        assert "leaves" in terminal.until(lambda text: text.endswith("> "))
        terminal.send("\x04")
        terminal.until(lambda text: "aborted 1" in text)
        assert terminal.process.wait(10) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
