"""The HTTP server: routes, and what happens when a client leaves.

Runs in an event loop beside the inference thread and reaches the engine through `Serving` alone.
Knows no tensors. Parsing, templates and tokenization run in threads, off the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from slipstream.request import Request, RequestError, SamplingParams, TooLong
from slipstream.server import openai, schema
from slipstream.server.answer import Answer, Open, Piece, failed
from slipstream.server.gate import NOTE, OWNER, Gate, RequestLog
from slipstream.server.metrics import Metrics
from slipstream.server.schema import ApiError, ChatBody, CompletionBody, TextSide

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from slipstream.engine.protocols import Serving

log = logging.getLogger("slipstream.server")

T = TypeVar("T")

MAX_BODY = 32 * 2**20  # bytes; a million tokens of text take about a sixth of it
# A stream's status line waits this long for a first output: what the engine refuses, it refuses
# at once, and a status is worth more to a client than an error inside a stream.
EARLY = 0.1
ENDPOINTS = (
    "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{id}, "
    "GET /health, GET /metrics"
)


def create_app(
    serving: Serving,
    text: TextSide,
    model_name: str | Sequence[str],
    *,
    keys: Mapping[str, str] | None = None,
    max_body: int = MAX_BODY,
) -> FastAPI:
    """The application. ``app.state.open`` holds the answers being made.

    Args:
        serving: the engine, or a fake of it.
        text: tokenizer, template and stop strings of the model.
        model_name: what clients call the model; the first of several is the one listed first.
        keys: API keys by name; none: no key is asked for.
        max_body: bytes of a request body at most.
    """
    names = (model_name,) if isinstance(model_name, str) else tuple(model_name)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.open = Open()
    metrics = Metrics(serving)
    server = _Server(metrics, text, names, app.state.open, int(time.time()))

    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_api_route("/v1/completions", server.completions, methods=["POST"])
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/metrics", metrics.page, methods=["GET"])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)
    app.add_middleware(Gate, keys=keys or {}, max_body=max_body)
    app.add_middleware(RequestLog)
    return app


async def _on_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        message = f"there is no {path}: this server has {ENDPOINTS}"
    elif error.status_code == 405:
        message = f"{path} does not take {method}: this server has {ENDPOINTS}"
    else:
        message = str(error.detail)
    headers = dict(error.headers) if error.headers else None
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers)


async def _on_failure(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(failed().body(), 500)  # the server logs the traceback


@dataclass(frozen=True, slots=True)
class _Job:
    """One HTTP request, understood: what to run and how to say it."""

    requests: list[Request]
    stops: tuple[str, ...]
    shape: openai.ChatShape | openai.CompletionShape
    ledger: openai.Ledger
    stream: bool
    include_usage: bool
    prompt_only: bool = False

    def trim(self, piece: Piece) -> Piece:
        """Drop the token that was computed only to get at the prompt's log-probabilities."""
        if not self.prompt_only:
            return piece
        return dataclasses.replace(piece, text="", tokens=(), offsets=(), logprobs=())


class _Server:
    def __init__(
        self,
        serving: Serving,
        text: TextSide,
        names: tuple[str, ...],
        open: Open,
        created: int,
    ) -> None:
        self._serving = serving
        self._text = text
        self._names = names
        self._open = open
        self._created = created

    async def health(self) -> Response:
        try:
            facts = self._serving.about()
        except Exception:
            log.exception("the engine does not answer")
            raise failed() from None
        if self._open.closing:
            raise ApiError(503, "the server is ending", type="server_error", code="ending")
        return JSONResponse(
            {
                "status": "ok",
                "model": self._names[0],
                "running": facts.running,
                "waiting": facts.waiting,
            }
        )

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "slipstream",
            "max_model_len": self._serving.about().context,
        }

    async def chat(self, request: HttpRequest) -> Response:
        body = await request.body()
        return _Exchange(self, lambda: self._prepare_chat(body, request.scope[OWNER]))

    async def completions(self, request: HttpRequest) -> Response:
        body = await request.body()
        return _Exchange(self, lambda: self._prepare_completion(body, request.scope[OWNER]))

    def answer(self, job: _Job) -> Answer:
        return Answer(self._serving, self._text, job.requests, job.stops, self._open)

    def _check_model(self, name: str | None) -> str:
        if name is None:
            return self._names[0]
        if name not in self._names:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}: this server has {', '.join(self._names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def _prepare_chat(self, raw: bytes, owner: str) -> _Job:
        body = schema.parse(raw, ChatBody)
        model = self._check_model(body.model)
        schema.check_chat(body)
        params = schema.sampling(body)
        messages = schema.conversation(body.messages)
        try:
            prompt = self._text.render(messages, body.offered_tools(), body.template_arguments())
        except RequestError as error:
            raise ApiError(400, str(error), param="messages") from None
        tokens = _encoded(self._text.encode_chat, prompt, "messages")
        head = _head("chatcmpl", model)
        requests = self._requests(head.id, [tokens], params, owner, "messages")
        return _Job(
            requests,
            params.stop,
            openai.ChatShape(head, self._text, len(requests), params.logprobs is not None),
            openai.Ledger(len(tokens), params.n),
            bool(body.stream),
            body.include_usage(),
        )

    def _prepare_completion(self, raw: bytes, owner: str) -> _Job:
        body = schema.parse(raw, CompletionBody)
        model = self._check_model(body.model)
        schema.check_completion(body)
        prompt_only = bool(body.echo) and body.limit() == 0
        if prompt_only:
            body.max_tokens = 1
        params = schema.sampling(body)
        if body.echo and params.logprobs is not None:
            params = dataclasses.replace(params, prompt_logprobs=params.logprobs)
        prompts = schema.prompts(body.prompt)
        if len(prompts) * params.n > schema.MAX_CHOICES:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n {params.n} make {len(prompts) * params.n} "
                f"completions: send at most {schema.MAX_CHOICES} at a time",
                param="prompt",
            )
        encoded: list[tuple[int, ...]] = []
        echoes: list[openai.Echo | None] = []
        for prompt in prompts:
            tokens = prompt.tokens
            if tokens is None:
                tokens = _encoded(self._text.encode, prompt.text or "", "prompt")
            encoded.append(tokens)
            echo = self._echo(prompt.text, tokens) if body.echo else None
            echoes += [echo] * params.n
        head = _head("cmpl", model)
        requests = self._requests(head.id, encoded, params, owner, "prompt")
        return _Job(
            requests,
            params.stop,
            openai.CompletionShape(head, self._text, echoes, params.logprobs is not None),
            openai.Ledger(sum(map(len, encoded)), params.n),
            bool(body.stream),
            body.include_usage(),
            prompt_only,
        )

    def _echo(self, text: str | None, tokens: tuple[int, ...]) -> openai.Echo:
        decoder = self._text.decoder()
        parts: list[str] = []
        offsets: list[int] = []
        length = 0
        for token in tokens:
            offsets.append(length)
            parts.append(decoder.feed((token,)))
            length += len(parts[-1])
        parts.append(decoder.finish())
        return openai.Echo("".join(parts) if text is None else text, tokens, tuple(offsets))

    def _requests(
        self,
        id: str,
        prompts: list[tuple[int, ...]],
        params: SamplingParams,
        owner: str,
        param: str,
    ) -> list[Request]:
        """One engine request per choice: n for the first prompt, then n for the next."""
        facts = self._serving.about()
        for token in params.logit_bias:
            if not 0 <= token < facts.vocab:
                raise ApiError(
                    400,
                    f"logit_bias names token {token}: give ids from 0 to {facts.vocab - 1}",
                    param="logit_bias",
                )
        requests: list[Request] = []
        for tokens in prompts:
            self._check_prompt(tokens, facts.context, facts.vocab, param)
            room = facts.context - len(tokens)
            for choice in range(params.n):
                one = dataclasses.replace(
                    params,
                    n=1,
                    stop=(),  # text is found here, the engine sees tokens
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                    min_tokens=min(params.min_tokens, room),
                    # n equal seeds would be n equal texts; the first keeps the one it would
                    # have alone.
                    seed=None if params.seed is None else _seed(params.seed, choice),
                )
                requests.append(Request(f"{id}-{len(requests)}", tokens, one, owner))
        return requests

    def _check_prompt(self, tokens: tuple[int, ...], context: int, vocab: int, param: str) -> None:
        if not tokens:
            raise ApiError(400, f"{param} has no tokens: send some text", param=param)
        if len(tokens) >= context:
            raise ApiError(
                400,
                f"the prompt has {len(tokens)} tokens and the context of this model is {context}: "
                f"shorten it by at least {len(tokens) - context + 1} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if min(tokens) < 0 or max(tokens) >= vocab:
            wrong = next(t for t in tokens if not 0 <= t < vocab)
            raise ApiError(
                400, f"prompt has token id {wrong}: give ids from 0 to {vocab - 1}", param=param
            )


def _encoded(encode: Callable[[str], list[int]], text: str, param: str) -> tuple[int, ...]:
    try:
        return tuple(encode(text))
    except RequestError as error:
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        raise ApiError(400, str(error), param=param, code=code) from None


def _head(prefix: str, model: str) -> openai.Head:
    return openai.Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)


def _seed(seed: int, choice: int) -> int:
    """The seed of one of n choices, kept within 64 bits."""
    return seed + choice if seed + choice < 2**64 else seed + choice - 2**64


class _ClientGone(Exception):
    """The client closed its connection before it had the whole answer."""


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``; cancel it as soon as the client leaves, also while nothing is being sent.

    Raises:
        _ClientGone: the client left first.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = (asyncio.create_task(work), asyncio.create_task(gone()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise _ClientGone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Exchange(Response):
    """Everything between a request's body and the last byte of its answer.

    One place, so that one ``async with`` covers each way out: done, failed, left, cancelled.
    """

    def __init__(self, server: _Server, prepare: Callable[[], _Job]) -> None:
        super().__init__()
        self._server = server
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(_ClientGone):
            await _while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = await self._prepared()
        try:
            async with self._server.answer(job) as answer:
                if job.stream:
                    await answer.early(EARLY)
                    await _stream(job, answer, send)
                else:
                    async for piece in answer:
                        piece = job.trim(piece)
                        job.ledger.add(piece)
                        job.shape.add(piece)
                    body = {**job.shape.whole(), "usage": job.ledger.usage()}
                    await JSONResponse(body)(scope, receive, send)
        finally:
            scope[NOTE] = job.ledger.line()

    async def _prepared(self) -> _Job:
        try:
            return await asyncio.to_thread(self._prepare)
        except ApiError:
            raise
        except Exception:
            log.exception("a request could not be prepared")
            raise failed() from None


async def _stream(job: _Job, answer: Answer, send: Send) -> None:
    """Send server-sent events until the answer ends; an error becomes the last event."""
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # a proxy that buffers undoes streaming
            ],
        }
    )
    usage: dict[str, Any] = {"usage": None} if job.include_usage else {}

    async def write(chunks: list[dict[str, Any]]) -> None:
        if chunks:
            body = b"".join(openai.event({**chunk, **usage}) for chunk in chunks)
            await send({"type": "http.response.body", "body": body, "more_body": True})

    try:
        await write(job.shape.opening())
        async for piece in answer:
            piece = job.trim(piece)
            job.ledger.add(piece)
            await write(job.shape.chunks(piece))
        last = b""
        if job.include_usage:
            last = openai.event({**job.shape.closing(), "usage": job.ledger.usage()})
    except ApiError as error:
        last = openai.event(error.body())
    except Exception:
        log.exception("a stream broke")
        last = openai.event(failed().body())
    await send({"type": "http.response.body", "body": last + openai.DONE, "more_body": False})
