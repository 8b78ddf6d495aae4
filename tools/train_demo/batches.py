"""Training rows, made on the fly: plain text, copying and conversations, packed without cuts.

A batch is a pure function of (seed, step, shape), so a run can stop and go on anywhere and any number
of worker processes give the same rows.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.train_demo import instruct
from tools.train_demo.corpus import Chat, read_corpus

# What a label is, per token; 0 is not trained on.
IGNORED, PLAIN, COPIED, CHAT = range(4)


@dataclass(frozen=True)
class Shape:
    """Rows x length of a batch and the share of tokens of each material (the rest is plain text)."""

    rows: int
    length: int
    copy: float = 0.3
    chat: float = 0.25


class Maker:
    """Makes batches from the training documents."""

    def __init__(self, work: Path, template: str, seed: int, out: bool = False) -> None:
        self.corpus = read_corpus(work)
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.chat = Chat(self.tokenizer, template)
        self.seed = seed
        size = self.tokenizer.get_vocab_size()
        self.end = self.tokenizer.token_to_id("<|endoftext|>")
        self.ordinary = min(self.end, size)
        pieces = [self.tokenizer.id_to_token(i) for i in range(self.ordinary)]
        # "Ċ" is how byte-level BPE writes a line end.
        self.line_end = np.array(
            [p.endswith("Ċ") for p in pieces] + [False] * (size - self.ordinary)
        )
        self.docs = {kind: self.corpus.select(kind, out) for kind in ("docs", "code")}
        lengths = np.diff(self.corpus.bounds)
        # By square root of length: long files would drown the others, short ones would come too often.
        self.odds = {
            kind: np.cumsum(w / w.sum())
            for kind, index in self.docs.items()
            for w in [np.minimum(lengths[index], 20_000).astype(np.float64) ** 0.75]
        }

    def document(self, rng: np.random.Generator, kind: str) -> np.ndarray:
        """Token ids of a random document."""
        at = int(np.searchsorted(self.odds[kind], rng.random()))
        return self.corpus.doc(int(self.docs[kind][min(at, len(self.docs[kind]) - 1)]))

    def span(
        self, rng: np.random.Generator, kind: str, size: int, clean: bool = False
    ) -> np.ndarray:
        """Up to ``size`` tokens of a document; ``clean`` starts and ends at a line where possible."""
        doc = self.document(rng, kind)
        start = (
            0
            if len(doc) <= size or rng.random() < 0.4
            else int(rng.integers(0, len(doc) - size + 1))
        )
        if clean and start:
            ends = np.nonzero(self.line_end[doc[start : start + size // 2]])[0]
            start += int(ends[0]) + 1 if len(ends) else 0
        part = doc[start : start + size]
        if clean:
            while len(part) > 8 and self.line_end[part[-1]]:
                part = part[:-1]
            while len(part) > 8 and self.line_end[part[0]]:
                part = part[1:]
        return part

    def _kind(self, rng: np.random.Generator) -> str:
        return "docs" if rng.random() < 0.55 else "code"

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text."""
        return np.array(self.tokenizer.encode(text).ids, np.uint16)

    def _whole(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """About ``size`` tokens of documents of one kind, several behind each other where one is too short."""
        kind = self._kind(rng)
        text = self.span(rng, kind, size, clean=True)
        while len(text) < size - 64 and rng.random() < 0.8:
            more = self.span(rng, kind, size - len(text), clean=True)
            text = np.concatenate([text, self.encode("\n\n"), more])
        return text[:size]

    def _pieces(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Text of recurring pieces: the place must be kept, not only the last words matched."""
        source = self.span(rng, self._kind(rng), 600)
        longest = int(rng.choice((12, 30, 80)))
        starts = rng.integers(0, max(len(source) - 3, 1), rng.integers(3, 20))
        pieces = [source[s : s + int(rng.integers(3, longest))] for s in starts]
        order = rng.integers(0, len(pieces), 1 + 2 * size // longest)
        return np.concatenate([pieces[i] for i in order])[:size]

    def _variants(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Near-repetitions of a passage, each with a few other tokens: branches that look alike."""
        kind = self._kind(rng)
        base = self.span(rng, kind, int(rng.integers(24, 300)), clean=True)
        parts: list[np.ndarray] = []
        have = 0
        while have < size:
            part = base.copy()
            changed = rng.random(len(part)) < rng.choice((0.01, 0.04, 0.12))
            fresh = (
                rng.integers(0, self.ordinary, len(part))
                if rng.random() < 0.5
                else rng.choice(base, len(part))
            )
            part = np.where(changed, fresh, part).astype(np.uint16)
            if rng.random() < 0.3:
                part = part[: int(rng.integers(8, len(part) + 1))] if len(part) > 8 else part
            if rng.random() < 0.25:
                part = np.concatenate([part, self.span(rng, kind, int(rng.integers(8, 60)))])
            parts.append(part)
            have += len(part)
        return np.concatenate(parts)[:size]

    def _between(self, rng: np.random.Generator) -> str:
        """Small turns that lie between a text and the request to repeat it."""
        source = random.Random(int(rng.integers(0, 1 << 62)))
        turns, _ = instruct.conversation(source, lambda _: "", "talk")
        return self.chat.render(turns)

    def _framed(
        self, rng: np.random.Generator, text: np.ndarray, first: int, room: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """A conversation that asks to repeat ``text``; ``first`` labels its first occurrence."""
        answer = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        draw = rng.random()
        before, after = "", ""
        if draw < 0.65:
            before = str(rng.choice(instruct.REPEAT)) + "\n\n"
        elif draw < 0.85:
            after = "\n\n" + str(rng.choice(instruct.REPEAT_AFTER))
        else:
            before = str(rng.choice(instruct.READ)) + "\n\n"
            after = answer + str(rng.choice(instruct.HAVE_READ)) + "<|im_end|>\n"
            after += self._between(rng) if rng.random() < 0.6 else ""
            after += "<|im_start|>user\n" + str(rng.choice(instruct.REPEAT_EARLIER))
        opening = "<|im_start|>user\n" + before
        if rng.random() < 0.1:
            system = str(rng.choice(instruct.SYSTEMS))
            opening = f"<|im_start|>system\n{system}<|im_end|>\n{opening}"
        parts = [
            (self.encode(opening), CHAT),
            (text, first),
            (self.encode(after + answer), CHAT),
            (text, COPIED),
            (self.encode("<|im_end|>\n"), COPIED),
        ]
        ids = np.concatenate([p for p, _ in parts])
        if len(ids) >= room:
            return None
        return ids, np.concatenate([np.full(len(p), label, np.uint8) for p, label in parts])

    def copy(
        self, rng: np.random.Generator, room: int, long: bool = False
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Something to copy that fits into ``room`` tokens: ids and labels; ``long`` fills the room."""
        most = (room - 160) // 2
        if most < 24:
            return None
        size = int(np.exp(rng.uniform(np.log(16), np.log(most))))
        if long or rng.random() < 0.2:
            size = int(rng.uniform(most / 3, most))
        draw = rng.random()
        if draw < 0.58:
            return self._framed(rng, self._whole(rng, size), PLAIN, room)
        if draw < 0.66:
            text = rng.integers(0, self.ordinary, min(size, 1500)).astype(np.uint16)
            return self._framed(rng, text, IGNORED, room)
        if draw < 0.8:
            return self._framed(rng, self._pieces(rng, size), IGNORED, room)
        if draw < 0.93:
            return self._framed(rng, self._variants(rng, size), IGNORED, room)
        text = rng.integers(0, self.ordinary, min(size, 256)).astype(np.uint16)
        if rng.random() < 0.5:
            text = self.span(rng, self._kind(rng), min(size, 256))
        times = int(min(rng.integers(1, 5), (room - 8) // (len(text) + 1) - 1))
        ids = np.concatenate([text] + [text] * times)
        labels = np.full(len(ids), COPIED, np.uint8)
        # Nothing announces the first repetition.
        labels[: len(text) + 4] = IGNORED
        return ids, labels

    def conversation(self, rng: np.random.Generator, only: str | None = None) -> np.ndarray:
        """Token ids of a generated conversation."""

        def draw(kind: str) -> str:
            if kind == "module":
                return str(self.tokenizer.decode(self.document(rng, "code")[:6000]))
            return str(self.tokenizer.decode(self.span(rng, kind, 1200, clean=True)))

        source = random.Random(int(rng.integers(0, 1 << 62)))
        messages, tools = instruct.conversation(source, draw, only)
        thinking = any("reasoning_content" in m for m in messages)
        return np.array(self.chat.ids(messages, tools=tools, enable_thinking=thinking), np.uint16)

    def batch(self, step: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """ids ``[rows, length + 1]`` uint16 and labels ``[rows, length + 1]`` uint8 of one step."""
        rng = np.random.default_rng([self.seed, step])
        ids = np.full((shape.rows, shape.length + 1), self.end, np.uint16)
        labels = np.zeros((shape.rows, shape.length + 1), np.uint8)
        share = {"plain": 1 - shape.copy - shape.chat, "copy": shape.copy, "chat": shape.chat}
        used = dict.fromkeys(share, 1.0)
        for row in range(shape.rows):
            at, size = 0, shape.length + 1
            long = size > 6000 and rng.random() < 0.45
            while at < size:
                want = min(
                    share, key=lambda k: used[k] / max(share[k], 1e-9) * rng.uniform(0.5, 1.5)
                )
                made: tuple[np.ndarray, np.ndarray] | None = None
                if long and at == 0:
                    # A long copy only finds room where a row begins.
                    want, made = "copy", self.copy(rng, size, long=True)
                elif want == "copy":
                    made = self.copy(rng, size - at)
                elif want == "chat":
                    talk = self.conversation(rng)
                    made = (talk, np.full(len(talk), CHAT, np.uint8))
                if made is None or len(made[0]) > size - at:
                    want = "plain"
                    text = self.span(rng, self._kind(rng), int(rng.integers(200, 6000)))[
                        : size - at
                    ]
                    made = (text, np.full(len(text), PLAIN, np.uint8))
                part, label = made
                ids[row, at : at + len(part)] = part
                labels[row, at : at + len(part)] = label
                at += len(part)
                if at < size:
                    labels[row, at] = PLAIN
                at += 1
                used[want] += len(part)
        return ids, labels


_maker: Maker | None = None


def _start(work: Path, template: str, seed: int) -> None:
    global _maker
    _maker = Maker(work, template, seed)


def _make(job: tuple[int, Shape]) -> tuple[np.ndarray, np.ndarray]:
    assert _maker is not None
    return _maker.batch(*job)


def feed(
    work: Path, template: str, seed: int, jobs: Iterator[tuple[int, Shape]], workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of ``jobs`` in order, made by worker processes a few steps ahead (0 workers: in line)."""
    if workers == 0:
        maker = Maker(work, template, seed)
        for step, shape in jobs:
            yield maker.batch(step, shape)
        return
    with multiprocessing.get_context("spawn").Pool(workers, _start, (work, template, seed)) as pool:
        waiting: deque = deque()
        for job in jobs:
            waiting.append(pool.apply_async(_make, (job,)))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().get()
        while waiting:
            yield waiting.popleft().get()
