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


class InferenceThread:
    """Implements `Serving`. All of the engine's work happens in one thread of its own.

    Close it when done; requests that are open then end with finish "abort".
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
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
            RuntimeError: the thread is closed.
        """
        self._engine.check(request)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Output] = asyncio.Queue()

        def receive(output: Output) -> None:
            # The loop may be gone when a server shuts down before its answers end.
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, output)

        self._send(lambda: self._add(request, receive))
        return self._outputs(request.id, queue)

    async def _outputs(self, id: str, queue: asyncio.Queue[Output]) -> AsyncIterator[Output]:
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = output.finish is not None
                yield output
        finally:
            if not finished:
                self.abort(id)

    def abort(self, id: str) -> None:
        """Stop a request, queued or running; one that is unknown or done is left alone."""
        if not self._closing:
            self._send(lambda: self._abort(id))

    def close(self) -> None:
        """End the thread. What is open ends with finish "abort"."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join()

    # -- in the thread ----------------------------------------------------------------------

    def _send(self, command: Callable[[], None]) -> None:
        with self._ready:
            if self._closing:
                raise RuntimeError("the engine is shut down")
            self._commands.append(command)
            self._ready.notify()

    def _add(self, request: Request, receive: Receiver) -> None:
        self._receivers[request.id] = receive
        self._engine.add(request)

    def _abort(self, id: str) -> None:
        output = self._engine.abort(id)
        if output:
            self._deliver(output)

    def _deliver(self, output: Output) -> None:
        receive = self._receivers.get(output.id)
        if receive:
            receive(output)
        if output.finish:
            self._receivers.pop(output.id, None)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not (self._commands or self._closing or self._engine.busy):
                    self._ready.wait()
                commands = list(self._commands)
                self._commands.clear()
                if self._closing:
                    break
            try:
                for command in commands:
                    command()
                for output in self._engine.step():
                    self._deliver(output)
            except Exception:
                log.exception("a step failed; its requests end")
                self._end_all("the engine failed on this request; see the server's log")
        self._end_all(None)

    def _end_all(self, error: str | None) -> None:
        """End every open request, and take back what the engine holds for them."""
        self._engine.clear()
        for id in list(self._receivers):
            self._deliver(Output(id=id, finish="abort", error=error))
