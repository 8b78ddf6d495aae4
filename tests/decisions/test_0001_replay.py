"""Decision 0001: a state stored on an absolute grid has the same bits for every schedule.

As a program it prints the table of the record.
"""

from __future__ import annotations

import numpy as np

GRID = 16
SIZE = 24  # key and value width
RING = 3 * GRID
Row = tuple[np.ndarray, np.ndarray, np.float32, np.float32]


def rows(count: int, seed: int) -> list[Row]:
    """Keys, values, decays and betas of a gated delta rule."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(count, SIZE)).astype(np.float32)
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    v = rng.normal(size=(count, SIZE)).astype(np.float32)
    alpha = np.exp(-0.1 * np.abs(rng.normal(size=count))).astype(np.float32)
    return list(zip(k, v, alpha, rng.uniform(size=count).astype(np.float32), strict=True))


def advance(state: np.ndarray, row: Row) -> np.ndarray:
    k, v, alpha, beta = row
    state = state * alpha
    return state + np.outer(k, beta * (v - k @ state))


def run(
    text: list[Row], steps: np.random.Generator, stored: type, fold: str
) -> tuple[bytes, bytes]:
    """Bits of the state at the end and of every state a position was read from.

    Each step takes 1 to 16 rows, of which only the first few belong to the text; the rest are
    rejected drafts that lie in the ring until they are overwritten.
    """
    size = len(text)
    state, at = np.zeros((SIZE, SIZE), stored), 0  # the stored state, and its position
    ring: list[Row] = [text[0]] * RING
    done, reads = 0, []
    wrong = rows(64, 99)
    while done < size:
        # "grid": store at the last multiple of GRID that is certain. "step": where the step ended.
        target = done // GRID * GRID if fold == "grid" else done
        work = state.astype(np.float32)
        while at < target:
            work = advance(work, ring[at % RING])
            at += 1
            if (fold == "step" and at == target) or (fold == "grid" and at % GRID == 0):
                state = work.astype(stored)
                work = state.astype(np.float32)
        length = int(steps.integers(1, 17))
        kept = min(int(steps.integers(1, length + 1)), size - done)
        for i in range(length):
            good = i < kept
            ring[(done + i) % RING] = text[done + i] if good else wrong[int(steps.integers(64))]
        current = at
        for _ in range(done - at + kept):
            if current % GRID == 0 and current > at and fold == "grid":
                work = work.astype(stored).astype(np.float32)
            work = advance(work, ring[current % RING])
            current += 1
            if current > done:
                reads.append(work)
        done += kept
    return work.tobytes(), np.stack(reads).tobytes()


def schedules(stored: type, fold: str, count: int = 40) -> list[tuple[bytes, bytes]]:
    text = rows(200, 1)
    return [run(text, np.random.default_rng(s), stored, fold) for s in range(count)]


def summary(stored: type, fold: str) -> tuple[int, float, float]:
    """Distinct final states, and how much differs from the first schedule's states."""
    results = schedules(stored, fold)
    finals = np.array([np.frombuffer(a, np.float32) for a, _ in results])
    reads = np.array([np.frombuffer(b, np.float32) for _, b in results])
    reads = reads.reshape(len(results), -1, SIZE * SIZE)
    apart = float((finals[1:] != finals[0]).mean())
    positions = float((reads[1:] != reads[0]).any(2).mean())
    return len({a for a, _ in results}), apart, positions


def test_grid_makes_bits_independent_of_steps_and_acceptance() -> None:
    for stored in (np.float16, np.float32):
        assert len(set(schedules(stored, "grid"))) == 1


def test_without_the_grid_a_rounded_state_depends_on_the_schedule() -> None:
    distinct, apart, positions = summary(np.float16, "step")
    assert distinct == 40 and apart > 0.5 and positions > 0.5


if __name__ == "__main__":
    print("stored   folded at      distinct final states of 40   entries   positions that differ")
    for name, stored in (("float32", np.float32), ("float16", np.float16)):
        for fold, words in (("grid", "multiples of 16"), ("step", "end of step")):
            distinct, apart, positions = summary(stored, fold)
            print(f"{name}  {words:16s} {distinct:18d} {apart:20.1%} {positions:12.1%}")
