"""Decision 0004: which token an MTP head's cache slot may know.

A toy with exact arithmetic: hidden states are prefix sums, the head is one causal attention layer
over rows made of a hidden state and the token after it. As a program it prints the table of the
record.
"""

from __future__ import annotations

import numpy as np

PAGE, WIDTH = 8, 6
RNG = np.random.default_rng(0)
EMBED, WQ, WK, WV = (RNG.normal(size=s) for s in ((50, WIDTH), *((2 * WIDTH, WIDTH),) * 3))


def hidden(text: list[int]) -> np.ndarray:
    """Hidden state t knows tokens 0..t, as a causal model's does."""
    decay = 0.7 ** np.arange(len(text))
    rows = [decay[: t + 1][::-1] @ EMBED[text[: t + 1]] for t in range(len(text))]
    return np.tanh(np.array(rows))


def cache(text: list[int], slot_of_row: int) -> np.ndarray:
    """Keys and values by slot; row t is (hidden t, token t + 1) and lies in slot t + slot_of_row.

    Slot 0 of the shifted form holds nothing and is never read.
    """
    h = hidden(text)
    out = np.full((len(text), 2, WIDTH), np.nan)
    for t in range(len(text) - 1):
        row = np.concatenate([EMBED[text[t + 1]], h[t]])
        out[t + slot_of_row] = row @ WK, row @ WV
    return out


def head(text: list[int], slot_of_row: int, kv: np.ndarray) -> np.ndarray:
    """What the head says after the last token of the text."""
    t = len(text) - 2
    row = np.concatenate([EMBED[text[-1]], hidden(text)[t]])
    read = kv[slot_of_row : t + 1 + slot_of_row]
    score = np.exp(read[:, 0] @ (row @ WQ) / (4 * WIDTH))
    return (score / score.sum()) @ read[:, 1]


def pages_that_differ(slot_of_row: int, pages: int = 3) -> list[int]:
    """Full pages of a common prefix whose bits depend on what follows it."""
    prefix = [int(t) for t in np.random.default_rng(1).integers(0, 50, pages * PAGE)]
    caches = [cache([*prefix, *tail], slot_of_row) for tail in ([7, 7, 7], [8, 7, 7], [9, 1, 2])]
    split = [[c[p * PAGE : (p + 1) * PAGE].tobytes() for p in range(pages)] for c in caches]
    return [p for p in range(pages) if len({s[p] for s in split}) > 1]


def error_after_a_hit(slot_of_row: int, pages: int = 3) -> float:
    """Largest error of the head if a prefix's pages, left by one text, serve another."""
    prefix = [int(t) for t in np.random.default_rng(1).integers(0, 50, pages * PAGE)]
    first, second = [*prefix, 7, 7, 7], [*prefix, 8, 4, 5]
    own = cache(second, slot_of_row)
    mixed = own.copy()
    mixed[: pages * PAGE] = cache(first, slot_of_row)[: pages * PAGE]
    return float(np.abs(head(second, slot_of_row, mixed) - head(second, slot_of_row, own)).max())


def test_shifted_slots_depend_on_the_prefix_alone() -> None:
    assert pages_that_differ(1) == []
    assert error_after_a_hit(1) == 0


def test_unshifted_slots_know_the_token_after_the_prefix() -> None:
    assert pages_that_differ(0) == [2]
    assert error_after_a_hit(0) > 1e-3


def test_both_alignments_say_the_same() -> None:
    text = [int(t) for t in np.random.default_rng(2).integers(0, 50, 30)]
    a, b = (head(text, s, cache(text, s)) for s in (0, 1))
    assert a.tobytes() == b.tobytes()


if __name__ == "__main__":
    print(
        "row (hidden t, token t + 1) in   pages that depend on the next token   error after a hit"
    )
    for slot_of_row, name in ((0, "slot t"), (1, "slot t + 1")):
        pages = pages_that_differ(slot_of_row)
        print(f"{name:20s} {pages!s:>30s} of 3 {error_after_a_hit(slot_of_row):20.2e}")
