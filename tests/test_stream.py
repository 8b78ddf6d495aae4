"""The output machine: one law over cuts, one twin over whole texts, and what a client must see.

In transcripts ⟨think⟩ is a marker. With a vocabulary that has the markers as tokens it is the
token, and ``<think>`` is text; without, both are the text ``<think>``.
"""

from __future__ import annotations

import itertools
import json
import lzma
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from slipstream.text.stream import (
    Call,
    CallBegin,
    CallEnd,
    CallText,
    ContentText,
    Event,
    Finish,
    Form,
    Message,
    Reasoning,
    ReasoningText,
    Stream,
    detect,
    form,
    merge,
)
from slipstream.text.template import Template
from slipstream.text.tokenizer import Tokenizer
from slipstream.text.tools import Gemma, Hermes, Literals, Llama, QwenXml, Tool, coerce, types_of
from tests.shared import shared

THINK = Reasoning()
CHANNEL = Reasoning("<|channel>", "<channel|>", label="thought", gap=0)

DEFS = {"color": {"type": "string", "enum": ["red"]}, "loop": {"$ref": "#/$defs/loop"}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "$defs": DEFS,
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "force": {"type": "boolean"},
                    "gone": {"type": "null"},
                    "map": {"type": "object"},
                    "list": {"type": "array"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "any": {"type": ["integer", "string", "null"]},
                    "switch": {"type": ["boolean", "string"]},
                    "color": {"$ref": "#/$defs/color"},
                    "loop": {"$ref": "#/$defs/loop"},
                    "free": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

ALL_IDS = {
    marker: number
    for number, marker in enumerate(
        (
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"),
            *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        ),
        start=1000,
    )
}
FORMS = {
    "qwen": form(THINK, QwenXml(), ALL_IDS.get),
    "hermes": form(THINK, Hermes(), ALL_IDS.get),
    "llama": form(None, Llama(), ALL_IDS.get),
    "gemma": form(CHANNEL, Gemma(), ALL_IDS.get),
    "think": form(THINK, None, ALL_IDS.get),
    "plain": Form(),
}


@dataclass(frozen=True)
class Transcript:
    form: str
    text: str
    thinking: bool = False
    stops: tuple[str, ...] = ()
    stops_in_reasoning: bool = False
    tools: bool = True
    by_id: bool = True
    finish: str = "stop"
    # What a client sees, where it is written out.
    reasoning: str | None = None
    content: str | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    checked: bool = False

    @property
    def shape(self) -> Form:
        shape = FORMS[self.form]
        return shape if self.by_id else replace(shape, ids={})

    def stream(self, tokenizer: Tokenizer | None = None, shape: Form | None = None) -> Stream:
        return Stream(
            shape or self.shape,
            tokenizer,
            thinking=self.thinking,
            tools=TOOLS if self.tools else None,
            stops=self.stops,
            stops_in_reasoning=self.stops_in_reasoning,
            make_id="call_{}".format,
        )

    def marked(self, stream: Stream | None = None) -> str:
        """The text as `Stream.feed_text` takes it."""
        stream = stream or self.stream()
        return re.sub("⟨(.*?)⟩", lambda m: stream.mark(f"<{m[1]}>"), self.text)


def xml(*parameters: tuple[str, str], name: str = "edit") -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"⟨tool_call⟩\n<function={name}>\n{body}</function>\n⟨/tool_call⟩"


def gemma(arguments: str, name: str = "edit") -> str:
    return f"⟨|tool_call⟩call:{name}{{{arguments}}}⟨tool_call|⟩".replace('""', '⟨|"|⟩')


def corpus() -> Iterable[Transcript]:
    """The transcripts of tests/data/streams, with each vocabulary that they are written for."""
    for file in sorted((Path(__file__).parent / "data" / "streams").glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            entry = json.loads(line)
            markers = entry.pop("markers")
            entry["stops"] = tuple(entry.get("stops", ()))
            entry["calls"] = [tuple(call) for call in entry.get("calls", [])]
            for by_id, name in ((True, "tokens"), (False, "text")):
                if name in markers:
                    yield Transcript(**entry, by_id=by_id)


DEEP = Transcript("qwen", xml(("list", "[" * 5000)))  # too deep to be a list, so it is a string
CORPUS = [*corpus(), DEEP, replace(DEEP, by_id=False)]


def run(transcript: Transcript, cuts: Iterable[int]) -> tuple[list[Event], Message]:
    stream = transcript.stream()
    text = transcript.marked(stream)
    events: list[Event] = []
    for begin, end in itertools.pairwise((0, *cuts, len(text))):
        events += stream.feed_text(text[begin:end])
    events += stream.finish(transcript.finish)  # type: ignore[arg-type]
    assert stream.finish("stop") == [] and stream.feed_text("more") == []
    return merge(events), stream.message()


def told(events: Iterable[Event]) -> Message:
    """The message that a client makes of events."""
    reasoning, content, finish = "", "", None
    calls: list[Call] = []
    for event in events:
        assert finish is None, "something follows the end"
        if isinstance(event, ReasoningText):
            reasoning += event.text
        elif isinstance(event, ContentText):
            content += event.text
        elif isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append(Call(event.id, event.name, "", False))
        elif isinstance(event, CallText):
            assert event.index == len(calls) - 1
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + event.text)
        elif isinstance(event, CallEnd):
            assert event.index == len(calls) - 1
            calls[-1] = replace(calls[-1], complete=event.complete)
        else:
            finish = event
    return Message(reasoning or None, content or None, tuple(calls), finish)


# The twin: whole texts only, by regular expressions and recursion.

S = r"[ \t\r\n]*"
BEGUN = (
    r"-?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d*)?|t(r(ue?)?)?|f(a(l(se?)?)?)?|n(u(ll?)?)?"  # a scalar
)
NAME = r"[^<>{}\r\n\"\ud800-\udfff]{0,256}"


class Twin:
    """The same transcript read in one piece; shares no code with what it is compared with."""

    def __init__(self, transcript: Transcript) -> None:
        stream = transcript.stream()
        self.t = transcript
        self.text = transcript.marked(stream)
        self.whole = transcript.finish == "stop"
        self.literal: dict[str, str] = {}
        self.items: list[tuple[Any, ...]] = []
        self.declared = {t["function"]["name"]: t["function"] for t in TOOLS}
        shape = transcript.shape
        self.pair = shape.reasoning
        self.format = shape.calls if transcript.tools else None
        for marker in ALL_IDS:
            mark = stream.mark(marker)
            if mark != marker:
                self.literal[mark] = marker
        self.mark = stream.mark

    def spell(self, text: str) -> str:
        return "".join(self.literal.get(c, c) for c in text)

    def message(self) -> Message:
        self.split()
        reasoning, content, calls = "", "", []
        finish: Finish | None = None

        def search(text: str) -> tuple[str, str | None]:
            hits = [
                (m.end(), m.start(), s)
                for s in self.t.stops
                for m in [re.search(re.escape(s), text)]
                if m
            ]
            if not hits:
                return text, None
            _, begin, stop = min(hits)
            return text[:begin], stop

        hit = None
        for kind, *rest in self.items:
            if kind == "reasoning":
                text, hit = search(rest[0]) if self.t.stops_in_reasoning else (rest[0], None)
                reasoning += text
            elif kind == "call":
                calls.append(Call(f"call_{len(calls)}", *rest))
            else:
                raw, before_call, after_call = rest
                text, hit = search(raw)
                touches = after_call or (before_call and hit is None)
                if self.format is None or text.strip() or not touches:
                    content += text
            if hit is not None:
                break
        reason = "stop" if hit is not None else self.t.finish
        if reason == "stop" and any(call.complete for call in calls):
            reason = "tool_calls"
        finish = Finish(reason, hit)  # type: ignore[arg-type]
        return Message(reasoning or None, content or None, tuple(calls), finish)

    def split(self) -> None:
        text, at = self.text, 0
        thinks, entering = self.t.thinking, True
        fresh, after_call = True, False
        opening = self.mark(self.pair.open) if self.pair else None
        closing = self.mark(self.pair.close) if self.pair else None
        starts = tuple(map(self.mark, self.format.opens)) if self.format else ()
        words = self.format.words if self.format else ()
        while True:
            said = ""
            if thinks:
                assert self.pair is not None
                if entering:
                    m = re.compile(rf"(?:{re.escape(self.pair.label)})?(?:\r?\n)?").match(text, at)
                    at = m.end() if m else at
                    entering = False
                literals = [x for x in (opening, closing, *starts) if x]
                while True:
                    m = self.find(literals, at)
                    said += text[at : m.start()] if m else text[at:]
                    if m is None:
                        self.items.append(("reasoning", self.spell(said)))
                        return
                    at = m.start()
                    if m.group() in starts:
                        made = self.calls(at)
                        if made is None:
                            said += m.group()
                            at = m.end()
                            continue
                        self.items.append(("reasoning", self.spell(re.sub(r"\r?\n\Z", "", said))))
                        at = self.enter(made)
                        after_call = True
                        break
                    at = m.end()
                    if m.group() == closing:
                        self.items.append(("reasoning", self.spell(re.sub(r"\r?\n\Z", "", said))))
                        at = self.gap(at)
                        after_call = False
                        break
                thinks, fresh = False, True
                continue
            literals = [x for x in (opening, closing, *starts, *words) if x]
            while True:
                if self.format is not None and self.format.bare and fresh:
                    blank = re.compile(S).match(text, at)
                    assert blank is not None
                    said += blank.group()
                    at = blank.end()
                    if text.startswith("{", at):
                        made = self.calls(at)
                        if made is not None:
                            self.items.append(("content", self.spell(said), True, after_call))
                            said = ""
                            at = self.enter(made)
                            after_call = True
                            continue
                        said += "{"
                        at += 1
                        fresh = False
                m = self.find(literals, at)
                new = text[at : m.start()] if m else text[at:]
                said += new
                fresh = fresh and not new.strip()
                if m is None:
                    self.items.append(("content", self.spell(said), False, after_call))
                    return
                at = m.start()
                if m.group() in (*starts, *words):
                    made = self.calls(at)
                    if made is None:
                        said += m.group()
                        at = m.end()
                        fresh = False
                        continue
                    self.items.append(("content", self.spell(said), True, after_call))
                    said = ""
                    at = self.enter(made)
                    after_call = True
                    continue
                at = m.end()
                if m.group() not in self.literal and not fresh:
                    said += m.group()
                elif m.group() == opening:
                    self.items.append(("content", self.spell(said), False, after_call))
                    after_call = False
                    thinks = entering = True
                    break
                elif fresh:
                    at = self.gap(at)

    def find(self, literals: list[str], at: int) -> re.Match[str] | None:
        if not literals:
            return None
        return re.compile("|".join(map(re.escape, literals))).search(self.text, at)

    def gap(self, at: int) -> int:
        assert self.pair is not None
        m = re.compile(rf"(?:\r?\n){{0,{self.pair.gap}}}").match(self.text, at)
        assert m is not None
        return m.end()

    def enter(self, made: tuple[list[tuple[str, str, bool]], int]) -> int:
        for i, (name, arguments, complete) in enumerate(made[0]):
            if i:  # nothing is said between calls that were read together
                self.items.append(("content", "", True, True))
            self.items.append(("call", name, self.spell(arguments), complete))
        return made[1]

    def calls(self, at: int) -> tuple[list[tuple[str, str, bool]], int] | None:
        assert self.format is not None
        read: dict[str, Callable[[int], Any]] = {
            "qwen-xml": self.xml,
            "hermes": self.hermes,
            "llama": self.llama,
            "gemma": self.gemma,
        }
        return read[self.format.title](at)

    # Qwen

    def half(self, *literals: str) -> str:
        """A pattern for the end of the text, perhaps behind a part of a literal."""
        parts = {x[:i] for x in literals for i in range(len(x) + 1)}
        return "(?:" + "|".join(map(re.escape, sorted(parts, key=len, reverse=True))) + r")\Z"

    def xml(self, at: int) -> tuple[list[tuple[str, str, bool]], int] | None:
        text = self.text
        o, c = (re.escape(self.mark(m)) for m in ("<tool_call>", "</tool_call>"))
        tags = ("<parameter=", "</function>", self.mark("<tool_call>"), self.mark("</tool_call>"))
        follow = re.compile(
            rf"{S}(?:(<parameter=)(?=({NAME})>)(?!{S}>)|</function>|{o}|{c}|<function="
            rf"|(\Z|{self.half(*tags, '<function=')}|<parameter={NAME}\Z))"
        )
        head = re.compile(rf"(?:{o}{S}){{1,4}}<function=({NAME})>").match(text, at)
        marked = head is not None
        head = head or re.compile(rf"<function=({NAME})>").match(text, at)
        made: list[tuple[str, str, bool]] = []
        while head is not None:
            name = head[1].strip()
            after = follow.match(text, head.end())
            if not name or not (marked or name in self.declared) or after is None:
                break
            if after[1] is not None and not after[2].strip():
                break
            if after[3] is not None and not self.whole:
                break
            arguments, whole, at = self.body(name, head.end(), follow, o, c)
            made.append((name, arguments, whole))
            if not whole:
                break
            end = re.compile(rf"{S}{c}").match(text, at)
            if end is not None:
                at = end.end()
                break
            head = re.compile(rf"{S}<function=({NAME})>").match(text, at)
        return (made, at) if made else None

    def body(
        self, name: str, at: int, follow: re.Pattern[str], o: str, c: str
    ) -> tuple[str, bool, int]:
        text = self.text
        schema = self.declared.get(name, {}).get("parameters")
        declared = None if schema is None else schema["properties"]
        blank = re.compile(S)
        at = blank.match(text, at).end()  # type: ignore[union-attr]
        out: list[str] = []
        given: list[str] = []
        tag = re.compile(rf"</parameter>|</function>|{c}|<parameter=")
        last = re.compile(
            rf"{S}(?:{c}|{o}|<function=|\Z|"
            + self.half(self.mark("<tool_call>"), self.mark("</tool_call>"), "<function=")
            + ")"
        )
        next_call = re.compile(rf"{S}(?:{o}|\Z|{self.half(self.mark('<tool_call>'))})")
        while True:
            m = re.compile(rf"<parameter=({NAME})>(?:\r?\n)?").match(text, at)
            if m is None:
                break
            key = m[1].strip()
            begin = m.end()
            lead = f"{', ' if given else '{'}{json.dumps(key, ensure_ascii=False)}: "
            given.append(key)
            end, at, closed = len(text), len(text), False
            for m in tag.finditer(text, begin):
                if m.group() == "</parameter>":
                    after = follow.match(text, m.end())
                    closed = after is not None and (after[1] is None or bool(after[2].strip()))
                    at = blank.match(text, m.end()).end()  # type: ignore[union-attr]
                elif m.group() == "<parameter=":
                    line = m.start() == begin or text[m.start() - 1] == "\n"
                    new = re.compile(rf"<parameter=({NAME})>").match(text, m.start())
                    closed = line and new is not None and bool(new[1].strip())
                    if closed and new is not None:
                        new_key = new[1].strip()
                        closed = new_key not in given and (declared is None or new_key in declared)
                    at = m.start()
                else:
                    rule = last if m.group() == "</function>" else next_call
                    closed = rule.match(text, m.end()) is not None
                    at = m.start()
                if closed:
                    end = m.start()
                    break
            if not closed:
                at = len(text)
            raw = text[begin:end]
            if not closed and not self.whole:
                out.append(lead + json.dumps(self.spell(raw), ensure_ascii=False)[:-1])
                return "".join(out), False, at
            value = self.typed(self.spell(re.sub(r"\r?\n\Z", "", raw)), key, schema)
            out.append(lead + value)
        m = re.compile(rf"(</function>)|{c}|{o}|<function=").match(text, at)
        if m is None and not self.whole:
            return "".join(out), False, at
        if m is not None and m[1]:
            at = m.end()
        return "".join(out) + ("}" if given else "{}"), True, at

    def typed(self, text: str, key: str, schema: Any) -> str:
        types: set[str] = set()

        def walk(part: Any, depth: int = 0) -> None:
            if depth > 9 or not isinstance(part, dict):
                return
            kind = part.get("type")
            types.update(kind if isinstance(kind, list) else [kind] if kind else [])
            for other in part.get("anyOf", []):
                walk(other, depth + 1)
            if "$ref" in part:
                walk(DEFS.get(part["$ref"].rpartition("/")[2]), depth + 1)

        walk((schema or {}).get("properties", {}).get(key))
        short, value = text.strip(), text

        def refuse(_: str) -> None:
            raise ValueError

        try:
            parsed = json.loads(short, parse_constant=refuse)
        except (ValueError, RecursionError):
            parsed = ...
        number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", short, re.ASCII)
        if "null" in types and short.lower() == "null":
            return "null"
        if "integer" in types and number and float(short).is_integer() and "e" not in short.lower():
            return str(int(float(short)))
        if "number" in types and number and abs(float(short)) < 1e308:
            return short if isinstance(parsed, int | float) else repr(float(short))
        if "boolean" in types and short.lower() in ("true", "false", "1", "0"):
            return "true" if short.lower() in ("true", "1") else "false"
        if "object" in types and isinstance(parsed, dict):
            return short
        if "array" in types and isinstance(parsed, list):
            return short
        return json.dumps(value, ensure_ascii=False)

    # JSON

    class Bad(Exception):
        pass

    def json(self, at: int, out: list[str]) -> int:
        """A JSON value at ``at``; its text into out. Raises Bad with where it breaks off."""
        text = self.text

        def blank(at: int) -> int:
            m = re.compile(S).match(text, at)
            assert m is not None
            out.append(m.group())
            if m.end() == len(text):
                raise self.Bad(m.end())
            return m.end()

        def string(at: int) -> int:
            if text[at] != '"':
                raise self.Bad(at)
            out.append('"')
            at += 1
            while True:
                m = re.compile(r'[^"\\]+').match(text, at)
                if m:
                    for c in m.group():
                        out.append(json.dumps(c)[1:-1] if c < " " else c)
                    at = m.end()
                if at == len(text):
                    raise self.Bad(at)
                if text[at] == '"':
                    out.append('"')
                    return at + 1
                m = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})').match(text, at)
                if m is None:
                    if re.compile(r"\\(u[0-9a-fA-F]{0,3})?\Z").match(text, at):
                        out.append(text[at:])
                        at = len(text)
                    raise self.Bad(at)
                out.append(m.group())
                at = m.end()

        at = blank(at)
        if text[at] == '"':
            return string(at)
        if text[at] in "{[":
            pairs, close = text[at] == "{", "}" if text[at] == "{" else "]"
            out.append(text[at])
            at = blank(at + 1)
            if text[at] == close:
                out.append(close)
                return at + 1
            while True:
                if pairs:
                    at = blank(string(at))
                    if text[at] != ":":
                        raise self.Bad(at)
                    out.append(":")
                    at += 1
                at = blank(self.json(at, out))
                if text[at] not in ("," + close):
                    raise self.Bad(at)
                out.append(text[at])
                if text[at] == close:
                    return at + 1
                at = blank(at + 1)
        m = re.compile(r"[-+.0-9A-Za-z]*").match(text, at)
        assert m is not None
        if m.end() == len(text):
            if re.fullmatch(BEGUN, m.group()):
                out.append(m.group())
                at = m.end()
            raise self.Bad(at)
        if not re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", m.group()):
            raise self.Bad(at)
        out.append(m.group())
        return m.end()

    def envelope(self, at: int, declared: bool) -> tuple[list[tuple[str, str, bool]], int] | None:
        """A call that begins with a brace at ``at``."""
        text = self.text
        name: str | None = None
        arguments: str | None = None
        done: tuple[tuple[str, str, bool], int] | None = None
        try:
            while True:
                m = re.compile(S).match(text, at + 1)
                assert m is not None
                at = m.end()
                if text[at : at + 1] == "}" and name is not None:
                    return [done[0] if done else (name, arguments or "{}", True)], at + 1
                if text[at : at + 1] != '"':
                    break
                key, at = self.string(at)
                m = re.compile(rf"{S}:{S}").match(text, at)
                if m is None:
                    break
                at = m.end()
                char = text[at : at + 1]
                if key == "name" and name is None:
                    if char != '"':
                        break
                    name, at = self.string(at)
                    if not name or (declared and name not in self.declared):
                        break
                elif key in ("arguments", "parameters") and arguments is None:
                    parts: list[str] = []
                    if char == "{" and name is not None:
                        try:
                            at = self.json(at, parts)
                        except self.Bad as bad:
                            return [(name, "".join(parts), False)], bad.args[0]
                        arguments = "".join(parts)
                        done = (name, arguments, True), at
                    elif char == '"':
                        arguments, at = self.string(at)
                        if not isinstance(json.loads(arguments), dict):
                            break
                    elif char in "{n":
                        at = self.json(at, parts)
                        arguments = "{}" if char == "n" else "".join(parts)
                    else:
                        break
                elif declared and key not in ("type", "id"):
                    break
                else:
                    at = self.json(at, [])
                m = re.compile(S).match(text, at)
                assert m is not None
                at = m.end() - 1
                if text[at + 1 : at + 2] == ",":
                    at += 1
                elif text[at + 1 : at + 2] != "}":
                    break
        except (self.Bad, ValueError):
            pass
        return ([done[0]], done[1]) if done else None

    def string(self, at: int) -> tuple[str, int]:
        if self.text[at : at + 1] != '"':
            raise self.Bad(at)
        parts: list[str] = []
        at = self.json(at, parts)
        value = json.loads(self.spell("".join(parts)))
        value.encode()  # raises ValueError for half a character
        return value, at

    def close(self, at: int, marker: str) -> int:
        m = re.compile(S + re.escape(self.mark(marker))).match(self.text, at)
        return m.end() if m else at

    def hermes(self, at: int) -> tuple[list[tuple[str, str, bool]], int] | None:
        o = re.escape(self.mark("<tool_call>"))
        m = re.compile(rf"(?:{o}{S}){{1,4}}(?={{)").match(self.text, at)
        made = self.envelope(m.end(), False) if m else None
        return made and (made[0], self.close(made[1], "</tool_call>"))

    def llama(self, at: int) -> tuple[list[tuple[str, str, bool]], int] | None:
        tag = re.escape(self.mark("<|python_tag|>"))
        calls: list[tuple[str, str, bool]] = []
        between = ""
        while True:
            m = re.compile(rf"{between}({tag}{S})?(?={{)").match(self.text, at)
            made = self.envelope(m.end(), m[1] is None) if m else None
            if made is None:
                return (calls, at) if calls else None
            calls += made[0]
            at = made[1]
            between = rf"{S}(?:;{S})?"

    def gemma(self, at: int) -> tuple[list[tuple[str, str, bool]], int] | None:
        text = self.text
        o, q = re.escape(self.mark("<|tool_call>")), re.escape(self.mark('<|"|>'))
        m = re.compile(rf"(?:{o}{S}){{1,4}}call:({NAME})(?={{)").match(text, at)
        if m is None or not m[1].strip():
            return None
        out: list[str] = []
        word = r"[^<>{}\[\]:,\r\n\"\ud800-\udfff]{1,256}"

        def element(at: int, lead: str) -> int:
            m = re.compile(rf"{q}(.*?)({q}|\Z)", re.DOTALL).match(text, at)
            if m:
                value = json.dumps(self.spell(m[1]), ensure_ascii=False)
                out.append(lead + (value if m[2] else value[:-1]))
                if not m[2]:
                    raise self.Bad(m.end())
                return m.end()
            if text[at : at + 1] in ("{", "["):
                out.append(lead)
                return group(at)
            m = re.compile(r"[^,{}\[\]\ud800-\udfff]*").match(text, at)
            assert m is not None
            value = m.group().strip()
            if m.end() == len(text):
                good = re.fullmatch(BEGUN, value)
                out.append(lead + (value if good else json.dumps(value, ensure_ascii=False)[:-1]))
                raise self.Bad(m.end())
            if not value:
                raise self.Bad(at)
            known = re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", value)
            out.append(lead + (value if known else json.dumps(value, ensure_ascii=False)))
            return m.end()

        def group(at: int) -> int:
            pairs, close = text[at] == "{", "}" if text[at] == "{" else "]"
            out.append(text[at])
            at += 1
            lead = ""
            while True:
                m = re.compile(S).match(text, at)
                assert m is not None
                at = m.end()
                if at == len(text):
                    raise self.Bad(at)
                if text[at] == close:
                    out.append(close)
                    return at + 1
                if pairs:
                    m = re.compile(rf"({q})?({word})?\Z").match(text, at)
                    if m:
                        key = json.dumps(m[2] or "", ensure_ascii=False)
                        out.append(lead + key[:-1])
                        raise self.Bad(m.end())
                    m = re.compile(rf"(?:{q}({word}){q}|({word})):{S}").match(text, at)
                    key = ((m[1] or m[2]) if m else "").strip()
                    if m is None or not key:
                        raise self.Bad(at)
                    at = element(m.end(), f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
                else:
                    at = element(at, lead)
                lead = ", "
                m = re.compile(rf"{S}(,|{re.escape(close)}|\Z)").match(text, at)
                if m is None:
                    raise self.Bad(re.compile(S).match(text, at).end())  # type: ignore[union-attr]
                if m[1] == "":
                    raise self.Bad(m.end())
                at = m.end() if m[1] == "," else m.start(1)

        try:
            end = group(m.end())
        except self.Bad as bad:
            return [(m[1].strip(), "".join(out), False)], bad.args[0]
        return [(m[1].strip(), "".join(out), True)], self.close(end, "<tool_call|>")


NAMES = [f"{i}-{t.form}-{'id' if t.by_id else 'text'}" for i, t in enumerate(CORPUS)]


@pytest.mark.parametrize("transcript", CORPUS, ids=NAMES)
def test_what_a_client_sees(transcript: Transcript) -> None:
    _, message = run(transcript, ())
    assert message == Twin(transcript).message()
    for call in message.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
        else:
            with pytest.raises(ValueError):
                json.loads(call.arguments)
    if transcript.checked:
        seen = [(call.name, json.loads(call.arguments)) for call in message.calls]
        assert (message.reasoning, message.content) == (
            transcript.reasoning,
            transcript.content or None,
        )
        assert seen == transcript.calls


@pytest.mark.parametrize("transcript", CORPUS, ids=NAMES)
def test_cuts_change_nothing(transcript: Transcript) -> None:
    size = len(transcript.marked())
    events, message = run(transcript, ())
    assert told(events) == message
    assert run(transcript, range(1, size)) == (events, message)
    if size > 1000:
        return
    cuts: Iterable[Sequence[int]] = [(cut,) for cut in range(1, size)]
    if size <= 40:
        cuts = itertools.chain(cuts, itertools.combinations(range(1, size), 2))
    for pair in cuts:
        assert run(transcript, pair) == (events, message), pair
    for seed in range(20):
        rng = random.Random(seed)
        some = sorted(rng.sample(range(size + 1), rng.randint(0, size)))
        assert run(transcript, some) == (events, message), some


PIECES = [
    *("<think>", "</think>", "⟨think⟩", "⟨/think⟩", "⟨tool_call⟩", "⟨/tool_call⟩", "<tool_call>"),
    *("<function=edit>", "<function=now>", "<function=other>", "</function>", "</parameter>"),
    *("<parameter=path>", "<parameter=count>", "<parameter=map>", "<parameter=zz>", "</param"),
    *('{"name": "now"', ', "arguments": {', "{", "}", "[", "]", ",", ":", '"', "\\", "\\u00", "e9"),
    *('"a": ', "1", "-0.5", "e3", "true", "nul", "l", ";", "⟨|python_tag|⟩", "}}", '"b"'),
    *("⟨|tool_call⟩", "⟨tool_call|⟩", '⟨|"|⟩', "call:now{", "a:", "⟨|channel⟩", "⟨channel|⟩"),
    *("thought", "\n", "\r\n", "\r", " ", "x", "END", "EN", "D", "é", "🙂", "<", "⟨tool_call⟩\n"),
    *('⟨tool_call⟩{"name": "edit", "arguments": {"a": ', "⟨tool_call⟩<function=edit><parameter=text>"),
    "</parameter></function>⟨/tool_call⟩",
]  # fmt: skip


@st.composite
def transcripts(draw: st.DrawFn) -> Transcript:
    name = draw(st.sampled_from(sorted(FORMS)))
    return Transcript(
        name,
        "".join(draw(st.lists(st.sampled_from(PIECES), max_size=24))),
        thinking=FORMS[name].reasoning is not None and draw(st.booleans()),
        stops=draw(st.sampled_from([(), ("END",), ("\n\n", "EN"), ("x\r", "</par", '"a')])),
        stops_in_reasoning=draw(st.booleans()),
        tools=draw(st.sampled_from([True, True, True, False])),
        by_id=draw(st.booleans()),
        finish=draw(st.sampled_from(["stop", "length"])),
    )


@settings(max_examples=800, deadline=None)
@given(transcripts(), st.randoms(use_true_random=False))
def test_random_text(transcript: Transcript, rng: random.Random) -> None:
    events, message = run(transcript, ())
    assert told(events) == message
    assert message == Twin(transcript).message()
    size = len(transcript.marked())
    assert run(transcript, range(1, size)) == (events, message)
    for _ in range(3):
        some = sorted(rng.sample(range(size + 1), rng.randint(0, size)))
        assert run(transcript, some) == (events, message), some


# Tokens


def byte_tokenizer() -> Tokenizer:
    """A token for every byte, and one for every marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    for marker in ALL_IDS:
        special = "|" in marker  # some families have their markers among the control tokens
        added = AddedToken(marker, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([added])
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def by_byte() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = shared("qwen35_tokenizer.json.xz")
    if path is None:
        pytest.skip("the Qwen3.5 vocabulary is not beside this checkout")
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "tokenizer.json").write_bytes(lzma.decompress(path.read_bytes()))
    return Tokenizer.from_directory(folder)


def token_ids(tokenizer: Tokenizer, transcript: Transcript) -> list[int]:
    ids: list[int] = []
    for i, part in enumerate(re.split("⟨(.*?)⟩", transcript.text)):
        marker = tokenizer.token_id(f"<{part}>") if i % 2 and transcript.by_id else None
        plain = f"<{part}>" if i % 2 else part
        ids += tokenizer.encode_plain(plain) if marker is None else [marker]
    return ids


def check_tokens(tokenizer: Tokenizer, transcript: Transcript) -> None:
    known = transcript.shape
    shape = form(known.reasoning, known.calls, tokenizer.token_id if known.ids else lambda _: None)
    expected = run(transcript, ())
    ids = token_ids(tokenizer, transcript)
    end = tokenizer.token_id("<|end|>") or tokenizer.token_id("<|im_end|>")
    rng = random.Random(len(ids))
    counts = set()
    for cuts in (
        range(1, len(ids)),
        (),
        *(sorted(rng.sample(range(len(ids)), rng.randint(0, len(ids)))) for _ in range(5)),
    ):
        stream = transcript.stream(tokenizer, shape)
        events: list[Event] = []
        for begin, stop in itertools.pairwise((0, *cuts, len(ids))):
            events += stream.feed(ids[begin:stop])
        if end is not None and transcript.finish == "stop":
            events += stream.feed([end])  # shows nothing
        events += stream.finish(transcript.finish)  # type: ignore[arg-type]
        assert (merge(events), stream.message()) == expected, list(cuts)
        counts.add((stream.tokens, stream.thinking_tokens))
    assert len(counts) == 1


@pytest.mark.parametrize("transcript", [t for t in CORPUS if len(t.text) < 1000])
def test_every_byte_a_token(transcript: Transcript, by_byte: Tokenizer) -> None:
    check_tokens(by_byte, transcript)


def test_tokens_of_qwen(qwen: Tokenizer) -> None:
    # The vocabulary normalizes nothing that the transcripts hold.
    chosen = [t for t in CORPUS if t.form in ("qwen", "hermes", "think") and len(t.text) < 1000]
    for transcript in chosen:
        check_tokens(qwen, transcript)


def test_a_character_over_tokens(by_byte: Tokenizer) -> None:
    ids = by_byte.encode_plain("a🙂b")
    assert len(ids) == 6
    stream = Stream(Form(), by_byte)
    shown = [stream.feed([i]) for i in ids]
    assert shown == [[ContentText("a")], [], [], [], [ContentText("🙂")], [ContentText("b")]]
    cut = Stream(Form(), by_byte)
    assert cut.feed(ids[:3]) == [ContentText("a")]
    assert cut.finish("length") == [Finish("length")]  # half a character says nothing
    ended = Stream(Form(), by_byte)
    ended.feed(ids[:3])
    assert ended.finish("stop") == [ContentText("\ufffd"), Finish("stop")]
    marked = Stream(form(THINK, None, by_byte.token_id), by_byte, thinking=True)
    closing = by_byte.token_id("</think>")
    assert closing is not None
    assert merge(marked.feed([*ids[:3], closing, *ids[:1]])) == [
        ReasoningText("a\ufffd"),
        ContentText("a"),
    ]


def test_a_stop_string_ends_the_count_of_tokens(by_byte: Tokenizer) -> None:
    stream = Stream(Form(), by_byte, stops=["END"])
    assert stream.feed(by_byte.encode_plain("one EN")) == [ContentText("one ")]
    events = stream.feed(by_byte.encode_plain("D two"))
    assert events == [Finish("stop", "END")] == [stream.finished]
    assert stream.tokens == len("one END")
    assert stream.feed([1, 2]) == stream.finish("length") == []
    assert stream.message() == Message(None, "one ", (), Finish("stop", "END"))


def test_text_is_not_taken_for_marks() -> None:
    stream = Transcript("think", "").stream()
    mark = stream.mark("</think>")
    assert stream.feed_text("a\ud8ffb" + mark + "c\ud800") == [ContentText("a\ufffdbc")]


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="without markers"):
        Stream(Form(), thinking=True)
    with pytest.raises(ValueError, match="need a tokenizer"):
        Stream(Form()).feed([1])
    with pytest.raises(ValueError, match="empty stop string"):
        Stream(Form(), stops=[""])


def test_the_shorter_marker_wins_however_the_text_is_cut() -> None:
    shape = Form(Reasoning(open="<t", close="<te"))
    assert Stream(shape).feed_text("<teHm<te") == [ReasoningText("eHme")]
    found = Literals(["abc", "ab"])
    assert found.strings == ("ab", "abc") and found.final("xa", 0) == 1


# What waits


def pieces(transcript: Transcript) -> list[str]:
    """What each character makes visible."""
    stream = transcript.stream()
    shown = []
    for char in transcript.marked(stream):
        events = stream.feed_text(char)
        shown.append("".join(getattr(e, "text", "") for e in events))
    return shown


@pytest.mark.parametrize(
    ("transcript", "shown"),
    [
        (Transcript("think", "a<thx <"), ["a", "<", "t", "h", "x", " ", "<"]),
        (Transcript("think", "a<thx <", by_id=False), ["a", "", "", "", "<thx", " ", ""]),
        (Transcript("plain", "anEmENx", stops=("END",)), ["a", "n", "", "Em", "", "", "ENx"]),
        (Transcript("think", "a\n\n b", thinking=True), ["a", "", "\n", "\n ", "b"]),
        (Transcript("qwen", " \n a "), ["", "", "", " \n a", " "]),
        (Transcript("think", " \n a "), [" ", "\n", " ", "a", " "]),
        (Transcript("hermes", '⟨tool_call⟩{"name":"x","arguments":{"a": 12, "b'),
         ["{", '"', "a", '"', ":", " ", "12,", ' "', "b"]),
        (Transcript("qwen", "⟨tool_call⟩<function=edit><parameter=text>a\nb<c</p>"),
         ['{"text": "a', "\\nb", "<c", "</p>"]),
        (Transcript("qwen", "⟨tool_call⟩<function=edit><parameter=note>nuts"),
         ['{"note": "nut', "s"]),
    ],
)  # fmt: skip
def test_only_what_could_be_more_waits(transcript: Transcript, shown: list[str]) -> None:
    got = pieces(transcript)
    if transcript.form in ("hermes", "qwen") and len(got) > 20:  # the head of a call waits
        got = [piece for piece in got if piece]
    assert got == shown


# Budget


def test_the_budget_of_reasoning(by_byte: Tokenizer) -> None:
    shape = form(THINK, None, by_byte.token_id)
    stream = Stream(shape, by_byte, thinking=True, max_thinking_tokens=5)
    assert (stream.force, stream.thinking_left, stream.is_thinking) == (None, 5, True)
    stream.feed(by_byte.encode_plain("abcd"))
    assert (stream.force, stream.thinking_left) == (None, 1)
    stream.feed(by_byte.encode_plain("efg"))  # several tokens arrive at once
    assert (stream.force, stream.thinking_left) == ("\n</think>\n\n", -2)
    forced = by_byte.encode(stream.force)
    assert len(forced) == 4
    for id in forced:
        assert stream.force is not None or not stream.is_thinking
        stream.feed([id])
    assert stream.force is None and not stream.is_thinking
    stream.feed(by_byte.encode_plain("Hi"))
    stream.finish("stop")
    assert stream.message() == Message("abcdefg", "Hi", (), Finish("stop"))
    assert stream.thinking_tokens == 8


def test_the_budget_counts_from_the_marker_that_opens(by_byte: Tokenizer) -> None:
    shape = form(THINK, None, by_byte.token_id)
    stream = Stream(shape, by_byte, max_thinking_tokens=0, force_text="Enough.</think>")
    assert stream.force is None
    stream.feed(by_byte.encode_plain("a"))
    assert stream.force is None
    stream.feed(by_byte.encode("<think>"))
    assert stream.force == "Enough.</think>"
    stream.feed(by_byte.encode(stream.force))
    assert stream.force is None
    assert stream.message().reasoning == "Enough."
    ended = Stream(shape, by_byte, thinking=True, max_thinking_tokens=0)
    assert ended.force == "\n</think>\n\n"
    ended.finish("length")
    assert ended.force is None
    assert Stream(shape, by_byte, thinking=True).thinking_left is None


# Detection


def test_the_form_of_our_template(by_byte: Tokenizer) -> None:
    shape = detect(Template.qwen().source, by_byte.token_id)
    assert (shape.reasoning, shape.calls and shape.calls.title) == (THINK, "qwen-xml")
    assert shape.ids is not None
    assert set(shape.ids) == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    user = [{"role": "user", "content": "Does <think> open it? <think>"}]
    for thinking in (True, False):
        prompt = Template.qwen().render(user, enable_thinking=thinking)
        assert THINK.is_open(prompt) is thinking


@pytest.mark.parametrize(
    ("template", "reasoning", "calls"),
    [
        ("", None, None),
        ("{{ '<think>' }}", None, None),
        ("<think></think><tool_call>{{ tool_call | tojson }}</tool_call>", THINK, "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=p>\n", None, "qwen-xml"),
        ("<|channel>thought\n<channel|><|tool_call>call:", CHANNEL, "gemma"),
        ('<|start_header_id|>{"name": f, "parameters": {}}', None, "llama"),
        ("<|python_tag|>", None, "llama"),
        ("[THINK]x[/THINK]", Reasoning("[THINK]", "[/THINK]"), None),
    ],
)  # fmt: skip
def test_the_form_of_a_template(
    template: str, reasoning: Reasoning | None, calls: str | None
) -> None:
    shape = detect(template)
    assert (shape.reasoning, shape.calls.title if shape.calls else None) == (reasoning, calls)
    assert shape.ids == {}


def test_reasoning_that_a_prompt_opened() -> None:
    assert CHANNEL.is_open("<|turn>model\n<|channel>thought\n")
    assert not CHANNEL.is_open("<|turn>model\n<|channel>thought\n<channel|>")
    assert not THINK.is_open("<think>\n\n</think>\n\n") and not THINK.is_open("")


def test_calls_of_the_template_come_back(qwen: Tokenizer) -> None:
    """What the template writes of a message, read as an answer, is that message."""
    shape = detect(Template.qwen().source, qwen.token_id)
    calls = [
        {"name": "edit", "arguments": {"path": "a 🙂.py", "text": "\n x\n\n", "count": 3}},
        {"name": "edit", "arguments": {"map": {"ü": [1, None, "</parameter>"]}, "force": True}},
        {"name": "now", "arguments": {}},
    ]
    turns = [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": "Going.",
            "reasoning_content": "Hm.\n\nYes.",
            "tool_calls": [{"function": call} for call in calls],
        },
    ]
    template = Template.qwen()
    prompt = template.render(turns[:1])
    whole = template.render(turns, add_generation_prompt=False)
    assert whole.startswith(prompt)
    ids = qwen.encode(whole)[len(qwen.encode(prompt)) :]
    stream = Stream(shape, qwen, thinking=THINK.is_open(prompt), tools=TOOLS)
    stream.feed(ids)
    stream.finish("stop")
    message = stream.message()
    assert (message.reasoning, message.content) == ("Hm.\n\nYes.", "Going.\n\n")
    seen = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in message.calls]
    assert seen == calls
    assert message.finish == Finish("tool_calls")


# Schemas


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"oneOf": [{"type": "integer"}, {"anyOf": [{"type": "null"}, {}]}]}, {"integer", "null"}),
        ({"enum": [1, "a", None, True, 1.5, [], {}]},
         {"integer", "string", "null", "boolean", "number", "array", "object"}),
        ({"const": 1}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "https://example.org/x"}, set()),
        ({"$ref": "#/$defs/loop"}, set()),
        ({}, set()), (True, set()), (None, set()), ({"anyOf": 3, "enum": 4}, set()),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"a/b": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
    assert types_of(schema, root) == types


TYPES = ("null", "integer", "number", "boolean", "object", "array", "string")


@settings(deadline=None)
@given(st.text(), st.sets(st.sampled_from(TYPES)))
def test_a_typed_value_is_json(text: str, types: set[str]) -> None:
    value = json.loads(coerce(text, frozenset(types)))
    assert value == text if isinstance(value, str) else types


@pytest.mark.parametrize("declaration", [{}, {"function": 3}, {"function": {"name": 3}}])
def test_a_declaration_without_a_name(declaration: Any) -> None:
    assert Tool.of(declaration) is None
    tool = Tool.of({"name": "f", "parameters": {"properties": 3}})
    assert tool == ("f", Tool(None))
    Stream(FORMS["qwen"], tools=[declaration])


# Cost


def seconds(transcript: Transcript) -> float:
    stream = transcript.stream()
    text = transcript.marked(stream)
    begun = time.process_time()
    for at in range(0, len(text), 4):
        stream.feed_text(text[at : at + 4])
    stream.finish("stop")
    return time.process_time() - begun


GROWING: dict[str, Callable[[int], Transcript]] = {
    "content": lambda n: Transcript("qwen", "word " * (n // 5)),
    "openings": lambda n: Transcript("qwen", "<" * n, by_id=False),
    "markers": lambda n: Transcript("qwen", "⟨tool_call⟩ " * (n // 12), by_id=False),
    "blanks": lambda n: Transcript("qwen", " " * n),
    "reasoning": lambda n: Transcript("think", "word\n" * (n // 5), thinking=True),
    "stops": lambda n: Transcript("plain", "ab" * (n // 2), stops=("abababac",)),
    "string": lambda n: Transcript("qwen", xml(("text", 'a "b"\n' * (n // 6)))),
    "object": lambda n: Transcript("qwen", xml(("map", '{"a": ' + "[1, 2]" * (n // 6)))),
    "gaps": lambda n: Transcript("qwen", xml(("text", "x\n</parameter>" + " " * n + "y"))),
    "tags": lambda n: Transcript("qwen", xml(("text", "</parameter> x" * (n // 14)))),
    "hermes": lambda n: Transcript("hermes", '⟨tool_call⟩{"name": "x", "arguments": {"a": "' + "\\n b" * (n // 4)),
    "numbers": lambda n: Transcript("hermes", '⟨tool_call⟩{"name": "x", "arguments": {"a": [1' + ", 23" * (n // 4)),
    "nested": lambda n: Transcript("hermes", '⟨tool_call⟩{"name": "x", "arguments": {"a": ' + "[" * n),
    "late name": lambda n: Transcript("hermes", '⟨tool_call⟩{"arguments": {"a": "' + "x" * n + '"}, "name": "x"}'),
    "bare": lambda n: Transcript("llama", '{"type": "' + "x" * n + '"} x'),
    "gemma": lambda n: Transcript("gemma", gemma('text:""' + 'a "b" ' * (n // 6) + '""')),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_time_is_linear(kind: str) -> None:
    small = min(seconds(GROWING[kind](10_000)) for _ in range(3))
    large = seconds(GROWING[kind](100_000))
    assert large < 30 * max(small, 0.01), "ten times the text; the square would be a hundred times"
