"""From generated tokens to what a client sees: reasoning, content and tool calls.

Owns one state machine per answer. Whatever the cuts between deltas, the same tokens give the same
events once neighbours are joined; what waits is only what could still become a marker, a stop
string, or white space that belongs to a marker. A marker that the vocabulary has as one token
counts by its id alone; text that merely spells it is text. Knows no HTTP and no engine: what
must be forced is offered in `Stream.force`, and whoever runs the engine does it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.request import FinishReason
from slipstream.text.stop import StopStrings
from slipstream.text.tokenizer import Incremental, Tokenizer
from slipstream.text.tools import FIRST_MARK, FORMATS, Format, Literals, Reader, Source, Tool

_MARK = re.compile("[\ud800-\udfff]")
_LINE_ENDS = ("\r\n", "\n")


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins. Calls come one after the other; ``index`` counts them from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of its arguments: joined, they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Its end. An incomplete call was cut or broke off: its arguments are no whole JSON."""

    index: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event. ``stop`` is the stop string, if one ended the answer."""

    reason: Literal["stop", "length", "tool_calls", "abort"]
    stop: str | None = None


Event = ReasoningText | ContentText | CallBegin | CallText | CallEnd | Finish


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a message; ``arguments`` is JSON text, whole if the call is complete."""

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class Message:
    """All that was said so far. Text is None where there was none."""

    reasoning: str | None
    content: str | None
    calls: tuple[Call, ...]
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model marks its reasoning.

    Attributes:
        open, close: the markers.
        label: text that follows the opening marker and is not of the reasoning.
        gap: line ends after the closing marker that are the template's, at most.
    """

    open: str = "<think>"
    close: str = "</think>"
    label: str = ""
    gap: int = 2

    def is_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside of reasoning that its template opened."""
        return prompt.rstrip().removesuffix(self.label).endswith(self.open)


@dataclass(frozen=True, slots=True)
class Form:
    """What a model's answers look like. ``ids`` has the markers that are one token each."""

    reasoning: Reasoning | None = None
    calls: Format | None = None
    ids: Mapping[str, int] | None = None


_REASONINGS = (
    Reasoning("<|channel>", "<channel|>", label="thought", gap=0),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning(),
)


def detect(template: str, vocabulary: Callable[[str], int | None] = lambda _: None) -> Form:
    """The form that a chat template teaches.

    vocabulary: the id of a token by its name, such as `Tokenizer.token_id`.
    """
    reasoning = next((r for r in _REASONINGS if r.open in template and r.close in template), None)
    calls = next((f for f in FORMATS if f.fits(template)), None)
    return form(reasoning, calls, vocabulary)


def form(
    reasoning: Reasoning | None,
    calls: Format | None,
    vocabulary: Callable[[str], int | None] = lambda _: None,
) -> Form:
    """A form from its parts, with the ids of those markers that the vocabulary has."""
    markers = (*((reasoning.open, reasoning.close) if reasoning else ()),)
    markers += calls.markers if calls else ()
    found = {marker: vocabulary(marker) for marker in markers}
    return Form(reasoning, calls, {m: i for m, i in found.items() if i is not None})


class Stream:
    """One answer.

    Attributes:
        tools: the declared tools by name.
        count: calls begun so far.
        tokens: tokens taken; those behind a stop string are not.
        thinking_tokens: of them, those that were reasoning.
    """

    def __init__(
        self,
        form: Form,
        tokenizer: Tokenizer | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stops: Iterable[str] = (),
        stops_in_reasoning: bool = False,
        max_thinking_tokens: int | None = None,
        force_text: str | None = None,
        make_id: Callable[[int], str] = lambda index: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        """Begin an answer.

        tokenizer: for `feed`; without it only `feed_text` works.
        thinking: the prompt ends inside of reasoning (`Reasoning.is_open`).
        tools: entries of OpenAI's ``tools``. None: no calls are looked for, all of it is text.
            A call of an undeclared name is a call if a marker says so, for its caller can tell the
            model better than we; a bare JSON object or tag is one only with a declared name.
        stops: strings that end the answer when they occur in content. A marker comes before a
            stop string, and what a call consists of is not searched.
        max_thinking_tokens: after so many tokens of reasoning `force` has the text that ends it.
        force_text: that text; by default the closing marker on a line of its own.

        Raises:
            ValueError: an empty stop string, or thinking without markers for it.
        """
        if thinking and form.reasoning is None:
            raise ValueError("an answer without markers of reasoning cannot begin inside of it")
        self._reasoning = form.reasoning
        self._format = form.calls if tools is not None else None
        self._stop_strings = tuple(stops)
        self._stops_in_reasoning = stops_in_reasoning
        StopStrings(self._stop_strings)  # refuses what is wrong now rather than later
        firsts = {re.escape(string[0]) for string in self._stop_strings}
        self._stop_begins = re.compile("|".join(sorted(firsts))).search
        found = [Tool.of(tool) for tool in tools or ()]
        self.tools: Mapping[str, Tool] = dict(tool for tool in found if tool is not None)
        self._make_id = make_id

        used = [self._reasoning.open, self._reasoning.close] if self._reasoning else []
        used += self._format.markers if self._format else ()
        ids = form.ids or {}
        marks = {marker: chr(FIRST_MARK + n) for n, marker in enumerate(ids) if marker in used}
        self._spelled = {marker: marks.get(marker, marker) for marker in used}
        # A marker that means nothing here is text, also where decoding leaves out its token.
        self._by_id = {id: marks.get(marker, marker) for marker, id in ids.items()}
        self._source = Source({mark: marker for marker, mark in marks.items()})
        self._decoder = None if tokenizer is None else Incremental(tokenizer)

        opens = tuple(self._spelled[m] for m in (self._format.opens if self._format else ()))
        words = self._format.words if self._format else ()
        pair = tuple(self._spelled[m] for m in used[:2]) if self._reasoning else ()
        self._calls_in_reasoning = frozenset(opens)
        self._calls_in_content = frozenset((*opens, *words))
        self._content_literals = Literals((*pair, *opens, *words))
        self._reasoning_literals = Literals((*pair, *opens))

        self.tokens = 0
        self.thinking_tokens = 0
        self._max_thinking = max_thinking_tokens
        self._force = force_text
        if force_text is None and self._reasoning is not None:
            self._force = f"\n{self._reasoning.close}" + "\n" * self._reasoning.gap

        self.count = 0
        self._calls: list[tuple[str, str, list[str]]] = []
        self._complete: list[bool] = []
        self._reasoning_parts: list[str] = []
        self._content_parts: list[str] = []
        self._events: list[Event] = []
        self._kind: type[ReasoningText] | type[ContentText] | type[CallText] | None = None
        self._parts: list[str] = []  # of the event being made
        self._finish: Finish | None = None
        self._told = False
        self._reason: FinishReason = "stop"

        self._thinks = thinking
        self._fresh = True  # no content but white space since reasoning ended or the answer began
        self._gap = 0
        self._line_end = ""  # one at the end of reasoning is not of it
        self._blank: list[str] | None = None  # white space at a segment's begin, which may be a gap
        self._after_call = False
        self._stops: StopStrings | None = None
        self._held = 0  # characters that wait in it
        self._begin_segment()
        self._machine: Generator[None, None, None] = self._run()
        next(self._machine)

    # What goes in

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Add tokens; returns what became certain."""
        decoder = self._decoder
        if decoder is None:
            raise ValueError("tokens need a tokenizer: give one, or feed text")
        by_id = self._by_id
        for id in ids:
            if self._finish is not None:
                break
            self.tokens += 1
            mark = by_id.get(id)
            text = decoder.feed((id,)) if mark is None else decoder.finish() + mark
            if text:
                self._push(text)
            if self._thinks:
                self.thinking_tokens += 1
        return self._take_events()

    def feed_text(self, text: str, tokens: int = 0) -> list[Event]:
        """Add text, with `mark` of those markers that are single tokens.

        tokens: how many tokens that was, for the budget of reasoning.
        """
        if self._finish is None and text:
            self.tokens += tokens
            if not text.isascii():
                marks = self._source.marks
                text = _MARK.sub(lambda m: m.group() if m.group() in marks else "\ufffd", text)
            self._push(text)
            if self._thinks:
                self.thinking_tokens += tokens
        return self._take_events()

    def mark(self, marker: str) -> str:
        """What stands for a marker in the text that `feed_text` takes."""
        return self._spelled.get(marker, marker)

    def finish(self, reason: FinishReason) -> list[Event]:
        """Say that no more comes, and why; returns what waited, with a `Finish` at the end.

        "stop": the model ended, so closing tags that it left out are taken for granted. Otherwise
        it was cut: an open call stays open, and half a character is left out.
        """
        if self._finish is None:
            self._reason = reason
            if reason == "stop" and self._decoder is not None:
                text = self._decoder.finish()
                if text:
                    self._push(text)
        if self._finish is None:
            self._source.end(reason == "stop")
            next(self._machine, None)
        return self._take_events()

    # What comes out

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is inside of reasoning."""
        return self._thinks and self._finish is None

    @property
    def thinking_left(self) -> int | None:
        """Tokens of reasoning that are left; None without a budget. Negative if overdrawn."""
        return None if self._max_thinking is None else self._max_thinking - self.thinking_tokens

    @property
    def force(self) -> str | None:
        """Text that must come next because the budget of reasoning is used up, else None.

        It stays until the closing marker has been fed: encode it once (markers are tokens), make
        the model say it, and feed its tokens like any others.
        """
        left = self.thinking_left
        return self._force if left is not None and left <= 0 and self.is_thinking else None

    @property
    def finished(self) -> Finish | None:
        """How the answer ended, if it did: by `finish`, or by a stop string before it."""
        return self._finish

    def message(self) -> Message:
        """All events so far as one message."""
        calls = [
            Call(id, name, "".join(parts), i < len(self._complete) and self._complete[i])
            for i, (id, name, parts) in enumerate(self._calls)
        ]
        return Message(
            "".join(self._reasoning_parts) or None,
            "".join(self._content_parts) or None,
            tuple(calls),
            self._finish,
        )

    # The machine

    def _push(self, text: str) -> None:
        self._source.push(text)
        next(self._machine, None)

    def _run(self) -> Reader[None]:
        entering = True  # reasoning, through its opening marker or the prompt's
        while self._finish is None:
            if self._thinks:
                entering = yield from self._read_reasoning(entering)
            else:
                entering = yield from self._read_content()
            if self._source.over and self._finish is None:
                self._end()

    def _read_reasoning(self, entering: bool) -> Reader[bool]:
        assert self._reasoning is not None
        source, pair = self._source, self._reasoning
        opening, closing = self._spelled[pair.open], self._spelled[pair.close]
        if entering:
            if pair.label and (yield from source.look((pair.label,))) is not None:
                source.take(len(pair.label))
            line_end = yield from source.look(_LINE_ENDS)
            source.take(len(line_end or ""))
        while True:
            found = yield from source.scan(self._reasoning_literals, self._add_reasoning)
            if found is None or self._finish is not None:
                return False
            if found in self._calls_in_reasoning:
                if (yield from self._attempt(found, self._add_reasoning)):
                    return False
            elif found == closing:
                source.take(len(found))
                self._end_reasoning(closed=True)
                self._gap = pair.gap
                return False
            else:
                assert found == opening  # again, which says nothing new
                source.take(len(found))

    def _read_content(self) -> Reader[bool]:
        """Content up to its end or that of its segment; whether reasoning was opened."""
        source, format, pair = self._source, self._format, self._reasoning
        opening = self._spelled[pair.open] if pair else None
        while self._finish is None:
            while self._gap:
                line_end = yield from source.look(_LINE_ENDS)
                source.take(len(line_end or ""))
                self._gap = self._gap - 1 if line_end else 0
            if format is not None and format.bare and self._fresh:
                blank = yield from source.space()
                if blank:
                    self._add_content(blank)
                if self._finish is None and (yield from source.peek()) == "{":
                    yield from self._attempt("{", self._add_content)
                    continue
            found = yield from source.scan(self._content_literals, self._add_content)
            if found is None or self._finish is not None:
                break
            if found in self._calls_in_content:
                yield from self._attempt(found, self._add_content)
                continue
            assert pair is not None
            # Prose that explains the markers spells them, and only an id says that it is one.
            if found in source.marks or self._fresh:
                source.take(len(found))
                if found == opening:
                    self._end_segment(call=False)
                    self._thinks = True
                    return True
                if self._fresh:
                    self._gap = pair.gap
            else:
                self._add_content(source.take(len(found)))
        return False

    def _attempt(self, opening: str, out: Callable[[str], None]) -> Reader[bool]:
        """Read what may be a call; if it is none, its opening is text. Whether it was one."""
        assert self._format is not None
        before = self.count
        self._source.mark()
        yield from self._format.read(self._source, self, self._spelled)
        if self.count > before:
            return True
        self._source.rewind()
        out(self._source.take(len(opening)))
        return False

    # Calls (see tools.Calls)

    def begin(self, name: str) -> None:
        """A call begins: what was said before it is complete."""
        self._source.unmark()
        if self._thinks:
            self._end_reasoning(closed=True)
        self._end_segment(call=True)
        index = self.count
        self.count += 1
        if self._finish is not None:  # a stop string ended what was before
            return
        id = self._make_id(index)
        self._calls.append((id, name, []))
        self._close_event()
        self._events.append(CallBegin(index, id, name))

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        if self._finish is not None:
            return
        text = self._source.plain(text)
        self._calls[-1][2].append(text)
        self._add_event(CallText, text)

    def end(self, complete: bool) -> None:
        """The call ends."""
        if self._finish is not None:
            return
        self._complete.append(complete)
        self._close_event()
        self._events.append(CallEnd(self.count - 1, complete))
        self._begin_segment()
        self._after_call = True

    # Text

    def _add_reasoning(self, text: str) -> None:
        text = self._line_end + text
        size = 2 if text.endswith("\r\n") else 1 if text.endswith(("\n", "\r")) else 0
        self._line_end = text[len(text) - size :]
        self._give_reasoning(text[: len(text) - size])

    def _give_reasoning(self, text: str) -> None:
        text = self._source.plain(text)
        if self._stops_in_reasoning:
            text = self._search(text)
        if text:
            self._reasoning_parts.append(text)
            self._add_event(ReasoningText, text)

    def _end_reasoning(self, closed: bool) -> None:
        line_end, self._line_end = self._line_end, ""
        if not (closed and line_end.endswith("\n")):
            self._give_reasoning(line_end)
        if self._stops_in_reasoning and self._stops is not None:
            rest = self._stops.finish()
            if rest:
                self._reasoning_parts.append(rest)
                self._add_event(ReasoningText, rest)
        if self._finish is None:
            self._thinks = False
            self._fresh = True
            self._begin_segment()

    def _begin_segment(self) -> None:
        """A stretch of content or reasoning without a break begins."""
        self._stops = StopStrings(self._stop_strings) if self._stop_strings else None
        self._held = 0
        self._blank = [] if self._format is not None else None
        self._after_call = False

    def _add_content(self, text: str) -> None:
        text = self._source.plain(text)
        if self._fresh and not text.isspace():
            self._fresh = False
        self._give_content(self._search(text))
        if self._finish is not None:
            self._end_segment(call=False)

    def _give_content(self, text: str) -> None:
        if not text:
            return
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._content_parts.append(text)
        self._add_event(ContentText, text)

    def _end_segment(self, call: bool) -> None:
        """The stretch of content ends, before a call or with the answer."""
        if self._stops is not None and self._finish is None:
            self._give_content(self._stops.finish())
        blank, self._blank = self._blank, None
        if blank and not call and not self._after_call:
            text = "".join(blank)
            self._content_parts.append(text)
            self._add_event(ContentText, text)
        self._begin_segment()

    def _search(self, text: str) -> str:
        """The text before a stop string, which ends the answer."""
        if self._finish is not None:
            return ""
        if self._stops is None or not (self._held or self._stop_begins(text)):
            return text  # no stop string is under way or begins here
        shown, hit = self._stops.feed(text)
        self._held += len(text) - len(shown)
        if hit is not None:
            self._finish = Finish(self._why("stop"), hit)
        return shown

    def _end(self) -> None:
        if self._thinks:
            self._end_reasoning(closed=False)
        if self._finish is None:
            self._end_segment(call=False)
            self._finish = Finish(self._why(self._reason))

    def _why(self, reason: FinishReason) -> Literal["stop", "length", "tool_calls", "abort"]:
        return "tool_calls" if reason == "stop" and any(self._complete) else reason

    # Events

    def _add_event(
        self, kind: type[ReasoningText] | type[ContentText] | type[CallText], text: str
    ) -> None:
        if kind is not self._kind:
            self._close_event()
            self._kind = kind
        self._parts.append(text)

    def _close_event(self) -> None:
        if self._kind is not None:
            text = "".join(self._parts)
            self._parts = []
            if self._kind is CallText:
                self._events.append(CallText(self.count - 1, text))
            elif self._kind is ContentText:
                self._events.append(ContentText(text))
            else:
                self._events.append(ReasoningText(text))
            self._kind = None

    def _take_events(self) -> list[Event]:
        self._close_event()
        if self._finish is not None and not self._told:
            self._told = True
            self._events.append(self._finish)
        events, self._events = self._events, []
        return events


def merge(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined: what no cut between deltas changes."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            merged[-1] = ContentText(last.text + event.text)
        elif isinstance(event, ReasoningText) and isinstance(last, ReasoningText):
            merged[-1] = ReasoningText(last.text + event.text)
        elif isinstance(event, CallText) and isinstance(last, CallText):
            merged[-1] = CallText(last.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
