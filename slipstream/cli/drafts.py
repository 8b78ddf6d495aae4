"""Text coloured by who drafted it, for ``--show-drafts``.

Knows tokens, their sources and a decoder; neither engines nor where the text goes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TextIO

from slipstream.request import Speculation

# What a source is called here, and its colour; the target's own tokens keep the terminal's.
SOURCES = {
    "lookup": ("context", "32"),
    "dflash": ("dflash", "36"),
    "mtp": ("mtp", "33"),
    "target": ("target", ""),
}
OTHER = "35"  # a source that is not in the list


class Decoder(Protocol):
    """Token ids to the text that became final with them."""

    def feed(self, ids: Sequence[int], /) -> str: ...


def wants_colour(out: TextIO) -> bool:
    """Whether to write colours: a terminal, unless NO_COLOR says no or FORCE_COLOR yes."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or out.isatty()


def label(source: str) -> str:
    """What a source is called in the legend."""
    return SOURCES.get(source, (source, ""))[0]


def colour(source: str, text: str) -> str:
    """The text in the source's colour."""
    code = SOURCES.get(source, ("", OTHER))[1]
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def legend(coloured: bool) -> str:
    """A line that says which colour is whose."""
    names = (colour(s, label(s)) if coloured else label(s) for s in SOURCES)
    return "drafted by: " + " ".join(names)


def summary(spec: Speculation) -> str:
    """A line about the drafts of one answer."""
    accepted = ", ".join(f"{label(s)} {n}" for s, n in spec.accepted_by_source.items() if n)
    text = f"{spec.tokens_per_step:.2f} tokens a step"
    return f"{text} · accepted: {accepted}" if accepted else f"{text} · no draft was accepted"


class Painter:
    """Colours one answer as it comes.

    Text may come later than its tokens (a stop string is ruled out first, a character has
    several tokens), so it waits here for how many characters belong to which source. A character
    of several tokens belongs to the one that completes it.
    """

    def __init__(self, decoder: Decoder, coloured: bool) -> None:
        self._decoder, self._coloured = decoder, coloured
        self._due: deque[tuple[int, str]] = deque()  # characters to come, and their source
        self._last = "target"

    def feed(self, text: str, tokens: Sequence[int], sources: Sequence[str]) -> str:
        """What to write for new text, given the tokens that came with it."""
        if not self._coloured:
            return text
        for token, source in zip(tokens, sources, strict=False):
            count = len(self._decoder.feed((token,)))
            if self._due and self._due[-1][1] == source:
                count += self._due.pop()[0]
            self._due.append((count, source))
        parts: list[str] = []
        while text:
            count, self._last = self._due.popleft() if self._due else (len(text), self._last)
            parts.append(colour(self._last, text[:count]))
            if count > len(text):
                self._due.appendleft((count - len(text), self._last))
            text = text[count:]
        return "".join(parts)
