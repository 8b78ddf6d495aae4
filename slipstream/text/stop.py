"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Ends a text before the first stop string, wherever the pieces are cut.

    A string counts as soon as it is complete; of several complete at the same character, the one
    that begins first ends the text. What could still become a stop string waits: at most the
    longest one less a character.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Take the stop strings.

        Raises:
            ValueError: one is empty.
        """
        self._strings = tuple(dict.fromkeys(strings))
        if not all(self._strings):
            raise ValueError("an empty stop string ends nothing: leave it out")
        self._held = ""
        self._hit: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what may be shown now, and the stop string if one was met.

        After a hit nothing more is shown, whatever is fed.
        """
        if self._hit is not None:
            return "", self._hit
        buffer = self._held + text
        first: tuple[int, int, str] | None = None
        for string in self._strings:
            at = buffer.find(string)
            if at >= 0 and (first is None or (at + len(string), at) < first[:2]):
                first = (at + len(string), at, string)
        if first is not None:
            self._held, self._hit = "", first[2]
            return buffer[: first[1]], self._hit
        keep = self._unfinished(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def finish(self) -> str:
        """The text that waited, when no more comes; empty after a hit."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, buffer: str) -> int:
        """Length of the longest suffix that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for length in range(min(longest, len(buffer)), 0, -1):
            if any(string.startswith(buffer[-length:]) for string in self._strings):
                return length
        return 0
