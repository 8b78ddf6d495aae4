"""Tool calls as models spell them, read from text that arrives in pieces.

Owns the four spellings, the types that a tool's schema gives to values, and the reader that all
wait in. A reader is a generator: it yields when it needs more text, and goes on where it stopped,
so a cut anywhere changes nothing. Knows no tokens: a marker that came as one token is one
character here (`Source`). Knows nothing of reasoning, content or stop strings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]  # yields for more text, returns what it read
Out = Callable[[str], None]

FIRST_MARK = 0xD800  # marks are lone surrogates: no decoded text holds one
NAME_LENGTH = 256  # characters of a function's or parameter's name
SCALAR_LENGTH = 1024  # characters of a number or bare word
OPENS = 4  # openings in a row that begin one call

_SPACE = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(rf"[^<>{{}}\r\n\"\ud800-\udfff]{{0,{NAME_LENGTH}}}")
_KEY = re.compile(rf"[^<>{{}}\[\]:,\r\n\"\ud800-\udfff]{{1,{NAME_LENGTH}}}")
_HALF_TAG = re.compile(rf"<parameter=[^<>{{}}\r\n\"\ud800-\udfff]{{0,{NAME_LENGTH}}}")
_SCALAR = re.compile(rf"[-+.0-9A-Za-z]{{0,{SCALAR_LENGTH}}}")
_BARE = re.compile(rf"[^,{{}}\[\]\ud800-\udfff]{{0,{SCALAR_LENGTH}}}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:0|[1-9][0-9]*)?(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?")
_WORDS = ("true", "false", "null")
_IN_STRING = re.compile(r"[\"\\\x00-\x1f\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


def escape(text: str) -> str:
    """Text as it stands inside a JSON string; pieces may be escaped one by one."""
    return encode_basestring(text)[1:-1]


class Literals:
    """Strings to find in a text that grows; the shorter wins where one begins another."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(sorted(dict.fromkeys(strings), key=len))
        pattern = "|".join(map(re.escape, self.strings)) or r"(?!)"
        self.search = re.compile(pattern).search
        # Of each string its beginnings, short of the whole, where the text ends.
        begun = [_beginnings(s[:-1]) for s in self.strings if len(s) > 1]
        self._begun = re.compile(f"(?:{'|'.join(begun)})\\Z" if begun else r"(?!)").search
        self._reach = max(map(len, self.strings), default=1) - 1

    def final(self, text: str, at: int) -> int:
        """Up to where ``text``, which has none of the strings, stays free of them."""
        found = self._begun(text, max(at, len(text) - self._reach))
        return len(text) if found is None else found.start()


def _beginnings(text: str) -> str:
    """A pattern for every beginning of a text."""
    pattern = ""
    for char in reversed(text):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern


class Source:
    """Text that grows at its end and is taken from its front.

    Attributes:
        ended: no more comes.
        whole: the writer ended by itself; False if it was cut.
    """

    def __init__(self, marks: Mapping[str, str]) -> None:
        """Take the literal text of each mark."""
        self.marks = dict(marks)
        self.text = ""
        self.at = 0
        self.ended = False
        self.whole = False
        self._log: list[str] | None = None

    def push(self, text: str) -> None:
        """Add text."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def end(self, whole: bool) -> None:
        """Say that no more comes."""
        self.ended, self.whole = True, whole

    def take(self, count: int) -> str:
        """The next ``count`` characters."""
        piece = self.text[self.at : self.at + count]
        self.at += count
        if self._log is not None:
            self._log.append(piece)
        return piece

    def mark(self) -> None:
        """Remember what is taken from here on, for `rewind`."""
        self._log = []

    def unmark(self) -> None:
        """Forget it."""
        self._log = None

    def taken(self) -> str:
        """What was taken since `mark`, for good."""
        log, self._log = self._log, None
        return "".join(log or ())

    def rewind(self) -> None:
        """Give back all that was taken since `mark`."""
        if self._log is not None:
            self.text = "".join(self._log) + self.text[self.at :]
            self.at = 0
            self._log = None

    def plain(self, text: str) -> str:
        """Text with its marks spelled out."""
        if not text.isascii():
            for mark, literal in self.marks.items():
                if mark in text:
                    text = text.replace(mark, literal)
        return text

    @property
    def over(self) -> bool:
        """Whether everything was taken and no more comes."""
        return self.ended and self.at == len(self.text)

    def is_begun(self, choices: Sequence[str]) -> bool:
        """Whether no more comes, and the rest is the beginning of a choice, or nothing."""
        rest = self.text[self.at : self.at + 64]
        return self.ended and any(choice.startswith(rest) for choice in choices)

    def peek(self) -> Reader[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def look(self, choices: Sequence[str]) -> Reader[str | None]:
        """Which of the choices comes next, untaken. None of them may begin another."""
        while True:
            for choice in choices:
                if self.text.startswith(choice, self.at):
                    return choice
            rest = self.text[self.at : self.at + 64]
            if self.ended or not any(choice.startswith(rest) for choice in choices):
                return None
            yield

    def space(self) -> Reader[str]:
        """Take blanks and line ends."""
        parts: list[str] = []
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None  # it also matches nothing
            if found.end() > self.at:
                parts.append(self.take(found.end() - self.at))
            if self.at < len(self.text) or self.ended:
                return "".join(parts)
            yield

    def run(self, pattern: re.Pattern[str]) -> Reader[str]:
        """What the pattern, a bounded run of characters, matches here, untaken."""
        while True:
            found = pattern.match(self.text, self.at)
            end = self.at if found is None else found.end()
            if end < len(self.text) or self.ended:
                return self.text[self.at : end]
            yield

    def name(self, skip: int, end: str) -> Reader[str | None]:
        """The name between ``skip`` characters and ``end``, untaken; None if there is none."""
        while True:
            at = self.at + skip
            found = _NAME.match(self.text, at)
            assert found is not None
            if found.end() < len(self.text):
                name = self.text[at : found.end()]
                return name if self.text[found.end()] == end and name.strip() else None
            if self.ended:
                return None
            yield

    def scan(self, literals: Literals, out: Out) -> Reader[str | None]:
        """Give ``out`` what lies before the next of the strings, which stays; None at the end."""
        while True:
            found = literals.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    out(self.take(found.start() - self.at))
                return found.group()
            end = len(self.text) if self.ended else literals.final(self.text, self.at)
            if end > self.at:
                out(self.take(end - self.at))
            if self.ended:
                return None
            yield


class Calls(Protocol):
    """Where calls go."""

    tools: Mapping[str, Tool]  # the declared ones, by name
    count: int  # calls begun

    def begin(self, name: str) -> None:
        """A call of ``name``; from here on there is no way back."""
        ...

    def arguments(self, text: str) -> None:
        """More of its arguments' JSON, with marks in it if the model wrote them."""
        ...

    def end(self, complete: bool) -> None:
        """Its end; an incomplete one has arguments that are no whole JSON."""
        ...


class Format:
    """One way to spell tool calls.

    Attributes:
        title: its name in the documentation.
        markers: strings that a vocabulary may have as one token each.
        opens: those that begin a call, of the markers.
        words: ordinary text that begins a call outside of reasoning, if a declared tool follows.
        bare: whether a JSON object at the beginning of an answer may be a call.
    """

    title: str
    markers: tuple[str, ...]
    opens: tuple[str, ...]
    words: tuple[str, ...] = ()
    bare: bool = False

    def fits(self, template: str) -> bool:
        """Whether a chat template teaches this spelling."""
        raise NotImplementedError

    def read(self, source: Source, calls: Calls, spelled: Mapping[str, str]) -> Reader[None]:
        """Read what begins here. Without a `Calls.begin` it was no call, and all is given back.

        spelled: what stands in the text for each marker, a mark or the marker itself.
        """
        raise NotImplementedError


# Schemas


@dataclass(frozen=True, slots=True)
class Tool:
    """What a tool declares: the types of each parameter; None if it lists none."""

    parameters: Mapping[str, frozenset[str]] | None

    @classmethod
    def of(cls, declaration: Mapping[str, Any]) -> tuple[str, Tool] | None:
        """Name and tool of an entry of OpenAI's ``tools``, with or without its ``function``."""
        function = declaration.get("function", declaration)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return None
        schema = function.get("parameters")
        listed = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(listed, Mapping):
            return function["name"], cls(None)
        return function["name"], cls({str(k): types_of(v, schema) for k, v in listed.items()})

    def types(self, parameter: str) -> frozenset[str]:
        """Types that a parameter may have; empty if the tool does not say."""
        return (self.parameters or {}).get(parameter, frozenset())


NO_TOOL = Tool(None)


def types_of(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it says; references are looked up in root."""
    if not isinstance(schema, Mapping):
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen or not reference.startswith("#"):
            return frozenset()
        target = root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        return types_of(target, root, seen | {reference})
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(t for t in given if isinstance(t, str))
    found: frozenset[str] = frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            found |= types_of(alternative, root, seen)
    if found:
        return found
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_type, schema["enum"]))
    if "const" in schema:
        return frozenset((_type(schema["const"]),))
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else frozenset()


def _type(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def coerce(text: str, types: frozenset[str]) -> str:
    """JSON of a value that was written as plain text.

    Tried in the order null, integer, number, boolean, object or array; what fits nothing is a
    string, declared or not.
    """
    short = text.strip()
    word = short.lower()
    if "null" in types and word == "null":
        return "null"
    if "integer" in types and re.fullmatch(r"[+-]?[0-9]{1,4000}(?:\.0{1,9})?", short):
        return str(int(short.partition(".")[0]))
    if (
        "number" in types
        and re.fullmatch(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?", short)
        and math.isfinite(float(short))
    ):
        return short if _NUMBER.fullmatch(short) else json.dumps(float(short))
    if "boolean" in types and word in ("true", "1", "false", "0"):
        return "true" if word in ("true", "1") else "false"
    if types & {"object", "array"}:
        value = _loads(short)
        if (isinstance(value, dict) and "object" in types) or (
            isinstance(value, list) and "array" in types
        ):
            return short
    return f'"{escape(text)}"'


def _loads(text: str) -> Any:
    """A JSON value; None if it is none, or holds NaN or Infinity."""

    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


# JSON


def read_string(source: Source, out: Out) -> Reader[bool]:
    """A JSON string from its quote on; False if it is malformed or cut.

    Line ends and other control characters, which JSON wants escaped, come out escaped.
    """
    out(source.take(1))
    while True:
        found = _IN_STRING.search(source.text, source.at)
        end = len(source.text) if found is None else found.start()
        if end > source.at:
            out(source.take(end - source.at))
        if found is None:
            if source.ended:
                return False
            yield
        elif found.group() == '"':
            out(source.take(1))
            return True
        elif found.group() == "\\":
            whole = _ESCAPE.match(source.text, source.at)
            if whole is not None:
                out(source.take(len(whole.group())))
            elif _ESCAPE_BEGUN.fullmatch(source.text, source.at):
                if source.ended:
                    out(source.take(len(source.text) - source.at))
                    return False
                yield
            else:
                return False
        else:
            out(escape(source.plain(source.take(1))))


def read_value(source: Source, out: Out) -> Reader[bool]:
    """A JSON value; False where it stops being one, with the rest untaken, or where it is cut."""
    stack: list[str] = []
    # What may come: a value, or the end of a list; a key, or the end of an object; after those.
    expected = "value"
    while True:
        blank = yield from source.space()
        if blank:
            out(blank)
        char = yield from source.peek()
        closed = False
        if char == "":
            return False
        if expected in ("value", "element"):
            if char == '"':
                if not (yield from read_string(source, out)):
                    return False
                closed = True
            elif char in "{[":
                out(source.take(1))
                stack.append(char)
                expected = "key or end" if char == "{" else "element"
            elif char == "]" and expected == "element":
                out(source.take(1))
                stack.pop()
                closed = True
            else:
                scalar = yield from source.run(_SCALAR)
                if source.ended and source.at + len(scalar) == len(source.text):
                    if _NUMBER_BEGUN.fullmatch(scalar) or _begun_word(scalar):
                        out(source.take(len(scalar)))
                    return False
                if not (_NUMBER.fullmatch(scalar) or scalar in _WORDS):
                    return False
                out(source.take(len(scalar)))
                closed = True
        elif expected in ("key", "key or end"):
            if char == '"':
                if not (yield from read_string(source, out)):
                    return False
                expected = "colon"
            elif char == "}" and expected == "key or end":
                out(source.take(1))
                stack.pop()
                closed = True
            else:
                return False
        elif expected == "colon":
            if char != ":":
                return False
            out(source.take(1))
            expected = "value"
        elif char == ",":
            out(source.take(1))
            expected = "key" if stack[-1] == "{" else "value"
        elif char == ("}" if stack[-1] == "{" else "]"):
            out(source.take(1))
            stack.pop()
            closed = True
        else:
            return False
        if closed:
            if not stack:
                return True
            expected = "comma or end"


def _begun_word(text: str) -> bool:
    return any(word.startswith(text) for word in _WORDS)


def read_envelope(source: Source, calls: Calls, declared: bool) -> Reader[None]:
    """One call as a JSON object with a name and arguments, in either order, from its brace on.

    declared: the name must be a declared tool's.
    """
    source.take(1)
    name: str | None = None
    arguments: str | None = None
    ended = False
    while True:
        yield from source.space()
        char = yield from source.peek()
        if char == "}" and name is not None:
            if not ended:
                calls.begin(name)
                calls.arguments("{}" if arguments is None else arguments)
                calls.end(True)
            source.take(1)
            source.unmark()
            return
        if char != '"':
            break
        key = yield from _text(source)
        yield from source.space()
        if key is None or (yield from source.peek()) != ":":
            break
        source.take(1)
        yield from source.space()
        char = yield from source.peek()
        if key == "name" and name is None:
            name = (yield from _text(source)) if char == '"' else None
            if not name or (declared and name not in calls.tools):
                break
        elif key in ("arguments", "parameters") and arguments is None:
            if char == "{" and name is not None:
                calls.begin(name)
                whole = yield from read_value(source, calls.arguments)
                calls.end(whole)
                if not whole:
                    return
                arguments, ended = "", True
                source.mark()
            else:
                arguments = yield from _arguments(source, char)
                if arguments is None:
                    break
        else:
            known = not declared or key in ("type", "id")
            if not (known and (yield from read_value(source, _nowhere))):
                break
        yield from source.space()
        char = yield from source.peek()
        if char == ",":
            source.take(1)
        elif char != "}":
            break
    # Whatever follows whole arguments is no part of the call.
    if ended:
        source.rewind()


def _nowhere(text: str) -> None:
    pass


def _text(source: Source) -> Reader[str | None]:
    """The text of a JSON string; None if it is malformed or cut."""
    parts: list[str] = []
    whole = yield from read_string(source, parts.append)
    value = _loads(source.plain("".join(parts))) if whole else None
    return value if isinstance(value, str) and _is_unicode(value) else None


def _is_unicode(text: str) -> bool:
    return text.isascii() or not re.search(r"[\ud800-\udfff]", text)


def _arguments(source: Source, char: str) -> Reader[str | None]:
    """Arguments that cannot go out yet: before the name, or written as a JSON text in a string."""
    if char == '"':
        text = yield from _text(source)
        return text if text is not None and isinstance(_loads(text), dict) else None
    if char not in ("{", "n"):
        return None
    parts: list[str] = []
    whole = yield from read_value(source, parts.append)
    text = "".join(parts)
    return (text if char == "{" else "{}") if whole else None


def read_close(source: Source, close: str) -> Reader[None]:
    """Take blanks and the closing marker, or nothing."""
    source.mark()
    yield from source.space()
    if (yield from source.look((close,))) is None:
        source.rewind()
    else:
        source.take(len(close))
        source.unmark()


# The spellings


class Hermes(Format):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    title = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>",)

    def fits(self, template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template

    def read(self, source: Source, calls: Calls, spelled: Mapping[str, str]) -> Reader[None]:
        opening = spelled["<tool_call>"]
        for _ in range(OPENS):
            source.take(len(opening))
            yield from source.space()
            found = yield from source.look((opening, "{"))
            if found != opening:
                break
        before = calls.count
        if found == "{":
            yield from read_envelope(source, calls, declared=False)
            if calls.count > before:
                yield from read_close(source, spelled["</tool_call>"])


class Llama(Format):
    """``{"name": ..., "parameters": {...}}``, bare or behind ``<|python_tag|>``."""

    title = "llama"
    markers = ("<|python_tag|>",)
    opens = ("<|python_tag|>",)
    bare = True

    def fits(self, template: str) -> bool:
        return "<|python_tag|>" in template or (
            '"parameters"' in template and "<|start_header_id|>" in template
        )

    def read(self, source: Source, calls: Calls, spelled: Mapping[str, str]) -> Reader[None]:
        tag = spelled["<|python_tag|>"]
        while True:
            tagged = (yield from source.look((tag, "{"))) == tag
            if tagged:
                source.take(len(tag))
                yield from source.space()
            before = calls.count
            if (yield from source.look(("{",))) is not None:
                yield from read_envelope(source, calls, declared=not tagged)
            if calls.count == before:
                source.rewind()
                return
            source.mark()
            yield from source.space()
            if (yield from source.look((";",))) is not None:
                source.take(1)
                yield from source.space()
            if (yield from source.look((tag, "{"))) is None:
                source.rewind()
                return


class QwenXml(Format):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

    Values are text, typed by the tool's schema. What ends a value must be followed by something
    that can follow it, so a tag that is merely quoted stays in the value: ``</parameter>`` by the
    next tag or the end, ``</function>`` by the end of the call, ``</tool_call>`` by the next call
    or the end, each of them perhaps cut off. And a ``<parameter=KEY>`` without its predecessor's
    end must begin a line and name a declared parameter that is not there yet.
    """

    title = "qwen-xml"
    markers = ("<tool_call>", "</tool_call>")
    opens = ("<tool_call>",)
    words = ("<function=",)

    def fits(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def read(self, source: Source, calls: Calls, spelled: Mapping[str, str]) -> Reader[None]:
        opening, closing = (spelled[marker] for marker in self.markers)
        function = self.words[0]
        found = yield from source.look((opening, function))
        marked = found == opening
        for _ in range(OPENS):
            if found != opening:
                break
            source.take(len(opening))
            yield from source.space()
            found = yield from source.look((opening, function))
        while found == function:
            name = yield from source.name(len(function), ">")
            if name is None or not (marked or name.strip() in calls.tools):
                break
            source.take(len(function) + len(name) + 1)
            after = yield from self._next(source, opening, closing)
            if after is None or (after == "" and not source.whole):
                break
            name = name.strip()
            calls.begin(name)
            tool = calls.tools.get(name, NO_TOOL)
            whole = yield from self._body(source, calls, tool, opening, closing)
            if not whole:
                calls.end(False)
                return
            calls.end(True)
            # The rest of the block; what is not of it is given back.
            source.mark()
            yield from source.space()
            found = yield from source.look((closing, function))
            if found == closing:
                source.take(len(closing))
                source.unmark()
                return
        source.rewind()

    def _next(self, source: Source, opening: str, closing: str) -> Reader[str | None]:
        """Take blanks; what comes next if it can follow a value, empty at the end, else None."""
        yield from source.space()
        choices = ("<parameter=", "</function>", closing, opening, self.words[0])
        found = yield from source.look(choices)
        if found is None:
            return "" if source.is_begun(choices) else None
        if found == "<parameter=" and (yield from source.name(len(found), ">")) is None:
            return "" if source.ended and _HALF_TAG.fullmatch(source.text, source.at) else None
        return found

    def _body(
        self, source: Source, calls: Calls, tool: Tool, opening: str, closing: str
    ) -> Reader[bool]:
        """Parameters up to the function's end, which is taken; False if it was cut."""
        given: set[str] = set()
        tags = Literals(("</parameter>", "<parameter=", "</function>", closing))
        while True:
            found = yield from source.look(
                ("<parameter=", "</function>", closing, opening, self.words[0])
            )
            if found != "<parameter=":
                break
            key = yield from source.name(len(found), ">")
            if key is None:  # the answer ended inside of the tag
                found = None
                break
            source.take(len(found) + len(key) + 1)
            key = key.strip()
            line_end = yield from source.look(("\r\n", "\n"))
            source.take(len(line_end or ""))
            lead = f'{", " if given else "{"}"{escape(key)}": '
            given.add(key)
            value = _Value(calls, source, lead, tool.types(key))
            while True:
                tag = yield from source.scan(tags, value.add)
                if tag is None:
                    if not source.whole:
                        value.cut()
                        return False
                    break
                if tag == "<parameter=":
                    if value.begins_line:
                        name = yield from source.name(len(tag), ">")
                        if name is not None and self._is_new(name.strip(), tool, given):
                            break
                    value.add(source.take(len(tag)))
                    continue
                tail: list[str] = []
                if (yield from self._ends(source, tag, opening, closing, tail)):
                    break
                value.add("".join(tail))
            value.end()
        if found is None and not source.whole:
            return False
        if found == "</function>":
            source.take(len(found))
        calls.arguments("}" if given else "{}")
        return True

    @staticmethod
    def _is_new(key: str, tool: Tool, given: set[str]) -> bool:
        return key not in given and (tool.parameters is None or key in tool.parameters)

    def _ends(
        self, source: Source, tag: str, opening: str, closing: str, tail: list[str]
    ) -> Reader[bool]:
        """Whether a closing tag ends the value; if so only what belongs to the value is taken.

        tail: gets what was taken if it does not.
        """
        if tag == "</parameter>":
            tail.append(source.take(len(tag)))
            source.mark()
            found = (yield from self._next(source, opening, closing)) is not None
        else:
            source.mark()
            source.take(len(tag))
            yield from source.space()
            followers = (opening,) if tag == closing else (closing, opening, self.words[0])
            found = (yield from source.look(followers)) is not None or source.is_begun(followers)
        if found and tag != "</parameter>":
            source.rewind()
            return True
        tail.append(source.taken())
        return found


class _Value:
    """One parameter's text on its way to JSON: it goes out at once if it can only be a string."""

    def __init__(self, calls: Calls, source: Source, lead: str, types: frozenset[str]) -> None:
        self._calls = calls
        self._source = source
        self._lead = lead
        self._types = types
        self._parts: list[str] = []
        self._line_end = ""  # one at the value's end is not of it
        self._begun = False
        self._streams = types <= {"string"}
        self._words: tuple[str, ...] = ()  # what it may be besides a string
        self._so_far = ""
        if "string" in types and types <= {"string", "null", "boolean"}:
            self._words = ("null",) if "null" in types else ()
            self._words += ("true", "false", "1", "0") if "boolean" in types else ()
        if self._streams:
            calls.arguments(lead + '"')

    @property
    def begins_line(self) -> bool:
        """Whether what comes next begins a line."""
        return self._line_end.endswith("\n") or not (self._begun or self._line_end)

    def add(self, text: str) -> None:
        """More of the value."""
        text = self._line_end + text
        size = 2 if text.endswith("\r\n") else 1 if text.endswith(("\n", "\r")) else 0
        self._line_end = text[len(text) - size :]
        self._give(text[: len(text) - size])

    def _give(self, text: str) -> None:
        if not text:
            return
        self._begun = True
        if self._streams:
            self._calls.arguments(escape(self._source.plain(text)))
            return
        self._parts.append(self._source.plain(text))
        if self._words:
            so_far = (self._so_far + self._parts[-1]).lstrip()
            word = so_far.rstrip()
            if not any(w.startswith(word.lower()) for w in self._words):
                self._open()
            self._so_far = word if len(word) == len(so_far) else word + " "

    def _open(self) -> None:
        """Let a value that can only be a string go out."""
        self._streams = True
        self._calls.arguments(f'{self._lead}"{escape("".join(self._parts))}')
        self._parts = []

    def end(self) -> None:
        """The value is whole."""
        if not self._line_end.endswith("\n"):
            self._give(self._line_end)
        if self._streams:
            self._calls.arguments('"')
        else:
            self._calls.arguments(self._lead + coerce("".join(self._parts), self._types))

    def cut(self) -> None:
        """The text ended inside of it: what there is goes out, and the string stays open."""
        self._give(self._line_end)
        if not self._streams:
            self._open()


class Gemma(Format):
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>``."""

    title = "gemma"
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    opens = ("<|tool_call>",)

    def fits(self, template: str) -> bool:
        return "<|tool_call>" in template

    def read(self, source: Source, calls: Calls, spelled: Mapping[str, str]) -> Reader[None]:
        opening, closing, quote = (spelled[marker] for marker in self.markers)
        for _ in range(OPENS):
            source.take(len(opening))
            yield from source.space()
            found = yield from source.look((opening, "call:"))
            if found != opening:
                break
        if found != "call:":
            return
        name = yield from source.name(len(found), "{")
        if name is None:
            return
        source.take(len(found) + len(name))
        calls.begin(name.strip())
        whole = yield from self._object(source, calls, quote)
        calls.end(whole)
        if whole:
            yield from read_close(source, closing)

    @staticmethod
    def _object(source: Source, calls: Calls, quote: str) -> Reader[bool]:
        """The arguments from their brace on; False where they stop being any."""
        quotes = Literals((quote,))

        def out(text: str) -> None:
            calls.arguments(escape(source.plain(text)))

        calls.arguments(source.take(1))
        stack = ["{"]
        filled = False  # whether the innermost object or list has an element
        separated = True  # whether an element may come
        while True:
            yield from source.space()
            char = yield from source.peek()
            if char == "":
                return False
            if char == ("}" if stack[-1] == "{" else "]"):
                calls.arguments(source.take(1))
                stack.pop()
                if not stack:
                    return True
                filled, separated = True, False
                continue
            if not separated:
                if char != ",":
                    return False
                source.take(1)
                separated = True
                continue
            between = ", " if filled else ""
            if stack[-1] == "{":
                source.mark()
                quoted = (yield from source.look((quote,))) is not None
                source.take(len(quote) if quoted else 0)
                name = yield from source.run(_KEY)
                source.take(len(name))
                if source.over:
                    source.unmark()
                    calls.arguments(f'{between}"{escape(name)}')
                    return False
                good = not quoted or (yield from source.look((quote,))) is not None
                source.take(len(quote) if quoted and good else 0)
                if not (good and name.strip()) or (yield from source.peek()) != ":":
                    source.rewind()
                    return False
                source.take(1)
                source.unmark()
                between += f'"{escape(name.strip())}": '
                yield from source.space()
                char = yield from source.peek()
            if (yield from source.look((quote,))) is not None:
                source.take(len(quote))
                calls.arguments(between + '"')
                if (yield from source.scan(quotes, out)) is None:
                    return False
                source.take(len(quote))
                calls.arguments('"')
            elif char != "" and char in "{[":
                calls.arguments(between + source.take(1))
                stack.append(char)
                filled = False
                continue
            else:
                word = yield from source.run(_BARE)
                text = word.strip()
                if source.at + len(word) == len(source.text):  # cut: it may have gone on
                    known = _NUMBER_BEGUN.fullmatch(text) is not None or _begun_word(text)
                    calls.arguments(between + (text if known else f'"{escape(text)}'))
                    source.take(len(word))
                    return False
                if not text:
                    return False
                source.take(len(word))
                known = text in _WORDS or _NUMBER.fullmatch(text) is not None
                calls.arguments(between + (text if known else f'"{escape(text)}"'))
            filled, separated = True, False


FORMATS: tuple[Format, ...] = (Gemma(), QwenXml(), Hermes(), Llama())
