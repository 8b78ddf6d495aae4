"""How drafts are drawn from a drafter's list: as the request itself samples."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.engine.params import ParamTable
from slipstream.kernels.random import Purpose, exponential


class Proposals:
    """`draft.table.Choose` over the parameters of all slots.

    A greedy request gets the best candidate as a point mass. Any other gets one drawn from the
    list after its temperature, top-k, top-p and min-p; the list it is verified with is that one.
    A seeded request uses the noise its own token will be drawn with, so that a good list draws
    the same token; an unseeded one uses noise that decides nothing else.
    """

    def __init__(self, params: ParamTable) -> None:
        self.params = params

    def __call__(
        self, ids: Tensor, logits: Tensor, slots: Tensor, position: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        table, dtype = self.params, logits.dtype
        temperature = table.temperature[slots].to(dtype)[:, None]
        greedy = temperature == 0
        best = logits.argmax(1, keepdim=True)
        point = torch.zeros_like(logits).scatter_(1, best, 1.0)
        x = (logits - logits.gather(1, best)) / torch.where(greedy, 1.0, temperature)
        prob = torch.where(greedy, point, self._filtered(x.softmax(1), slots))
        coupled = table.coupled[slots]
        purpose = torch.where(coupled, int(Purpose.TARGET), int(Purpose.DRAFT))
        noise = exponential(
            table.seed[slots][:, None],
            position[:, None],
            ids,
            purpose[:, None],
            torch.where(coupled, 0, anchor)[:, None],
            dtype,
        )
        return ids.gather(1, (prob / noise).argmax(1, keepdim=True))[:, 0], prob

    def _filtered(self, prob: Tensor, slots: Tensor) -> Tensor:
        """top-k, top-p and min-p within the list, and what is left scaled to 1."""
        table = self.params
        sorted_prob, order = prob.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(prob.shape[1], device=prob.device)
        k = table.top_k[slots][:, None]
        keep = (rank < k) | (k == 0)
        keep &= sorted_prob.cumsum(1) - sorted_prob < table.top_p[slots][:, None]
        keep &= sorted_prob >= table.min_p[slots][:, None] * sorted_prob[:, :1]
        keep[:, 0] = True
        kept = torch.where(keep, sorted_prob, 0.0)
        return torch.zeros_like(prob).scatter_(1, order, kept / kept.sum(1, keepdim=True))
