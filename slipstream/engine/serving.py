"""The inference thread: an engine beside the threads and event loops that ask of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable

from slipstream.engine.engine import Engine
from slipstream.engine.protocols import ServingFacts
from slipstream.request import Output, Request

log = logging.getLogger(__name__)

Receiver = Callable[[Output], None]
FAILED = "the engine failed on this request; see the server's log"


class Answer(AsyncIterator[Output]):
    """One request's outputs, for one event loop. Closing it early stops the request."""

    def __init__(self, id: str, abort: Callable[[str], None]) -> None:
        self._id, self._abort = id, abort
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._finished = False

    def receive(self, output: Output) -> None:
        """Take an output, in any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, output)

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Output:
        if self._finished:
            raise StopAsyncIteration
        try:
            output = await self._queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._finished = output.finish is not None
        return output

    async def aclose(self) -> None:
        """Stop the request if it is not finished."""
        if not self._finished:
            self._finished = True
            self._abort(self._id)

    def __del__(self) -> None:
        if not self._finished:
            self._abort(self._id)


class InferenceThread:
    """Implements `Serving`. All of the engine's work happens in one thread of its own.

    Close it when done; requests that are open then end with finish "abort".
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready = threading.Condition()
        # Under the lock: requests and aborts in order, receivers by id, and whether it is over.
        self._commands: deque[Request | str] = deque()
        self._receivers: dict[str, Receiver] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    def about(self) -> ServingFacts:
        return self._engine.about()

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Queue a request; call it inside a running event loop.

        Raises:
            RequestError: the request cannot be served.
            RuntimeError: the thread is closed, or a request of this id is open.
        """
        self._engine.check(request)
        answer = Answer(request.id, self.abort)
        try:
            with self._ready:
                if self._closing:
                    raise RuntimeError("the engine is shut down")
                if request.id in self._receivers:
                    raise RuntimeError(f"a request {request.id!r} is open already")
                self._receivers[request.id] = answer.receive
                self._commands.append(request)
                self._ready.notify()
        except RuntimeError:
            answer._finished = True
            raise
        return answer

    def abort(self, id: str) -> None:
        """Stop a request, queued or running; one that is unknown or done is left alone."""
        with self._ready:
            if id in self._receivers and not self._closing:
                self._commands.append(id)
                self._ready.notify()

    def close(self) -> None:
        """End the thread. What is open ends with finish "abort"."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    # -- in the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while commands := self._wait():
                for command in commands:
                    self._obey(command)
                self._step()
        finally:
            # Whatever ended the loop, nobody may wait for an answer that never comes.
            with self._ready:
                self._closing = True
                self._commands.clear()
            self._end_all(None)

    def _wait(self) -> list[Request | str | None]:
        """The next commands, or [None] if there are steps to compute; empty at the end."""
        with self._ready:
            while not (self._commands or self._closing or self._engine.busy):
                self._ready.wait()
            if self._closing:
                return []
            commands: list[Request | str | None] = [*self._commands]
            self._commands.clear()
            return commands or [None]

    def _obey(self, command: Request | str | None) -> None:
        if command is None:
            return
        id = command if isinstance(command, str) else command.id
        try:
            if isinstance(command, str):
                output = self._engine.abort(command)
                if output:
                    self._deliver(output)
            else:
                self._engine.add(command)
        except Exception:
            log.exception("request %s could not be taken", id)
            self._deliver(Output(id=id, finish="abort", error=FAILED))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception:
            log.exception("a step failed; its requests end")
            self._end_all(FAILED)
            return
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: Output) -> None:
        with self._ready:
            receive = self._receivers.get(output.id)
            if output.finish:
                self._receivers.pop(output.id, None)
        if receive is None:
            return
        try:
            receive(output)
        except Exception:
            # Its event loop is gone, say. That is the end of this request and of no other.
            log.debug("request %s has nobody to answer", output.id, exc_info=True)
            with self._ready:
                self._receivers.pop(output.id, None)
            if not output.finish:
                self._engine.abort(output.id)

    def _end_all(self, error: str | None) -> None:
        """End every open request, and take back what the engine holds for them."""
        self._engine.clear()
        with self._ready:
            waiting = {c.id for c in self._commands if isinstance(c, Request)}
            open_ids = [id for id in self._receivers if id not in waiting]
        for id in open_ids:
            self._deliver(Output(id=id, finish="abort", error=error))
