"""Runs the application on a port until a signal ends it.

On the first signal, answers under way may finish within a grace period and no new ones begin;
after it, or on the second signal, what is left is aborted and told so.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from slipstream.server.answer import Open

# After the aborts, clients that do not read their last bytes are cut off this much later.
LAST_WORDS = 5
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


class ListenError(ValueError):
    """An address that cannot be listened on; the text says what to change."""


def bind(host: str, port: int) -> socket.socket:
    """Take an address without listening yet, so that a model loads only if it can be served.

    Raises:
        ListenError: the host is unknown or not of this machine, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ListenError(
            f"there is no host {host!r}: give an address of this machine, such as 127.0.0.1"
        ) from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restarts within a minute
        made.bind(address)
    except OSError as error:
        made.close()
        advice = "give another --port" if error.errno in _TAKEN else "give another --host or --port"
        raise ListenError(
            f"cannot listen on {host} port {port} ({error.strerror}): {advice}"
        ) from None
    return made


def url(listening: socket.socket) -> str:
    """The base URL that clients use."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def run(app: FastAPI, listening: socket.socket, grace: float, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: made by `create_app`.
        listening: from `bind`; closed at the end.
        grace: seconds that answers under way have to finish.
        ready: called once requests are taken.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(grace) + LAST_WORDS,
    )
    with listening:
        _Server(config, app.state.open, grace, ready).run(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, open: Open, grace: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._open = open
        self._grace = grace
        self._ready = ready
        self._hurry = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The signal is not kept: it is answered by ending in order, with exit code 0.
        self._hurry = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._open.close()
        ending = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end(self) -> None:
        until = time.monotonic() + self._grace
        while time.monotonic() < until and not self._hurry:
            await asyncio.sleep(0.05)
        self._open.abort()
