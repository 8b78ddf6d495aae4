"""The step loop, and the one place where everything is put together."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from secrets import randbits
from time import perf_counter

import torch
from torch import Tensor

from slipstream.draft.table import empty
from slipstream.engine import memory
from slipstream.engine.batch import Inputs, Limits, Sequence, Span
from slipstream.engine.cache import Cache
from slipstream.engine.costs import Costs
from slipstream.engine.params import ENDS, ParamTable
from slipstream.engine.prefix import Lineage
from slipstream.engine.protocols import Drafter, Model, ServingFacts
from slipstream.engine.sampler import logprobs
from slipstream.engine.scheduler import Decided, Drafting, Scheduler
from slipstream.engine.verify import Rows, Verify
from slipstream.kernels.types import Batch, Draft, Hidden, Verdict
from slipstream.request import (
    Output,
    Request,
    RequestError,
    SamplingParams,
    TokenLogprob,
)

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
_SLICE = 64  # rows of a prompt whose logits are computed together


class Parts:
    """Seconds that each part of the step has taken on the host, all together.

    On a device these are the times of launching; the wait for it falls to the last part.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("plan", "target", "verify", "draft", "apply"), 0.0)
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self._last = perf_counter()

    def end(self, part: str) -> None:
        """The time since the last end was this part's."""
        now = perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


class Engine:
    """Runs requests. One thread calls it; `engine.serving` puts it beside others.

    Args:
        model: the target.
        drafter: None: no speculation.
        limits, cache, inputs, params, verify, scheduler: its parts, built for the same limits.
        ends: the checkpoint's end ids.
        vocab: real token ids; the model may have more rows.
        defaults: sampling parameters of the checkpoint, for those a request leaves open.
        seed: of the numbers that unseeded requests draw; None: from the system.
    """

    def __init__(
        self,
        *,
        model: Model,
        drafter: Drafter | None,
        limits: Limits,
        cache: Cache,
        inputs: Inputs,
        params: ParamTable,
        verify: Verify,
        scheduler: Scheduler,
        ends: tuple[int, ...],
        vocab: int,
        defaults: SamplingParams,
        plan: memory.Plan | None = None,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        self.model, self.drafter, self.limits, self.cache = model, drafter, limits, cache
        self.inputs, self.params, self.verify = inputs, params, verify
        self.scheduler, self.ends, self.vocab = scheduler, ends, vocab
        self.defaults, self.plan, self.name = defaults, plan, name
        self.parts = Parts()
        self.taps = drafter.taps if drafter else ()
        width = drafter.width if drafter else 1
        self.draft: Draft = empty(limits.slots, max(1, limits.drafts), width, inputs.device)
        self._random = Random(randbits(64) if seed is None else seed)

    # -- requests ---------------------------------------------------------------------------

    def about(self) -> ServingFacts:
        """Facts for a server."""
        return ServingFacts(
            self.name,
            self.limits.context,
            self.vocab,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.scheduler.preemptions,
            tuple(self.parts.seconds.items()),
        )

    def check(self, request: Request) -> None:
        """Whether the request can be served.

        Raises:
            RequestError: it cannot; the message has the numbers.
        """
        tokens, context = request.tokens, self.limits.context
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        if len(tokens) >= context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, and prompt and answer together may have"
                f" {context}: shorten the prompt to {context - 1} or less, or raise limits.context"
            )
        count = len({*request.params.stop_token_ids, *self.ends})
        if count > ENDS:
            raise RequestError(
                f"stop_token_ids and the checkpoint's own end ids are {count} together: at most"
                f" {ENDS} fit, leave some out"
            )
        wrong = next((t for t in tokens if not 0 <= t < self.vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self.vocab}")
        for what, ids in (
            ("stop_token_ids", request.params.stop_token_ids),
            ("logit_bias", request.params.logit_bias),
        ):
            wrong = next((t for t in ids if not 0 <= t < self.vocab), None)
            if wrong is not None:
                raise RequestError(f"{what} has id {wrong}, outside the vocabulary of {self.vocab}")

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it cannot be served.
        """
        self.check(request)
        given, tokens = request.params, list(request.tokens)
        params = resolve(given, self.defaults)
        room = self.limits.context - len(tokens)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.ends))
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        sequence = Sequence(
            request=request,
            params=params,
            tokens=tokens,
            prompt=len(tokens),
            stop_at=len(tokens) + min(room, params.max_tokens or room),
            ends=frozenset(ends),
            lineage=Lineage(request.scope, len(tokens)),
            seed=seed,
        )
        if params.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]
        self.scheduler.add(sequence)

    def abort(self, id: str) -> Output | None:
        """Drop a request; its last Output, or None if there is no such request."""
        return self.scheduler.abort(id)

    def clear(self) -> None:
        """Drop every request after a step that broke off halfway; the engine can go on."""
        self.scheduler.clear()

    @property
    def busy(self) -> bool:
        """There are requests that are not finished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def force(self, drafter: Drafter) -> None:
        """Use another drafter without stores or taps from now on, and verify all it proposes.

        Raises:
            ValueError: requests are under way, or the drafter needs memory of its own.
        """
        if self.busy or drafter.stores or drafter.taps or drafter.width > self.draft.q_ids.shape[2]:
            raise ValueError("only an idle engine takes another drafter, and one without stores")
        drafter.bind(self.cache, 0)
        self.drafter, self.taps = drafter, ()
        self.scheduler.drafting = Drafting(Costs.flat(0.0), drafter.names, fixed=self.limits.drafts)

    # -- the step ---------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute one step for all sequences; what it did for each that changed."""
        self.parts.start()
        plan = self.scheduler.plan()
        self._enter()
        if plan is None:
            return []
        batch, rows = self.inputs.fill(plan, self.cache, self.draft)
        self.parts.end("plan")
        hidden, logits = self.run_target(batch)
        self.parts.end("target")
        verdict = self.verify(logits, self.draft, batch, rows, self.inputs.history)
        self.cache.commit(batch, verdict.count)
        self.inputs.append(batch, verdict.tokens, verdict.added)
        self.parts.end("verify")
        self.run_drafter(batch, hidden, verdict)
        self.parts.end("draft")
        self._prompt_logprobs(plan, batch, hidden)
        decided = self.readback(plan, batch, rows, logits, verdict)
        outputs = self.scheduler.apply(plan, decided)
        self.parts.end("apply")
        return outputs

    def _enter(self) -> None:
        """Fill the tables of sequences admitted by the plan."""
        for sequence in self.scheduler.admitted:
            slot = sequence.slot
            self.inputs.admit(slot, sequence.tokens)
            self.params.set(slot, sequence.params, sequence.prompt, self.ends, sequence.seed)
            if self.drafter:
                self.drafter.reset(slot, sequence.request.scope, sequence.params.share)
        self.scheduler.admitted.clear()

    def run_target(self, batch: Batch) -> tuple[Hidden, Tensor]:
        """The model's forward pass, and logits [R, vocab] of the wanted rows."""
        hidden = self.model.forward(batch, self.cache, self.taps)
        return hidden, self.model.logits(hidden.last[batch.rows])

    def run_drafter(self, batch: Batch, hidden: Hidden, verdict: Verdict) -> None:
        """Let the drafters see the step and propose for the next."""
        if self.drafter:
            self.drafter.observe(batch, hidden, verdict)
            self.drafter.propose(batch, verdict, self.draft)

    def readback(
        self, plan: list[Span], batch: Batch, rows: Rows, logits: Tensor, verdict: Verdict
    ) -> list[Decided]:
        """The step's results on the host: the one wait for the device."""
        counts, added = verdict.count.tolist(), verdict.added.tolist()
        tokens = verdict.tokens.tolist()
        drafts = self.draft.count[batch.slots].tolist()
        scores = self.draft.score[batch.slots].tolist()
        sources = self.draft.source[batch.slots].tolist()
        decided = []
        for b, span in enumerate(plan):
            new = tokens[b][: added[b]]
            first = int(rows.start[b])
            logs: list[TokenLogprob] = []
            if new and span.sequence.params.logprobs is not None:
                wanted = logits[first : first + len(new)]
                logs = self._logprobs(wanted, torch.tensor(new), span.sequence.params.logprobs)
            slot, computed = span.sequence.slot, span.start + counts[b]
            self.cache.committed(slot, span.start, computed, span.chunk)
            n = drafts[b] if self.drafter else 0
            decided.append(Decided(counts[b], new, n, scores[b][:n], sources[b][:n], logs))
        return decided

    def _logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprob]:
        found = logprobs(logits, tokens.to(logits.device), top, self.vocab)
        columns = (found.token, found.rank, found.top_ids, found.top)
        return [
            TokenLogprob(t, value, tuple(zip(ids, values, strict=True)), rank)
            for t, value, rank, ids, values in zip(
                tokens.tolist(), *(c.tolist() for c in columns), strict=True
            )
        ]

    def _prompt_logprobs(self, plan: list[Span], batch: Batch, hidden: Hidden) -> None:
        """Log-probabilities of prompt tokens, a slice of rows at a time."""
        for span, place in zip(plan, batch.spans, strict=True):
            entries, top = span.sequence.prompt_logprobs, span.sequence.params.prompt_logprobs
            if not span.chunk or entries is None or top is None:
                continue
            # After a preemption the first chunks come again; their entries are there already.
            for begin in range(0, span.length, _SLICE):
                first = span.start + begin + 1
                stop = min(span.start + span.length, span.start + begin + _SLICE) + 1
                stop = min(stop, span.sequence.prompt)
                if first != len(entries) or stop <= first:
                    continue
                row = place.row + begin
                logits = self.model.logits(hidden.last[row : row + stop - first])
                targets = torch.tensor(span.sequence.tokens[first:stop])
                entries.extend(self._logprobs(logits, targets, top))


def resolve(params: SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """`params` with what it leaves open taken from `defaults`."""
    open_fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    missing = {f: getattr(defaults, f) for f in open_fields if getattr(params, f) is None}
    if params.temperature is not None and params.temperature > 0 and defaults.temperature == 0:
        # The checkpoint decodes greedily, so its filters were never meant for sampling.
        missing |= {f: v for f, v in (("top_k", 0), ("top_p", 1.0)) if f in missing}
    return replace(params, **missing) if missing else params
