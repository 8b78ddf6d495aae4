"""What the machine can do at best, measured."""

from __future__ import annotations

import time

import torch


def copy_bandwidth(nbytes: int = 2**28, repeats: int = 7) -> float:
    """Bytes per second of a large copy, read plus written; the best of several."""
    source = torch.ones(nbytes // 4)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(repeats):
        begin = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * nbytes / (time.perf_counter() - begin))
    return best
