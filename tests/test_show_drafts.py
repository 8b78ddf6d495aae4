"""Text coloured by who drafted it: the painter, and the commands that use it."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write
from fake import ByteDecoder
from test_chat import Speaker, Talk

from slipstream.__main__ import main
from slipstream.cli import drafts
from slipstream.cli.chat import Delta, Session
from slipstream.cli.drafts import Painter, legend, summary, wants_colour
from slipstream.request import Output, Speculation


def runs(text: str) -> list[tuple[str, str]]:
    """(colour, text) of coloured text; the colour is empty outside."""
    parts = re.split(r"(\x1b\[\d+m.*?\x1b\[0m)", text, flags=re.DOTALL)
    found = []
    for part in filter(None, parts):
        match = re.fullmatch(r"\x1b\[(\d+)m(.*)\x1b\[0m", part, re.DOTALL)
        found.append(match.groups() if match else ("", part))
    return found


def bare(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def test_each_token_has_its_drafters_colour() -> None:
    painter = Painter(ByteDecoder(), True)
    sources = ("lookup", "lookup", "mtp", "dflash", "target")
    assert runs(painter.feed("abcde", b"abcde", sources)) == [
        ("32", "ab"),
        ("33", "c"),
        ("36", "d"),
        ("", "e"),
    ]
    assert runs(painter.feed("f", b"f", ("other",))) == [("35", "f")]


def test_text_that_comes_later_than_its_tokens() -> None:
    painter = Painter(ByteDecoder(), True)
    assert painter.feed("", b"ab", ("lookup", "target")) == ""
    assert runs(painter.feed("abc", b"c", ("mtp",))) == [("32", "a"), ("", "b"), ("33", "c")]
    assert painter.feed("", b"", ()) == ""


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    painter = Painter(ByteDecoder(), True)
    first, second = "é".encode()
    assert painter.feed("", (first,), ("lookup",)) == ""
    assert runs(painter.feed("é", (second,), ("mtp",))) == [("33", "é")]


def test_text_without_a_token_goes_with_the_last() -> None:
    painter = Painter(ByteDecoder(), True)
    painter.feed("a", b"a", ("lookup",))
    assert runs(painter.feed("\ufffd", b"", ())) == [("32", "\ufffd")]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_cuts_the_text_is_the_text(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab é日🚀\n", k=60))
    tokens = text.encode()
    sources = [rng.choice(("lookup", "mtp", "dflash", "target")) for _ in tokens]
    decoder, painter = ByteDecoder(), Painter(ByteDecoder(), True)
    held, out, at = "", "", 0
    while at < len(tokens):
        n = rng.randint(1, 7)
        held += decoder.feed(tokens[at : at + n])
        cut = rng.randint(0, len(held)) if at + n < len(tokens) else len(held)
        out += painter.feed(held[:cut], tokens[at : at + n], sources[at : at + n])
        held, at = held[cut:], at + n
    assert bare(out) == text, f"seed {seed}"
    ends, place = [], 0
    for character in text:
        place += len(character.encode())
        ends.append(sources[place - 1])
    coloured = [(code, c) for code, part in runs(out) for c in part]
    wanted = [(drafts.SOURCES[s][1], c) for s, c in zip(ends, text, strict=True)]
    assert coloured == wanted, f"seed {seed}"


def test_without_colours_the_text_passes() -> None:
    assert Painter(ByteDecoder(), False).feed("abc", b"abc", ("lookup",) * 3) == "abc"
    assert legend(False) == "drafted by: context dflash mtp target"
    assert bare(legend(True)) == legend(False) != legend(True)


def test_the_line_at_the_end() -> None:
    spec = Speculation(2, 5, 6, 3, {"lookup": 2, "mtp": 1, "dflash": 0})
    assert summary(spec) == "2.50 tokens a step · accepted: context 2, mtp 1"
    assert summary(Speculation(4, 4)) == "1.00 tokens a step · no draft was accepted"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("no", "force", "terminal", "wanted"),
    [
        ("", "", True, True),
        ("", "", False, False),
        ("1", "", True, False),
        ("", "1", False, True),
        ("1", "1", True, False),
    ],
)
def test_when_there_are_colours(
    monkeypatch: pytest.MonkeyPatch, no: str, force: str, terminal: bool, wanted: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no)
    monkeypatch.setenv("FORCE_COLOR", force)
    assert wants_colour(Terminal() if terminal else io.StringIO()) is wanted


def test_chat_colours_an_answer_and_sums_it_up() -> None:
    class Drafted(Speaker):
        def stream(self, prompt: list[int], params: Any) -> Any:
            yield Delta("he", None, Output("", tuple(b"hel"), ("target", "lookup", "mtp")))
            last = Output("", tuple(b"lo"), ("mtp", "target"), speculation=Speculation(2, 5))
            yield Delta("llo", "stop", last)

    talk = Talk("hi", speaker=Drafted())
    assert talk.said == "hello\n"
    lines = iter(["hi"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    out, err = io.StringIO(), io.StringIO()
    Session(talk.talk, read, out, err, painter=lambda: Painter(ByteDecoder(), True)).run()
    assert runs(out.getvalue()) == [("", "h"), ("32", "e"), ("33", "ll"), ("", "o\n")]
    assert "2.50 tokens a step" in err.getvalue()
    assert talk.talk.turns[-1].answer["content"] == "hello", "what is kept has no colours"


def test_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path))
    line = ["run", "tick tock tick tock", "--model", path, "--raw", "--max-tokens", "40"]
    line += ["--temperature", "0", "--threads", "1", "--speculation-row-cost", "0.01"]
    line += ["--limits-context", "256", "--ignore-eos"]
    texts = []
    for more, force in (((), ""), (("--show-drafts",), ""), (("--show-drafts",), "1")):
        monkeypatch.setenv("FORCE_COLOR", force)
        monkeypatch.delenv("NO_COLOR", raising=False)
        with pytest.raises(SystemExit) as left:
            main([*line, *more])
        assert not left.value.code
        told = capsys.readouterr()
        texts.append(told.out)
        assert ("tokens a step ·" in told.err) == ("drafted by: " in told.err) == bool(more)
    assert texts[0] == texts[1] == bare(texts[2])
    assert "\x1b[32m" in texts[2]


def test_json_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "x", "--json", "--show-drafts"])
    assert left.value.code == 2
    assert "leave out --json" in capsys.readouterr().err
