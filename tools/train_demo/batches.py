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

    def _framed(
        self, rng: np.random.Generator, text: np.ndarray, first: int, room: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """A conversation that asks to repeat ``text``; ``first`` labels its first occurrence."""
        if rng.random() < 0.65:
            before, after = str(rng.choice(instruct.REPEAT)) + "\n\n", ""
        else:
            before, after = "", "\n\n" + str(rng.choice(instruct.REPEAT_AFTER))
        parts = [
            (self.encode("<|im_start|>user\n" + before), CHAT),
            (text, first),
            (
                self.encode(after + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
                CHAT,
            ),
            (text, COPIED),
            (self.encode("<|im_end|>\n"), COPIED),
        ]
        ids = np.concatenate([p for p, _ in parts])
        if len(ids) >= room:
            return None
        return ids, np.concatenate([np.full(len(p), label, np.uint8) for p, label in parts])

    def copy(self, rng: np.random.Generator, room: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Something to copy that fits into ``room`` tokens: ids and labels."""
        most = (room - 64) // 2
        if most < 24:
            return None
        size = int(np.exp(rng.uniform(np.log(16), np.log(most))))
        if rng.random() < 0.2:
            size = int(rng.uniform(most / 2, most))
        draw = rng.random()
        if draw < 0.6:
            kind = self._kind(rng)
            text = self.span(rng, kind, size, clean=True)
            while len(text) < size - 64 and rng.random() < 0.8:
                text = np.concatenate(
                    [text, self.encode("\n\n"), self.span(rng, kind, size - len(text), clean=True)]
                )
            return self._framed(rng, text[:size], PLAIN, room)
        if draw < 0.75:
            text = rng.integers(0, self.ordinary, min(size, 1500)).astype(np.uint16)
            return self._framed(rng, text, IGNORED, room)
        if draw < 0.9:
            # Text made of recurring pieces: the place must be kept, not only the last words matched.
            source = self.span(rng, self._kind(rng), 400)
            pieces = [
                source[s : s + int(rng.integers(3, 30))]
                for s in rng.integers(0, max(len(source) - 3, 1), rng.integers(3, 20))
            ]
            order = rng.integers(0, len(pieces), 1 + size // 16)
            text = np.concatenate([pieces[i] for i in order])[:size]
            return self._framed(rng, text, IGNORED, room)
        text = rng.integers(0, self.ordinary, min(size, 256)).astype(np.uint16)
        if rng.random() < 0.5:
            text = self.span(rng, self._kind(rng), min(size, 256))
        times = int(min(rng.integers(1, 5), (room - 8) // (len(text) + 1) - 1))
        ids = np.concatenate([text] + [text] * times)
        return ids, np.concatenate(
            [np.full(len(text), IGNORED, np.uint8), np.full(len(text) * times, COPIED, np.uint8)]
        )

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
            while at < size:
                want = min(
                    share, key=lambda k: used[k] / max(share[k], 1e-9) * rng.uniform(0.5, 1.5)
                )
                made: tuple[np.ndarray, np.ndarray] | None = None
                if want == "copy":
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
