"""The choices of one HTTP request, from submission to the last token.

Owns the way from tokens to text: decoding, stop strings, which token ended what. Whoever leaves an
`Answer` early, for whatever reason, aborts in the engine what has not finished. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from slipstream.request import FinishReason, Output, Request, RequestError, TokenLogprob
from slipstream.server.schema import ApiError, TextSide, refused

if TYPE_CHECKING:
    from slipstream.engine.protocols import Serving

log = logging.getLogger("slipstream.server")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one choice. The last one of a choice has ``finish`` set."""

    index: int
    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]  # where in the text each token's characters begin
    logprobs: tuple[TokenLogprob, ...]
    output: Output
    finish: FinishReason | None = None


class Choice:
    """One completion's text, made from the engine's outputs."""

    def __init__(self, index: int, text: TextSide, stops: tuple[str, ...]) -> None:
        self._index = index
        self._decoder = text.decoder()
        self._stops = text.stops(stops)
        self._length = 0

    def take(self, output: Output) -> Piece:
        """The text that ``output`` adds. Tokens behind a stop string count for nothing."""
        # Tokens go in one by one: several arrive at once, and the one that completes a stop string
        # is the last that belongs to the completion.
        end = len(output.tokens) - 1 if output.finish == "stop" else -1
        texts: list[str] = []
        offsets: list[int] = []
        hit = False
        for i, token in enumerate(output.tokens):
            offsets.append(self._length)
            if i == end:
                break  # the end token has no text
            hit = self._add(self._decoder.feed((token,)), texts)
            if hit:
                break
        finish = output.finish
        if hit:
            finish = "stop"
        elif finish is not None:
            if not self._add(self._decoder.finish(), texts):
                texts.append(self._stops.finish())
            else:
                finish = "stop"
        kept = len(offsets)
        return Piece(
            self._index,
            "".join(texts),
            output.tokens[:kept],
            tuple(offsets),
            output.logprobs[:kept],
            output,
            finish,
        )

    def _add(self, new: str, texts: list[str]) -> bool:
        if not new:
            return False
        self._length += len(new)
        emit, hit = self._stops.feed(new)
        texts.append(emit)
        return hit is not None


class Open:
    """The answers being made at this moment, so that a server that ends can end them."""

    def __init__(self) -> None:
        self.closing = False
        self._answers: set[Answer] = set()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: Answer) -> None:
        """Note an answer. Raises ApiError once the server is ending."""
        if self.closing:
            raise _ending()
        self._answers.add(answer)

    def remove(self, answer: Answer) -> None:
        self._answers.discard(answer)

    def close(self) -> None:
        """Refuse new answers; those under way go on."""
        self.closing = True

    def abort(self) -> None:
        """End what is under way; its clients get an error that says so."""
        self.closing = True
        for answer in list(self._answers):
            answer.fail(_ending())


class Answer:
    """All choices of one HTTP request: ``async with`` it, then iterate over its pieces."""

    def __init__(
        self,
        serving: Serving,
        text: TextSide,
        requests: Sequence[Request],
        stops: tuple[str, ...],
        open: Open,
    ) -> None:
        self._serving = serving
        self._text = text
        self._requests = requests
        self._stops = stops
        self._open = open
        self._queue: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._live: set[str] = set()
        self._left = len(requests)
        self._begun = asyncio.Event()
        self._failure: ApiError | None = None

    async def __aenter__(self) -> Answer:
        self._open.add(self)
        for index, request in enumerate(self._requests):
            self._live.add(request.id)
            self._tasks.append(asyncio.create_task(self._run(index, request)))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.remove(self)
        # The aborts come first and wait for nothing: this may run inside a cancellation.
        for id in self._live:
            self._abort(id)
        self._live.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if not self._left:
            raise StopAsyncIteration
        piece = await self._queue.get()
        if isinstance(piece, ApiError):
            raise piece
        if piece.finish is not None:
            self._left -= 1
        return piece

    def fail(self, error: ApiError) -> None:
        """Make whoever iterates see ``error`` next."""
        if not self._begun.is_set():
            self._failure = error
        self._put(error)

    def _put(self, piece: Piece | ApiError) -> None:
        self._queue.put_nowait(piece)
        self._begun.set()

    async def early(self, seconds: float) -> None:
        """Wait that long for a first piece, so that a refusal still finds a status line unsent.

        Raises:
            ApiError: the engine refused or failed before any text.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._begun.wait(), seconds)
        if self._failure is not None:
            raise self._failure

    async def _run(self, index: int, request: Request) -> None:
        choice = Choice(index, self._text, self._stops)
        try:
            outputs = self._serving.submit(request)
            try:
                async for output in outputs:
                    if output.finish is not None:
                        self._live.discard(request.id)
                    if output.finish == "abort":
                        raise _aborted(output)
                    piece = choice.take(output)
                    self._put(piece)
                    if piece.finish is not None:
                        if request.id in self._live:  # a stop string, which the engine cannot see
                            self._live.discard(request.id)
                            self._abort(request.id)
                        return
            finally:
                close = getattr(outputs, "aclose", None)
                if close is not None:
                    await close()
            raise RuntimeError(f"the engine left request {request.id} without an end")
        except ApiError as error:
            self.fail(error)
        except RequestError as error:
            self._live.discard(request.id)
            self.fail(refused(error))
        except Exception:
            log.exception("request %s failed", request.id)
            self.fail(failed())

    def _abort(self, id: str) -> None:
        try:
            self._serving.abort(id)
        except Exception:
            log.exception("abort of request %s failed", id)


def failed() -> ApiError:
    """What a client hears of a failure inside: that it happened, and where to look."""
    return ApiError(
        500,
        "the engine failed on this request: the server's log has the cause",
        type="server_error",
        code="engine_failure",
    )


def _ending() -> ApiError:
    return ApiError(
        503,
        "the server is ending: send the request again later",
        type="server_error",
        code="ending",
    )


def _aborted(output: Output) -> ApiError:
    if output.error is None:
        return ApiError(
            503, "the engine ended this request early", type="server_error", code="aborted"
        )
    log.error("request %s: %s", output.id, output.error)
    return failed()
