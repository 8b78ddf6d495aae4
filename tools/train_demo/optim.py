"""Muon for matrices, AdamW for the rest, and a warm-up/stable/decay schedule.

Muon: momentum whose update is made orthogonal by a Newton-Schulz iteration (Jordan et al. 2024), scaled
to AdamW's update size (Liu et al. 2025, arXiv:2502.16982).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _orthogonal(x: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a stack ``[n, r, c]``, roughly; quintic iteration in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = y @ y.mT
        y = a * y + (b * s + c * (s @ s)) @ y
    return y.mT if tall else y


class Optimizer:
    """Steps all weights; matrices inside the body by Muon, embedding, head and vectors by AdamW.

    State is a flat dict of tensors, so that it can be saved next to the weights.
    """

    def __init__(self, weights: dict[str, Tensor], compiled: bool = False) -> None:
        self.weights = weights
        self.groups: dict[tuple[int, ...], list[str]] = {}
        self.plain: list[str] = []
        for name, w in weights.items():
            wide = w.dim() == 2 and min(w.shape) >= 32
            if wide and not name.endswith(("embed_tokens.weight", "lm_head.weight", "codebook")):
                self.groups.setdefault(tuple(w.shape), []).append(name)
            else:
                self.plain.append(name)
        self.state: dict[str, Tensor] = {f"m.{n}": torch.zeros_like(w) for n, w in weights.items()}
        self.state |= {f"v.{n}": torch.zeros_like(weights[n]) for n in self.plain}
        self.count = 0
        self.orthogonal = torch.compile(_orthogonal, dynamic=False) if compiled else _orthogonal

    @torch.no_grad()
    def step(self, muon_lr: float, adam_lr: float, clip: float = 1.0, decay: float = 0.1) -> Tensor:
        """One update from the ``.grad`` of the weights; returns the gradient norm (before clipping)."""
        self.count += 1
        names = list(self.weights)
        grads = [self.weights[n].grad for n in names]
        if any(g is None for g in grads):
            missing = [n for n, g in zip(names, grads, strict=True) if g is None]
            raise RuntimeError(f"no gradient for {missing}")
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
        for shape, group in self.groups.items():
            g = [self.weights[n].grad for n in group]
            m = [self.state[f"m.{n}"] for n in group]
            torch._foreach_lerp_(m, g, 0.05)
            update = self.orthogonal(torch.stack(torch._foreach_lerp(g, m, 0.95))).float()
            w = [self.weights[n] for n in group]
            torch._foreach_mul_(w, 1 - muon_lr * decay)
            torch._foreach_add_(w, list(update.unbind()), alpha=-muon_lr * 0.2 * max(shape) ** 0.5)
        g = [self.weights[n].grad for n in self.plain]
        m = [self.state[f"m.{n}"] for n in self.plain]
        v = [self.state[f"v.{n}"] for n in self.plain]
        torch._foreach_lerp_(m, g, 0.1)
        torch._foreach_mul_(v, 0.95)
        torch._foreach_addcmul_(v, g, g, 0.05)
        scale = adam_lr / (1 - 0.9**self.count)
        root = torch._foreach_sqrt(torch._foreach_div(v, 1 - 0.95**self.count))
        torch._foreach_add_(root, 1e-8)
        torch._foreach_addcdiv_([self.weights[n] for n in self.plain], m, root, -scale)
        for w in self.weights.values():
            w.grad = None
        return norm


def schedule(step: float, steps: int, warm: int = 100, decay: float = 0.35) -> float:
    """Learning-rate factor: linear warm-up, level, then linear to 0 over the last ``decay`` share."""
    start = steps * (1 - decay)
    if step < warm:
        return min((step + 1) / warm, 1.0)
    return 1.0 if step < start else max((steps - step) / (steps - start), 0.0)
