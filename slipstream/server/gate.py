"""What every HTTP request passes before it is looked at: a name, a key, a size.

Plain ASGI, because a layer that buffers would hide a client's leaving from the endpoints.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

from slipstream.server.schema import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("slipstream.server")

NOTE = "slipstream.note"  # scope key: what an endpoint adds to its log line
OWNER = "slipstream.owner"  # scope key: the name of the API key used
OPEN_PATHS = ("/health",)


class KeyFileError(ValueError):
    """A file of API keys that cannot be used; the text says what to change."""


def read_keys(path: Path) -> dict[str, str]:
    """API keys by name. Each line is ``KEY`` or ``NAME KEY``; ``#`` begins a comment line.

    Raises:
        KeyFileError: the file cannot be read, has no key, or a line is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise KeyFileError(f"cannot read the API keys in {path}: {why}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise KeyFileError(
                f"line {number} of {path} has {len(words)} words: write KEY, or NAME KEY"
            )
        name = words[0] if len(words) == 2 else f"key-{number}"
        if name in keys:
            raise KeyFileError(f"line {number} of {path} names {name!r} again: rename one")
        keys[name] = words[-1]
    if not keys:
        raise KeyFileError(f"{path} has no API key: write one a line")
    return keys


class Gate:
    """Refuses requests without a valid key and bodies that are too large."""

    def __init__(self, app: ASGIApp, keys: Mapping[str, str], max_body: int) -> None:
        self._app = app
        self._keys = {name: key.encode() for name, key in keys.items()}
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope[OWNER] = self._owner(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            response = JSONResponse(error.body(), error.status, error.headers)
            await response(scope, receive, send)
            return
        if body is None:  # the client left while it was sending
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _owner(self, scope: Scope) -> str:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return ""
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
        owner = None
        for name, key in self._keys.items():  # all of them, so that time says nothing
            if hmac.compare_digest(given, key):
                owner = name
        if owner is not None:
            return owner
        raise ApiError(
            401,
            "the API key is missing or unknown: send 'Authorization: Bearer KEY'",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body. One that is too large is read on and dropped, since most clients look
        for an answer only when they have sent everything."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size <= self._max_body:
                parts.append(part)
            else:
                parts.clear()
            if not message.get("more_body", False) or size > 8 * self._max_body:
                break
        if size <= self._max_body:
            return b"".join(parts)
        raise ApiError(
            413,
            f"the body has {'' if not message.get('more_body') else 'more than '}{size} bytes and "
            f"the limit is {self._max_body}: send less text",
            code="request_too_large",
            headers={"Connection": "close"},
        )


class RequestLog:
    """Names each request, and logs one line about it at level INFO, without any text of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req_{uuid.uuid4().hex}"
        status = 0
        began = time.perf_counter()

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            log.info(
                "%s %s %s %.3fs %s %s",
                scope["method"],
                scope["path"],
                status or "left",
                time.perf_counter() - began,
                name,
                scope.get(NOTE, ""),
            )
