"""From logits to the distribution a token is drawn from, and the draw itself.

Everything here works on rows: row r of a ``[R, V]`` tensor is one position whose next token is to
be decided. The result of a row never depends on the rows beside it, bit for bit: sums over the
vocabulary are left to softmax, which reduces each row by itself in vocabulary order, and the
cumulative mass of top-p is counted in integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.engine.params import Features, ParamTable
from slipstream.kernels.random import Word, exponential

_MASS = 2.0**52  # units of probability in top-p's cumulative sums


class RowInfo(NamedTuple):
    """Where each row stands.

    ``ahead`` and ``drafts`` matter to penalties only: the row's text is the slot's history up to
    ``position - ahead``, then its first ``ahead`` drafts.
    """

    slot: Tensor  # [R] int64
    position: Tensor  # [R] int64, of the row's input token; the row decides position + 1
    ahead: Tensor  # [R] int64, drafts of the span that stand before the decided token
    drafts: Tensor  # [R, K] int64, drafts of the row's span; -1 where there is none


class Logprobs(NamedTuple):
    """Log-probabilities under the model itself."""

    token: Tensor  # [R], of the given token
    rank: Tensor  # [R] int64, tokens before it in order of probability; ties by id
    top_ids: Tensor  # [R, top] int64, most probable first
    top: Tensor  # [R, top]


def adjusted(
    logits: Tensor,
    rows: RowInfo,
    params: ParamTable,
    use: Features,
    history: Tensor | None = None,
    vocab: int | None = None,
) -> Tensor:
    """Logits after penalties, bias and masks; what a greedy request takes the maximum of.

    Order: repetition penalty over prompt and output (Keskar et al. 2019), frequency and presence
    penalties over the output, logit_bias, end ids masked before min_tokens, ids from ``vocab`` on
    masked. The drafts before a row count as output.

    Args:
        logits: [R, V] float32 or float64; left as it is.
        rows: where the rows stand.
        params: the table of parameters.
        use: ``params.features`` of the slots in ``rows``.
        history: [slots, context+1] int64, tokens of every slot; needed if ``use.penalty``.
        vocab: real ids; None: all V.

    Returns:
        [R, V] of the same type; may be ``logits`` itself if nothing applies.

    Raises:
        ValueError: a penalty is in use and there is no history.
    """
    width, dtype, slot = logits.shape[1], logits.dtype, rows.slot
    out = logits
    if use.penalty:
        if history is None:
            raise ValueError("penalties need the history table")
        out = _penalized(out, rows, params, history)
    if use.bias:
        ids = params.bias_ids[slot].clamp(0, width - 1)
        out = out.scatter_add(1, ids, params.bias_values[slot].to(dtype))
    if use.min_tokens:
        early = rows.position + 1 - params.prompt_len[slot] < params.min_tokens[slot]
        hit = params.end_used[slot] & early[:, None] & (params.end_ids[slot] < width)
        # Adding minus infinity, or zero where nothing is to be masked: unused ids do no harm.
        drop = torch.zeros(hit.shape, dtype=dtype, device=out.device).masked_fill_(hit, -torch.inf)
        out = out.scatter_add(1, params.end_ids[slot].clamp(0, width - 1), drop)
    if vocab is not None and vocab < width:
        out = out.clone() if out is logits else out
        out[:, vocab:] = -torch.inf
    return out


def _penalized(logits: Tensor, rows: RowInfo, params: ParamTable, history: Tensor) -> Tensor:
    slot, dtype, width = rows.slot, logits.dtype, logits.shape[1]
    text = history[slot]  # [R, context+1]
    at = torch.arange(text.shape[1], device=text.device)
    known = (rows.position + 1 - rows.ahead)[:, None]
    prompt = params.prompt_len[slot][:, None]
    drafted = torch.arange(rows.drafts.shape[1], device=text.device) < rows.ahead[:, None]

    def count(where: Tensor, with_drafts: bool) -> Tensor:
        total = torch.zeros(logits.shape, dtype=dtype, device=logits.device)
        total.scatter_add_(1, text.clamp(0, width - 1), where.to(dtype))
        if with_drafts:
            real = drafted & (rows.drafts >= 0)
            total.scatter_add_(1, rows.drafts.clamp(0, width - 1), real.to(dtype))
        return total

    output = count((at < known) & (at >= prompt), True)
    seen = (output > 0) | (count((at < known) & (at < prompt), False) > 0)
    penalty = torch.where(seen, params.repetition[slot].to(dtype)[:, None], 1.0)
    out = torch.where(logits > 0, logits / penalty, logits * penalty)
    out = out - params.frequency[slot].to(dtype)[:, None] * output
    return out - params.presence[slot].to(dtype)[:, None] * (output > 0)


def probs(
    logits: Tensor,
    rows: RowInfo,
    params: ParamTable,
    use: Features,
    history: Tensor | None = None,
    vocab: int | None = None,
) -> Tensor:
    """The distribution each row's token is drawn from.

    After `adjusted`: temperature; top-k (exactly k tokens, ties to the lower ids); top-p on the
    renormalised top-k set (a token stays if the mass before it, in order of probability, is less
    than p; ties to the lower ids); min-p (tokens below min_p times the most probable one go).
    Temperature 0 is a point mass on the largest logit, the lowest id among equals.

    Args and errors: as `adjusted`.

    Returns:
        [R, V] of the type of ``logits``; rows sum to 1.
    """
    dtype = logits.dtype
    x = adjusted(logits, rows, params, use, history, vocab)
    temperature = params.temperature[rows.slot].to(dtype)[:, None]
    greedy = temperature == 0
    best = x.argmax(1, keepdim=True)
    point = torch.zeros_like(x).scatter_(1, best, 1.0)
    if use.greedy:
        return point
    # Shifting first keeps small temperatures from overflowing.
    x = (x - x.gather(1, best)) / torch.where(greedy, 1.0, temperature)
    if use.top_k:
        x = _top_k(x, params.top_k[rows.slot], min(use.top_k, x.shape[1]))
    before = x
    if use.ordered:
        count = x.shape[1] if use.ordered < 0 else min(use.ordered, x.shape[1])
        x = _top_p(x, params.top_p[rows.slot], count)
    if use.min_p:
        floor = params.min_p[rows.slot].log().to(dtype)[:, None]
        x = torch.where(before >= floor, x, -torch.inf)
    return torch.where(greedy, point, torch.softmax(x, 1))


def _top_k(x: Tensor, k: Tensor, most: int) -> Tensor:
    """Keep the k largest of each row, lower ids first among equals; k = 0 keeps all."""
    values = x.topk(most, 1).values
    last = values.gather(1, (k.clamp(1, most) - 1)[:, None])
    tie = x == last
    room = k[:, None] - (x > last).sum(1, keepdim=True)
    keep = (x > last) | (tie & (tie.cumsum(1) <= room)) | (k == 0)[:, None]
    return torch.where(keep, x, -torch.inf)


def _top_p(x: Tensor, p: Tensor, count: int) -> Tensor:
    """Keep the smallest leading set of mass at least p, where p < 1.

    ``count`` leading tokens cover every row that has a p below 1.
    """
    # In order of probability, ids ascending among equals; sort() and topk() alone leave the order
    # of equals open.
    if count < x.shape[1]:
        ids = x.topk(count, 1).indices.sort(1).values
        ids = ids.gather(1, x.gather(1, ids).sort(dim=1, descending=True, stable=True).indices)
    else:
        ids = x.sort(dim=1, descending=True, stable=True).indices
    mass = (torch.softmax(x, 1).gather(1, ids).double() * _MASS).round().long()
    before = mass.cumsum(1) - mass  # integers: exact, whatever the order of summation
    keep = before < (p * _MASS).round().long()[:, None]
    # Rows without top-p keep everything; with a short list that includes what is not on it.
    kept = (p >= 1)[:, None].expand_as(x).scatter(1, ids, keep | (p >= 1)[:, None])
    return torch.where(kept, x, -torch.inf)


def draw(
    weights: Tensor, seed: Tensor, position: Tensor, purpose: Word, anchor: Word, support: int = 0
) -> Tensor:
    """One token per row with chance proportional to its weight (the exponential race).

    Args:
        weights: [R, V], at least 0, not all 0; need not sum to 1.
        seed, position: [R] int64. purpose, anchor: [R] int64 or ints (see `kernels.random`).
        support: no row has more positive weights than this; 0: no bound. It saves noise for
            tokens that cannot win and changes no result.

    Returns:
        [R] int64.
    """

    def column(x: Word) -> Word:
        return x[:, None] if isinstance(x, Tensor) else x

    width = weights.shape[1]
    if 0 < support < width:
        ids = weights.topk(support, 1).indices.sort(1).values
        weights = weights.gather(1, ids)
    else:
        ids = torch.arange(width, device=weights.device).expand_as(weights)
    noise = exponential(
        seed[:, None], position[:, None], ids, column(purpose), column(anchor), weights.dtype
    )
    return ids.gather(1, (weights / noise).argmax(1, keepdim=True))[:, 0]


def logprobs(logits: Tensor, tokens: Tensor, top: int, vocab: int | None = None) -> Logprobs:
    """Log-probabilities of the model's own distribution: no temperature, no filter, no penalty.

    Args:
        logits: [R, V].
        tokens: [R] int64.
        top: alternatives per row, 0 to V.
        vocab: real ids; None: all V.

    Returns:
        See `Logprobs`; ids are in order of probability, lower ids first among equals.
    """
    x = logits[:, :vocab]
    logs = torch.log_softmax(x, 1)
    own = x.gather(1, tokens[:, None])
    ids = torch.arange(x.shape[1], device=x.device)
    rank = ((x > own) | ((x == own) & (ids < tokens[:, None]))).sum(1)
    if top:
        # Exactly the `top` largest with lower ids first: as top-k does it.
        kept = _top_k(x, torch.full_like(tokens, top), top)
        best = kept.topk(top, 1).indices.sort(1).values
        best = best.gather(1, x.gather(1, best).sort(dim=1, descending=True, stable=True).indices)
    else:
        best = torch.empty(len(tokens), 0, dtype=torch.int64, device=x.device)
    return Logprobs(logs.gather(1, tokens[:, None])[:, 0], rank, best, logs.gather(1, best))
