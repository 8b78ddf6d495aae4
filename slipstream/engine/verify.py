"""From logits and drafts to the verdict: which drafts stand, and the token after them.

The output of a request follows the target's distribution exactly, whatever the drafts. Three
rules share one code path, chosen slot by slot:

- Greedy is the second rule on a point mass: a draft stands if it is the largest logit.
- A request without a seed uses rejection sampling (Leviathan et al. 2023; Chen et al. 2023): draft
  x, drawn from q, stands with chance min(1, p(x)/q(x)); after a rejection the token is drawn from
  max(p - q, 0), normalized. Optionally block verification (Sun et al. 2024), which decides on
  whole prefixes and keeps at least as many drafts on average.
- A request with a seed uses drafter-invariant coupling (Daliri, Musco and Suresh 2024): each row
  draws its own token with noise addressed by seed and position alone, and a draft stands if it is
  that token. The text does not depend on who drafted, or whether anyone did.

What may decide how many drafts a span brings, and from whom, is in `draft.fuse`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.engine.params import Features, ParamTable
from slipstream.engine.sampler import RowInfo, adjusted, draw, probs
from slipstream.kernels.random import Purpose, Word, uniform
from slipstream.kernels.types import Batch, Draft, Verdict

_NOISE = 16  # rounding of a sum of min(p, q), in units of the type's epsilon


class Rows(NamedTuple):
    """Where the logits of each span are.

    A span that reaches the last known token of its sequence has one row for that token and one
    for each of its drafts, one after the other: ``start[b]`` to ``start[b] + drafted[b]``
    inclusive. They belong to rows ``known - 1`` to ``length - 1`` of the span. Other rows of the
    logits are ignored.
    """

    start: Tensor  # [B] int64, row of the logits where span b begins; any value if it has none
    drafted: Tensor  # [B] int64, drafts to verify; -1: the span decides nothing (chunk, padding)
    depth: int  # no span has more drafts than this


class Noise(Protocol):
    """Where random decisions come from; tests put exact enumeration in its place."""

    def uniform(self, seed: Tensor, position: Tensor, anchor: Tensor) -> Tensor:
        """Numbers in [0, 1) that decide on the draft at ``position``."""
        ...

    def draw(
        self,
        weights: Tensor,
        seed: Tensor,
        position: Tensor,
        purpose: Word,
        anchor: Word,
        support: int,
    ) -> Tensor:
        """[R, V] weights -> [R] tokens, as `sampler.draw`."""
        ...


class Counter:
    """The noise of a running engine: `kernels.random`, addressed by what is decided."""

    def uniform(self, seed: Tensor, position: Tensor, anchor: Tensor) -> Tensor:
        return uniform(seed, position, Purpose.ACCEPT, anchor)

    def draw(
        self,
        weights: Tensor,
        seed: Tensor,
        position: Tensor,
        purpose: Word,
        anchor: Word,
        support: int,
    ) -> Tensor:
        return draw(weights, seed, position, purpose, anchor, support)


class _Step(NamedTuple):
    """What the rules need of a step; D is the depth."""

    slots: Tensor  # [B]
    drafts: Tensor  # [B, D], -1 beyond the span's drafts
    drafted: Tensor  # [B]
    rows: Tensor  # [B, D+1] rows of p
    position: Tensor  # [B, D+1] positions of the input tokens


class Verify:
    """Probabilities, then the verdict; with no drafts the same call is plain sampling.

    Args:
        params: sampling parameters of all slots.
        vocab: real token ids; logits may have more columns. None: all columns.
        block: block verification instead of draft-by-draft rejection, for unseeded requests.
        noise: source of random decisions.
    """

    def __init__(
        self,
        params: ParamTable,
        vocab: int | None = None,
        block: bool = False,
        noise: Noise | None = None,
    ) -> None:
        self.params = params
        self.vocab = vocab
        self.block = block
        self.noise: Noise = noise or Counter()

    def __call__(
        self,
        logits: Tensor,
        draft: Draft,
        batch: Batch,
        rows: Rows,
        history: Tensor | None = None,
    ) -> Verdict:
        """Decide a step.

        Drafts of span b are ``draft.tokens[slot, :drafted[b]]``. A draft that is -1, outside the
        vocabulary, or (unless the request is greedy) not on its own list is a rejection with
        nothing taken from p. The entries of a list have distinct ids. Only ``tokens``, ``q_ids``
        and ``q_prob`` are read.

        Args:
            logits: [R, V] float32 or float64.
            draft: a row per slot.
            batch: the step's spans.
            rows: where the logits of each span are.
            history: [slots, context+1] int64; needed only if a request has penalties.

        Returns:
            ``count``: known rows plus accepted drafts; the whole span if it decides nothing.
            ``tokens``: accepted drafts, then one more token, then -1. [B, K+1].
            ``added``: accepted drafts plus one, or 0.

        Raises:
            ValueError: a request has penalties and there is no history.
        """
        length = batch.starts[1:] - batch.starts[:-1]
        if logits.shape[0] == 0:  # prompt chunks only: nothing to decide
            tokens = draft.tokens.new_full((len(length), draft.tokens.shape[1] + 1), -1)
            return Verdict(length, tokens, torch.zeros_like(length))
        use = self.params.features(span.slot for span in batch.spans)
        ready = rows.drafted >= 0
        depth = min(rows.depth, draft.tokens.shape[1])
        drafted = rows.drafted.clamp(0, depth)
        steps = torch.arange(depth + 1, device=logits.device)
        index = (rows.start[:, None] + steps).clamp(0, logits.shape[0] - 1)
        exists = (steps <= drafted[:, None]) & ready[:, None]
        last = (batch.starts[:-1] + batch.known - 1).clamp(0, batch.positions.shape[0] - 1)
        position = batch.positions[last][:, None] + steps  # [B, D+1] of the input tokens

        drafts = draft.tokens[batch.slots, :depth]  # [B, D]
        inside = steps[:depth] < drafted[:, None]
        drafts = torch.where(inside, drafts, -1)
        step = _Step(batch.slots, drafts, drafted, index, position)
        info = _rows(step, exists, logits.shape[0])
        if use.greedy:
            best = adjusted(logits, info, self.params, use, history, self.vocab).argmax(1)
            own = best[index]
            accepted = _leading(drafts == own[:, :depth])
            final = own.gather(1, accepted[:, None])[:, 0]
        else:
            p = probs(logits, info, self.params, use, history, self.vocab)
            accepted, final = self._sampled(p, draft, step, info, use)

        tokens = torch.full(
            (len(length), draft.tokens.shape[1] + 1), -1, dtype=torch.int64, device=logits.device
        )
        chosen = torch.where(steps[:depth] < accepted[:, None], drafts, -1)
        tokens[:, :depth] = chosen
        tokens.scatter_(1, accepted[:, None], final[:, None])
        return Verdict(
            count=torch.where(ready, batch.known + accepted, length),
            tokens=torch.where(ready[:, None], tokens, -1),
            added=torch.where(ready, accepted + 1, 0),
        )

    def _sampled(
        self, p: Tensor, draft: Draft, step: _Step, info: RowInfo, use: Features
    ) -> tuple[Tensor, Tensor]:
        """Accepted drafts [B] and the token after them [B]."""
        slots, drafts, drafted, index = step.slots, step.drafts, step.drafted, step.rows
        depth, width = drafts.shape[1], p.shape[1]
        seed, coupled = self.params.seed[slots], self.params.coupled[slots]
        decided = step.position + 1  # [B, D+1]
        anchor = decided[:, 0]
        real = (drafts >= 0) & (drafts < width)

        own = None
        if use.coupled:
            own = self.noise.draw(
                p, self.params.seed[info.slot], info.position + 1, Purpose.TARGET, 0, use.support
            )[index]
            accepted = _leading(real & (drafts == own[:, :depth]))
            final = own.gather(1, accepted[:, None])[:, 0]
        if use.rejection:
            q_ids = draft.q_ids[slots, :depth].clamp(0, width - 1)
            q_prob = draft.q_prob[slots, :depth].to(p.dtype)
            px = p[index[:, :depth], drafts.clamp(0, width - 1)]
            qx = (q_prob * (q_ids == drafts[:, :, None])).sum(2)
            # A greedy request asks no list: its drafts stand or fall by the largest logit.
            qx = torch.where(self.params.temperature[slots][:, None] == 0, 1.0, qx)
            real = real & (qx > 0)
            q_prob = q_prob * real[:, :, None]  # a draft not from its list takes nothing from p
            u = self.noise.uniform(seed[:, None], decided[:, :depth], anchor[:, None]).to(p.dtype)
            scale = torch.ones_like(anchor, dtype=p.dtype)
            if self.block:
                kept, scale = self._block(p, step, q_ids, q_prob, px, qx, real, u)
            else:
                kept = _leading(real & (u * qx < px))
            # One row more per span: the residual at the first rejection, or p itself at the end.
            at = kept[:, None]
            weights = p[index.gather(1, at)[:, 0]]
            residual = weights * scale[:, None]
            if depth:
                near = at.clamp(max=depth - 1)
                entries = near[:, :, None].expand(-1, 1, q_ids.shape[2])
                ids, taken = q_ids.gather(1, entries)[:, 0], q_prob.gather(1, entries)[:, 0]
                taken = torch.where(at < drafted[:, None], taken, 0.0)
                residual = residual.scatter_add(1, ids, -taken).clamp_(min=0)
            # Rounding may leave nothing where p and q are equal; then p is the right law.
            empty = residual.amax(1, keepdim=True) <= 0
            weights = torch.where(empty, weights, residual)
            purpose = torch.where(kept < drafted, int(Purpose.RESIDUAL), int(Purpose.BONUS))
            token = self.noise.draw(
                weights, seed, decided.gather(1, at)[:, 0], purpose, anchor, use.support
            )
            if own is None:
                return kept, token
            accepted = torch.where(coupled, accepted, kept)
            final = torch.where(coupled, final, token)
        return accepted, final

    def _block(
        self,
        p: Tensor,
        step: _Step,
        q_ids: Tensor,
        q_prob: Tensor,
        px: Tensor,
        qx: Tensor,
        real: Tensor,
        u: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Block verification: accepted drafts [B] and the weight of p in the residual [B].

        With r_0 = 1, r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)), prefix i of k drafts is kept
        with chance h_i = m_i / (m_i + 1 - r_i), m_i = sum max(r_i p_{i+1} - q_{i+1}, 0), and
        h_k = r_k; the longest kept prefix wins.
        """
        depth = step.drafts.shape[1]
        kept = torch.zeros_like(step.drafted)
        ratio = torch.ones_like(step.drafted, dtype=p.dtype)
        scale = ratio
        for i in range(1, depth + 1):
            inside = i <= step.drafted
            grow = torch.where(real[:, i - 1], px[:, i - 1] / qx[:, i - 1], 0.0)
            ratio = (ratio * grow).clamp(max=1)
            chance = ratio
            if i < depth:
                # The sum is r - sum over the list of min(r p, q): nothing else is subtracted.
                listed = p[step.rows[:, i, None], q_ids[:, i]] * ratio[:, None]
                left = ratio - torch.minimum(listed, q_prob[:, i]).sum(1)
                # What the subtraction leaves of a true 0 must not keep a prefix when u is 0.
                left = torch.where(left > _NOISE * torch.finfo(p.dtype).eps, left, 0.0)
                total = left + 1 - ratio
                middle = torch.where(total > 0, left / total, 1.0)
                chance = torch.where(i < step.drafted, middle, ratio)
            take = inside & (u[:, i - 1] < chance)
            kept = torch.where(take, i, kept)
            scale = torch.where(take, ratio, scale)
        # After the last draft the next token comes from p itself.
        return kept, torch.where(kept < step.drafted, scale, 1.0)


def _leading(ok: Tensor) -> Tensor:
    """[B, D] -> [B], how many leading entries hold."""
    return ok.long().cumprod(1).sum(1)


def _rows(step: _Step, exists: Tensor, count: int) -> RowInfo:
    """Turn per-span facts into per-row facts, without asking how many rows there are."""
    index, device = step.rows, step.rows.device
    where = torch.where(exists, index, count).flatten()  # rows nobody owns: a spare last one

    def spread(values: Tensor) -> Tensor:
        out = torch.zeros(count + 1, dtype=torch.int64, device=device)
        return out.scatter_(0, where, values.expand(index.shape).flatten())[:count]

    span = spread(torch.arange(len(step.slots), device=device)[:, None])
    return RowInfo(
        slot=spread(step.slots[:, None]),
        position=spread(step.position),
        ahead=spread(torch.arange(index.shape[1], device=device)),
        drafts=step.drafts[span],
    )
