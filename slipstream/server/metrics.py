"""What a server counts, for Prometheus: requests, tokens, drafts, times.

`Metrics` is a `Serving` itself and stands between the server and the engine: it sees every output
on its way to a client and knows nothing of HTTP beyond the page it renders. Names follow what
other engines expose, with this project's prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import Response

from slipstream.request import Output, Request, RequestError, Speculation

if TYPE_CHECKING:
    from slipstream.engine.protocols import Serving, ServingFacts

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_STEP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LENGTH = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 31)


class Metrics:
    """Counts what passes between a server and an engine; each has a registry of its own."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slipstream_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"slipstream_{name}", text, buckets=buckets, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"slipstream_{name}", text, registry=self.registry)

        self._running = gauge("num_requests_running", "Requests being computed.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._preemptions = counter("num_preemptions", "Requests taken off the device to wait.")
        self._parts = counter(
            "step_seconds", "Time of the engine's steps on the host, by part.", "part"
        )
        self._told: dict[Counter, float] = {}
        self._requests = counter(
            "requests",
            "Requests that ended, by how: stop, length, abort, error.",
            "finished_reason",
        )
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._tokens = counter("generation_tokens", "Tokens of answers, by proposer.", "source")
        self._drafted = counter(
            "spec_decode_num_draft_tokens", "Drafts that were verified, by drafter.", "source"
        )
        self._accepted = counter(
            "spec_decode_num_accepted_tokens", "Drafts that stood, by drafter.", "source"
        )
        self._drafted_at = counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Drafts that were verified, by place in their step from 0.",
            "position",
        )
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that stood, by place in their step from 0.",
            "position",
        )
        self._per_step = histogram("tokens_per_step", "Tokens that a step gave one request.", _STEP)
        self._lengths = histogram(
            "spec_decode_draft_length", "Drafts that a step verified for one request.", _LENGTH
        )
        self._first = histogram(
            "time_to_first_token_seconds", "Submission to the first token.", _SECONDS
        )
        self._each = histogram(
            "time_per_output_token_seconds",
            "Mean over an answer of the time of a token after the first.",
            _TOKEN,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "Submission to the end of the answer.", _SECONDS
        )
        self._queued = histogram(
            "request_queue_time_seconds", "Submission to the first computed step.", _SECONDS
        )

    # -- as Serving -------------------------------------------------------------------------

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Submit to the engine, and count what comes back."""
        return _Followed(self._serving.submit(request), self)

    def abort(self, id: str) -> None:
        self._serving.abort(id)

    def about(self) -> ServingFacts:
        return self._serving.about()

    # -- counting ---------------------------------------------------------------------------

    def enter(self, output: Output, first: bool) -> None:
        """Enter what a step did for a request; ``first``: it is the request's first output."""
        if not output.tokens:
            return
        for source in output.sources:
            self._tokens.labels(source).inc()
        self._per_step.observe(len(output.tokens))
        if first:
            usage, timing = output.usage, output.timing
            self._prompt.inc(usage.prompt_tokens)
            self._queries.inc(usage.prompt_tokens)
            self._hits.inc(usage.cached_tokens)
            self._first.observe(timing.first_token)
            self._queued.observe(timing.queued)

    def end(self, reason: str, last: Output | None) -> None:
        """A request is over. ``last``: its last output with tokens, None if there was none."""
        self._requests.labels(reason).inc()
        if last is None:
            return
        self._draft(last.speculation)
        if reason in ("stop", "length"):
            more = last.usage.completion_tokens - 1
            self._whole.observe(last.timing.total)
            if more > 0:
                self._each.observe((last.timing.total - last.timing.first_token) / more)

    def _draft(self, spec: Speculation) -> None:
        for metric, counts in (
            (self._drafted, spec.drafted_by_source),
            (self._accepted, spec.accepted_by_source),
        ):
            for source, count in counts.items():
                metric.labels(source).inc(count)
        for metric, places in (
            (self._drafted_at, spec.drafted_by_position),
            (self._accepted_at, spec.accepted_by_position),
        ):
            for position, count in enumerate(places):
                metric.labels(str(position)).inc(count)
        for length, steps in enumerate(spec.lengths):
            for _ in range(steps):
                self._lengths.observe(length)

    async def page(self) -> Response:
        """What Prometheus reads."""
        facts = self._serving.about()
        self._running.set(facts.running)
        self._waiting.set(facts.waiting)
        # What the engine counts itself grows there; here it grows by as much.
        for counter, total in (
            (self._preemptions, float(facts.preemptions)),
            *((self._parts.labels(part), seconds) for part, seconds in facts.seconds),
        ):
            counter.inc(max(0.0, total - self._told.get(counter, 0.0)))
            self._told[counter] = total
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class _Followed(AsyncIterator[Output]):
    """A request's outputs, counted as they pass."""

    def __init__(self, outputs: AsyncIterator[Output], metrics: Metrics) -> None:
        self._outputs, self._metrics = outputs, metrics
        self._last: Output | None = None
        self._over = False

    def __aiter__(self) -> _Followed:
        return self

    async def __anext__(self) -> Output:
        try:
            output = await anext(self._outputs)
        except RequestError:
            self._over = True  # refused: it never was a request of the engine's
            raise
        except asyncio.CancelledError:
            self._end("abort")  # the client left while it waited
            raise
        except Exception:
            self._end("error")
            raise
        self._metrics.enter(output, self._last is None)
        self._last = output if output.tokens else self._last
        if output.finish is not None:
            self._end("error" if output.error is not None else output.finish)
        return output

    async def aclose(self) -> None:
        """Whoever closes this with an output in hand found a stop string in it."""
        self._end("stop")
        close = getattr(self._outputs, "aclose", None)
        if close is not None:
            await close()

    def _end(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._metrics.end(reason, self._last)
