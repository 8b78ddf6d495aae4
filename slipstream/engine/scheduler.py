"""What each step computes: admission, chunks, drafts, preemption, stops. Sees no tensor."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from slipstream.engine.batch import Limits, Sequence, Span
from slipstream.engine.costs import Costs
from slipstream.engine.lengths import choose, floors, gains, ration, settle
from slipstream.engine.prefix import Hit
from slipstream.kernels.types import PAGE
from slipstream.request import (
    FinishReason,
    Output,
    Speculation,
    Timing,
    TokenLogprob,
    Usage,
)


class Pages(Protocol):
    """The cache as the scheduler knows it."""

    @property
    def available(self) -> int: ...
    def admit(self, sequence: Sequence, spare: int = 0) -> Hit | None: ...
    def reserve(self, slot: int, upto: int) -> bool: ...
    def publish(self, sequence: Sequence) -> None: ...
    def snapshot(self, sequence: Sequence) -> None: ...
    def release(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """How much to draft.

    costs: what rows and drafters cost.
    names: drafters by source number; those without a price in `costs` are always asked.
    reach: positions past the last known token that drafting itself writes to pages.
    fixed: drafts to verify whatever they promise, everybody asked for as many; None: what pays.
    """

    costs: Costs
    names: tuple[str, ...]
    reach: int = 0
    fixed: int | None = None

    @property
    def silence(self) -> tuple[int, ...]:
        """What is asked for a request that does not speculate."""
        return (0,) * len(self.names)

    @property
    def paid(self) -> tuple[int, ...]:
        """Sources whose drafts cost something."""
        draft = self.costs.draft
        return tuple(s for s, name in enumerate(self.names) if draft(name, 1) > 0)


@dataclass(frozen=True, slots=True)
class Decided:
    """One span's verdict on the host."""

    count: int  # positions that became real
    tokens: list[int]  # newly decided
    drafts: int  # proposed for the next step
    scores: list[float]
    sources: list[int]
    logprobs: list[TokenLogprob]


class Scheduler:
    """Owns all sequences.

    Args:
        limits: sizes; every step fits them.
        cache: gives slots and pages.
        snapshot_every: prompt positions between snapshots, a multiple of PAGE; 0: none, because
            the model has no recurrent state or nothing is reused.
        drafting: None: no speculation.
        keep_generated: keep the state at the end of an answer for a later turn.
    """

    def __init__(
        self,
        limits: Limits,
        cache: Pages,
        *,
        snapshot_every: int,
        drafting: Drafting | None,
        keep_generated: bool,
    ) -> None:
        self.limits, self.cache = limits, cache
        self.snapshot_every, self.drafting = snapshot_every, drafting
        self.keep_generated = keep_generated
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.admitted: list[Sequence] = []  # since the last step; the engine fills their tables
        self.preemptions = 0
        self._rate = 0.0  # tokens per ms that the last step was expected to give
        self._known_curve: tuple[Costs, list[float]] | None = None

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def abort(self, id: str) -> Output | None:
        """Drop a request, queued or running; None if it is neither."""
        for sequence in (*self.running, *self.waiting):
            if sequence.request.id == id:
                return self._finish(sequence, (), (), (), "abort", None)
        return None

    def clear(self) -> None:
        """Drop every request and keep nothing of it: for when a step broke off halfway.

        The state of a sequence may then be ahead of what the host knows, so no snapshot is taken.
        """
        for sequence in list(self.running):
            self._release(sequence)
        self.waiting.clear()

    # -- planning ---------------------------------------------------------------------------

    def plan(self) -> list[Span] | None:
        """The next step's spans, short ones first; None if there is nothing to compute."""
        self._admit()
        plan = self._short_spans()
        plan += self._chunks(self.limits.tokens - sum(s.length for s in plan))
        # Preemption may have taken a sequence that was planned before.
        plan = [s for s in plan if s.sequence.slot]
        return plan or None

    def _admit(self) -> None:
        """First come, first served, while there are slots and pages for the whole prompt.

        Every running sequence keeps a page in reserve, so that admission is not undone by the
        next tokens of those that run.
        """
        while self.waiting and len(self.running) < self.limits.seqs:
            sequence = self.waiting[0]
            hit = self.cache.admit(sequence, spare=len(self.running))
            if hit is None:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self.admitted.append(sequence)
            sequence.computed = hit.position
            sequence.drafts = 0
            if sequence.cached < 0:
                sequence.cached = min(hit.position, sequence.prompt)
                sequence.admitted = monotonic()
            sequence.marks = self._marks(sequence, hit)

    def _marks(self, sequence: Sequence, hit: Hit) -> tuple[int, ...]:
        """Prompt positions whose state is worth keeping.

        Every so often, the last page border of the prompt, and the place where this prompt
        leaves text that is known but has no snapshot: the next one that leaves there resumes.
        """
        if not self.snapshot_every:
            return ()
        last = (sequence.prompt - 1) // PAGE * PAGE
        marks = {*range(self.snapshot_every, last, self.snapshot_every), hit.shared, last}
        return tuple(sorted(m for m in marks if sequence.computed < m <= last))

    def _short_spans(self) -> list[Span]:
        decoding = [s for s in self.running if not s.prefilling]
        # One row each comes first; a prompt in progress keeps room for a page.
        reserve = PAGE if len(decoding) < len(self.running) else 0
        spare = max(0, self.limits.tokens - reserve - len(decoding))
        counts = self._drafts(decoding, spare)
        rows = len(decoding) + sum(counts)
        spare -= sum(counts)
        plan: list[Span] = []
        for sequence, drafts in zip(decoding, counts, strict=True):
            known = len(sequence.tokens) - sequence.computed
            # Behind a preemption several tokens are known already.
            known = min(known, 1 + spare, self.limits.span - drafts)
            spare -= known - 1
            length, start = known + drafts, sequence.computed
            if sequence.slot and self._reserve(sequence, start + length):
                ready = start + known == len(sequence.tokens)
                ask = self._ask(sequence, ready, len(decoding), rows - drafts)
                plan.append(Span(sequence, start, length, drafts, False, ask))
        return plan

    def _ask(
        self, sequence: Sequence, ready: bool, crowd: int = 1, rows: int = 1
    ) -> tuple[int, ...] | None:
        """Drafts wanted from each source for the next step.

        Args:
            ready: the span decides a token, so that there will be drafts.
            crowd: requests that share the step.
            rows: of the step, without this request's drafts.
        """
        drafting, most = self.drafting, self.limits.drafts
        if drafting is None:
            return None
        if not sequence.params.speculate:
            return drafting.silence
        paid = drafting.paid
        if not ready or not paid:
            return None
        if drafting.fixed is not None:
            return (min(most, drafting.fixed),) * len(drafting.names)
        # After a token there must be room for a draft and the token behind it.
        room = min(most, sequence.stop_at - len(sequence.tokens) - 2)
        pick: dict[int, int] = {}
        if room > 0:
            curve = self._curve(rows + room)
            # Alone, a request pays for its whole step; in a crowd, for what it adds.
            base = curve[rows] / crowd - curve[rows]
            sharing = {s: 1 + self._askers(s, sequence) for s in paid}
            pick = sequence.asks.choose(
                sequence.acceptance,
                sequence.source[0] if sequence.drafts else None,
                {s: self._prices(s, room, sharing[s]) for s in paid},
                [base + ms for ms in curve[rows : rows + room + 1]],
                self._rate if crowd > 1 else None,
            )
        names = range(len(drafting.names))
        return tuple(pick.get(s, 0) if s in paid else most for s in names)

    def _askers(self, source: int, but: Sequence) -> int:
        """Other requests that asked the source last; they share its pass."""
        return sum(source in s.asks.given for s in self.running if s is not but)

    def _prices(self, source: int, most: int, askers: int) -> list[float]:
        """One request's part of what 0, 1, ... drafts of a source take, in ms."""
        assert self.drafting
        name, costs = self.drafting.names[source], self.drafting.costs
        return [costs.draft(name, k) / askers for k in range(min(most, costs.most(name)) + 1)]

    def _curve(self, most: int) -> list[float]:
        """ms of a step by its short rows, up to `most` or more."""
        assert self.drafting
        costs, curve = self.drafting.costs, self._known_curve
        if curve is None or curve[0] is not costs or len(curve[1]) <= most:
            self._known_curve = curve = costs, costs.curve(most + self.limits.span)
        return curve[1]

    def _drafts(self, decoding: list[Sequence], spare: int) -> list[int]:
        """Drafts to verify for each sequence, out of `spare` rows in all.

        Everything but the walk over the scores is decided by the past.
        """
        drafting = self.drafting
        if drafting is None or not decoding:
            return [0] * len(decoding)
        # A draft beyond the last token that may come would be wasted.
        rooms = [
            min(self.limits.drafts, s.stop_at - len(s.tokens) - 1)
            if s.drafts and len(s.tokens) - s.computed == 1 and s.params.speculate
            else 0
            for s in decoding
        ]
        if drafting.fixed is not None:
            tops = [min(s.drafts, n, drafting.fixed) for s, n in zip(decoding, rooms, strict=True)]
            return ration([gains([0.5] * top) for top in tops], spare)
        chances = [
            self._chances(s, s.source[0], n) if n else []
            for s, n in zip(decoding, rooms, strict=True)
        ]
        gain = [gains(row) for row in chances]
        crowd = len(decoding)
        curve = self._curve(crowd + 2 * sum(rooms) + 1)
        expected, self._rate = settle(gain, curve, self._beside(decoding))
        rows = crowd + sum(expected)
        # Behind what the past can tell of, another source may go on.
        wide = [gains(c + [0.5] * (n - len(c))) for c, n in zip(chances, rooms, strict=True)]
        counts = []
        for i, (sequence, most) in enumerate(zip(decoding, ration(wide, spare), strict=True)):
            n = min(sequence.drafts, rooms[i])
            sources = sequence.source[:n]
            others = rows - expected[i]  # rows of the step without this one's drafts
            floor = {
                s: self._floors(sequence, s, rooms[i], curve[others:], self._rate)
                for s in set(sources)
            }
            scores = sequence.acceptance.correct(sequence.scores[:n], sources)
            k = choose(scores, min(n, most), [floor[s][j] for j, s in enumerate(sources)])
            if min(n, most) > 0:
                extra = curve[others + 1] - curve[others]
                longest = sequence.asks.longest(extra, curve[crowd] / crowd)
                k = sequence.asks.probe(sources[0], k, longest)
            counts.append(k)
        return counts

    @staticmethod
    def _chances(sequence: Sequence, source: int, most: int) -> list[float]:
        """What the past says of the source's part of the waiting block."""
        return sequence.acceptance.chances(source, sequence.asks.expected(source, most))

    def _floors(
        self, sequence: Sequence, source: int, most: int, cost: list[float], rate: float
    ) -> list[float]:
        """By position, what a draft of the source must exceed."""
        ahead = self._chances(sequence, source, most)
        ahead += [0.0] * (most - len(ahead))
        return floors(ahead, cost, rate)

    def _beside(self, decoding: list[Sequence]) -> float:
        """ms that drafting adds to a step as long as everybody asks what was asked last."""
        assert self.drafting
        most: dict[int, int] = {}
        for sequence in decoding:
            for source, count in sequence.asks.given.items():
                most[source] = max(count, most.get(source, 0))
        names, draft = self.drafting.names, self.drafting.costs.draft
        return sum(draft(names[source], count) for source, count in most.items())

    def _chunks(self, budget: int) -> list[Span]:
        """Prompt chunks. The oldest prompt gets half; the rest goes to the shortest first.

        So a short prompt has its first token soon beside a long one, and the long one never
        stands still.
        """
        prefilling = [s for s in self.running if s.prefilling]
        if not prefilling:
            return []
        oldest = prefilling[0]
        rest = sorted(prefilling[1:], key=lambda s: s.prompt - s.computed)
        half = max(PAGE, budget // 2) if rest else budget
        lengths = {id(oldest): self._chunk(oldest, min(half, budget))}
        budget -= lengths[id(oldest)]
        for sequence in rest:
            lengths[id(sequence)] = self._chunk(sequence, budget)
            budget -= lengths[id(sequence)]
        if budget >= PAGE:
            longer = self._chunk(oldest, lengths[id(oldest)] + budget)
            lengths[id(oldest)] = longer
        plan = []
        for sequence in prefilling:
            length = lengths[id(sequence)]
            end = sequence.computed + length
            if length and sequence.slot and self._reserve(sequence, end):
                ask = self._ask(sequence, end == len(sequence.tokens))
                plan.append(Span(sequence, sequence.computed, length, 0, True, ask))
        return plan

    @staticmethod
    def _chunk(sequence: Sequence, budget: int) -> int:
        """Rows of the next chunk: to a snapshot, a page border or the end of the prompt."""
        start, end = sequence.computed, min(sequence.computed + budget, sequence.prompt)
        end = min([end, *(m for m in sequence.marks if m > start)])
        if end < sequence.prompt:
            end -= end % PAGE
        return max(0, end - start)

    def _reserve(self, sequence: Sequence, upto: int) -> bool:
        """Pages for a span; takes them from the sequence admitted last if it must."""
        if self.drafting and upto >= sequence.prompt and sequence.params.speculate:
            upto = min(upto + self.drafting.reach, self.limits.pages * PAGE)
        while not self.cache.reserve(sequence.slot, upto):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence off the device; it waits at the front, its text so far as it is."""
        self.preemptions += 1
        self.cache.snapshot(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.slot)
        self.running.remove(sequence)
        if sequence in self.admitted:
            self.admitted.remove(sequence)
        sequence.slot = sequence.computed = sequence.drafts = 0

    # -- after the step ---------------------------------------------------------------------

    def apply(self, plan: list[Span], decided: list[Decided]) -> list[Output]:
        """Enter a step's verdicts: new tokens, ends, snapshots, next drafts."""
        outputs = []
        for span, verdict in zip(plan, decided, strict=True):
            output = self._advance(span, verdict)
            if output:
                outputs.append(output)
        return outputs

    def _advance(self, span: Span, verdict: Decided) -> Output | None:
        sequence = span.sequence
        known = span.length - span.drafts
        sequence.computed = span.start + verdict.count
        if span.ready:
            accepted = verdict.count - known
            scores, sources = sequence.scores[: span.drafts], sequence.source[: span.drafts]
            sequence.acceptance.update(scores, sources, accepted)
            if sources:
                sequence.asks.verified(sources[0], accepted > 0)
            sequence.asks.enter(verdict.sources[: verdict.drafts])
        sequence.drafts = verdict.drafts
        sequence.scores, sequence.source = verdict.scores, verdict.sources
        if not span.ready:
            self.cache.publish(sequence)
            if sequence.computed in sequence.marks:
                self.cache.snapshot(sequence)
            return None
        names = self.drafting.names if self.drafting else ()
        origin = [names[s] for s in sources[:accepted]] + ["target"]
        tokens, finish, reason = self._cut(sequence, verdict.tokens)
        sequence.tokens += tokens
        # A stop inside the span: what came behind it never was.
        sequence.computed = min(sequence.computed, len(sequence.tokens))
        self._count(sequence, [names[s] for s in sources], min(accepted, len(tokens)))
        if sequence.generated == len(tokens):
            sequence.first = monotonic()
        self.cache.publish(sequence)
        if span.chunk and sequence.computed in sequence.marks:
            self.cache.snapshot(sequence)
        count = len(tokens)
        parts = (tuple(tokens), tuple(origin[:count]), tuple(verdict.logprobs[:count]))
        if finish:
            return self._finish(sequence, *parts, finish, reason)
        return self._output(sequence, *parts, None, None)

    @staticmethod
    def _count(sequence: Sequence, drafted: list[str], kept: int) -> None:
        """Enter a deciding step into the request's record: its drafts' sources, how many stay."""
        k = len(drafted)
        sequence.steps += 1
        sequence.drafted += k
        sequence.accepted += kept
        for names, found in (
            (sequence.drafted_by_source, drafted),
            (sequence.accepted_by_source, drafted[:kept]),
        ):
            for name in found:
                names[name] = names.get(name, 0) + 1
        for places in (sequence.drafted_by_position, sequence.accepted_by_position):
            places.extend([0] * (k - len(places)))
        for at in range(k):
            sequence.drafted_by_position[at] += 1
            sequence.accepted_by_position[at] += at < kept
        sequence.lengths.extend([0] * (k + 1 - len(sequence.lengths)))
        sequence.lengths[k] += 1

    @staticmethod
    def _cut(
        sequence: Sequence, tokens: list[int]
    ) -> tuple[list[int], FinishReason | None, int | None]:
        """New tokens up to the first that ends the text."""
        for i, token in enumerate(tokens):
            length = len(sequence.tokens) + i + 1
            if token in sequence.ends and length - sequence.prompt > sequence.params.min_tokens:
                return tokens[: i + 1], "stop", token
            if length >= sequence.stop_at:
                return tokens[: i + 1], "length", None
        return tokens, None, None

    def _finish(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        sources: tuple[str, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason,
        reason: int | str | None,
    ) -> Output:
        if sequence.slot:
            # The folded state may be ahead of a stop only by rows that the rings still hold.
            if self.keep_generated and sequence.computed >= sequence.prompt:
                self.cache.snapshot(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        return self._output(sequence, tokens, sources, logprobs, finish, reason)

    def _output(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        sources: tuple[str, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason | None,
        reason: int | str | None,
    ) -> Output:
        now = monotonic()
        prompt_logprobs = None
        started = bool(tokens) and sequence.generated == len(tokens)
        if started and sequence.prompt_logprobs is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        return Output(
            id=sequence.request.id,
            tokens=tokens,
            sources=sources,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
            stop_reason=reason,
            usage=Usage(sequence.prompt, sequence.generated, max(sequence.cached, 0)),
            timing=Timing(
                queued=(sequence.admitted or now) - sequence.arrived,
                first_token=(sequence.first or now) - sequence.arrived,
                total=now - sequence.arrived,
            ),
            speculation=Speculation(
                sequence.steps,
                sequence.generated,
                sequence.drafted,
                sequence.accepted,
                dict(sequence.accepted_by_source),
                dict(sequence.drafted_by_source),
                tuple(sequence.drafted_by_position),
                tuple(sequence.accepted_by_position),
                tuple(sequence.lengths),
            ),
        )
