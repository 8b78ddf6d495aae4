"""A fake engine behind the `Serving` seam, and a byte-level text side.

The engine has a thread, slots and a queue of its own, as the real one has, so that what a server
does with them can be seen: a request occupies its slot until it ends or is aborted, whatever
becomes of its iterator. What it answers is a function of the request alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from slipstream.request import (
    Output,
    Request,
    RequestError,
    Speculation,
    Timing,
    TokenLogprob,
    Usage,
)

START, END, THINK = 256, 257, 258  # special tokens beside the 256 bytes
VOCAB = 260
SPECIAL = {START: b"<s>", END: b"</s>", THINK: b"<think>"}


def answer_of(request: Request) -> str:
    """A text of some length that depends on the prompt and the seed."""
    rng = random.Random(f"{request.tokens} {request.params.seed}")
    words = ["draft", "wake", "früh", "日本", "🚀", "ok", "line\n", "a", "slipstream"]
    return " ".join(rng.choice(words) for _ in range(rng.randint(20, 40)))


@dataclasses.dataclass(frozen=True)
class ServingFacts:
    """As `protocols.ServingFacts`, which would bring a tensor library along."""

    model: str
    context: int
    vocab: int
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    seconds: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass
class _Running:
    request: Request
    tokens: list[int]
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Output]
    began: float
    done: int = 0
    steps: int = 0

    def emit(self, output: Output) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, output)


class FakeEngine:
    """Answers with `answer`; each step adds up to `block` tokens to each of `slots` requests."""

    def __init__(
        self,
        *,
        slots: int = 4,
        block: int = 3,
        pace: float = 0.0,
        context: int = 2048,
        answer: Callable[[Request], str | Sequence[int]] = answer_of,
        fail: Callable[[Request, int], str | None] = lambda request, done: None,
        refuse: Callable[[Request], str | None] = lambda request: None,
    ) -> None:
        self.slots, self.block, self.pace, self.context = slots, block, pace, context
        self.answer, self.fail, self.refuse = answer, fail, refuse
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.dead = False
        self._lock = threading.Condition()
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._closed = False
        self._thread = threading.Thread(target=self._steps, daemon=True)
        self._thread.start()

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        why = self.refuse(request)
        if why is not None:
            raise RequestError(why)
        given = self.answer(request)
        tokens = list(given.encode()) if isinstance(given, str) else list(given)
        run = _Running(
            request, tokens, asyncio.get_running_loop(), asyncio.Queue(), time.perf_counter()
        )
        with self._lock:
            self.submitted.append(request)
            self._waiting.append(run)
            self._lock.notify()
        while True:
            output = await run.queue.get()
            yield output
            if output.finish is not None:
                return

    def abort(self, id: str) -> None:
        with self._lock:
            self.aborted.append(id)
            for runs in (self._waiting, self._running):
                for run in [r for r in runs if r.request.id == id]:
                    runs.remove(run)
                    run.emit(Output(id, finish="abort"))

    def about(self) -> ServingFacts:
        if self.dead:
            raise RuntimeError("secret detail: the inference thread died")
        with self._lock:
            return ServingFacts("fake", self.context, VOCAB, len(self._running), len(self._waiting))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()

    def wait_idle(self, seconds: float = 5.0) -> bool:
        """Whether every slot and the queue become free in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            facts = self.about()
            if facts.running == facts.waiting == 0:
                return True
            time.sleep(0.01)
        return False

    def _steps(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running or self._closed):
                    self._lock.wait()
                if self._closed:
                    return
                while self._waiting and len(self._running) < self.slots:
                    self._running.append(self._waiting.pop(0))
                for run in list(self._running):
                    output = self._step(run)
                    run.emit(output)
                    if output.finish is not None:
                        self._running.remove(run)
                        self.finished.append(run.request.id)
            time.sleep(self.pace or 0.0005)

    def _step(self, run: _Running) -> Output:
        request, params = run.request, run.request.params
        error = self.fail(request, run.done)
        if error is not None:
            return Output(request.id, finish="abort", error=error)
        assert params.max_tokens is not None
        text = run.tokens if params.ignore_eos else [*run.tokens, END]
        if params.ignore_eos:
            text = (text * (params.max_tokens // len(text) + 1))[: params.max_tokens]
        ends = [i for i, token in enumerate(text) if token in params.stop_token_ids]
        text = text[: min([*(i + 1 for i in ends), params.max_tokens])]
        new = tuple(text[run.done : run.done + self.block])
        first = run.done == 0
        run.done += len(new)
        run.steps += 1
        ended = run.done >= len(text)
        finish = None
        if ended:
            by_end = text[-1] == END and not params.ignore_eos
            finish = "stop" if ends or by_end else "length"
        return Output(
            id=request.id,
            tokens=new,
            sources=("target",) * len(new),
            logprobs=tuple(_entries(new, params.logprobs)),
            prompt_logprobs=(
                (None, *_entries(request.tokens[1:], params.prompt_logprobs))
                if first and params.prompt_logprobs is not None
                else None
            ),
            finish=finish,  # type: ignore[arg-type]
            stop_reason=text[-1] if finish == "stop" else None,
            usage=Usage(len(request.tokens), run.done, min(4, len(request.tokens))),
            timing=Timing(0.0, 0.01, time.perf_counter() - run.began),
            speculation=Speculation(
                run.steps, run.done, run.steps * self.block, run.done - run.steps, {"lookup": 1}
            ),
        )


def _entries(tokens: Iterable[int], count: int | None) -> list[TokenLogprob]:
    if count is None:
        return []
    entries = []
    for token in tokens:
        best = -(token % 7) / 8 - 0.125
        top = tuple(((token + i) % VOCAB, best - i) for i in range(count))
        entries.append(TokenLogprob(token, best, top))
    return entries


class ByteDecoder:
    """UTF-8 characters of byte tokens, whole ones only; special tokens have no text."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, ids: Sequence[int]) -> str:
        self._held += bytes(id for id in ids if id < 256)
        for cut in range(len(self._held), max(len(self._held) - 4, -1), -1):
            try:
                text = self._held[:cut].decode()
            except UnicodeDecodeError:
                continue
            self._held = self._held[cut:]
            return text
        return ""

    def finish(self) -> str:
        text, self._held = self._held.decode(errors="replace"), b""
        return text


class Finder:
    """Stop strings, found by holding back as many characters as the longest could need."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        self._keep = max(map(len, strings), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        self._held += text
        hits = [(self._held.find(s), s) for s in self._strings if s in self._held]
        if hits:
            at, hit = min(hits)
            return self._held[:at], hit
        cut = max(len(self._held) - self._keep, 0)
        emit, self._held = self._held[:cut], self._held[cut:]
        return emit, None

    def finish(self) -> str:
        emit, self._held = self._held, ""
        return emit


class ByteText:
    """Bytes as tokens, and a template that spells roles out."""

    def __init__(self, *, template: bool = True) -> None:
        self.rendered: list[tuple[list[dict[str, Any]], Any, dict[str, Any]]] = []

    def encode(self, text: str) -> list[int]:
        return [START, *text.encode()]

    def encode_chat(self, text: str) -> list[int]:
        return list(text.encode())

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: dict[str, Any],
    ) -> str:
        self.rendered.append((messages, tools, arguments))
        if not any(m["role"] == "user" for m in messages):
            raise RequestError("the chat template refuses this: no user message")
        if arguments.get("explode"):
            raise KeyError("secret detail")
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def stops(self, strings: tuple[str, ...]) -> Finder:
        return Finder(strings)

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else SPECIAL.get(id, b"<pad>")
