"""Counter-based random numbers: every draw is a function of what it is for, not of when.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", 2011) in int64 tensors, bit for bit what ``tl.philox`` computes with 32-bit counters.
A draw is addressed by

    key = seed,  counter = (position, token, purpose, anchor)

``position`` is the absolute position of the token being decided, ``token`` a vocabulary id where
each id needs its own number (else 0), ``purpose`` says which decision it serves, and ``anchor``
is the first position its step decides. A seeded request leaves the anchor 0, so that its noise
does not depend on how positions were grouped into steps; rejection sampling sets it, so that a
number which has already decided something in an earlier step never decides anything again.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_SCALE = 4.6566127342e-10  # just below 2^-31: Triton's constant, keeps the result under 1


class Purpose(IntEnum):
    """What a random number decides. Two purposes never share a number."""

    TARGET = 0  # the token of a seeded request; a drafter that samples may look at it too
    ACCEPT = 1  # whether a draft is accepted
    RESIDUAL = 2  # the token after a rejection
    BONUS = 3  # the token after the last accepted draft, and of plain sampling
    DRAFT = 4  # the drafts of an unseeded request


Word = Tensor | int


def philox(
    seed: Tensor, c0: Word, c1: Word, c2: Word, c3: Word
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for a key and a counter (Philox-4x32-10).

    Args:
        seed: int64 of any shape; its low and high halves are the two key words.
        c0, c1, c2, c3: the counter, int64 tensors broadcastable with ``seed``, or plain ints;
            the low 32 bits count.

    Returns:
        Four int64 tensors of the common shape with values in [0, 2^32).
    """
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    # Plain ints stay plain: as tensors they would have to be copied to the device first.
    a, b, c, d = c0 & _LOW, c1 & _LOW, c2 & _LOW, c3 & _LOW
    for turn in range(_ROUNDS):
        # Products of two 32-bit numbers wrap around in int64, which leaves all 64 bits right.
        left, right = a * _MUL[0], c * _MUL[1]
        key0, key1 = (k0 + turn * _WEYL[0]) & _LOW, (k1 + turn * _WEYL[1]) & _LOW
        a = ((right >> 32) & _LOW) ^ b ^ key0
        b = right & _LOW
        c = ((left >> 32) & _LOW) ^ d ^ key1
        d = left & _LOW
    # Every word has met the key and every other word: all are tensors of the common shape.
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    assert isinstance(c, Tensor) and isinstance(d, Tensor)
    return a, b, c, d


def uniform(seed: Tensor, position: Word, purpose: Word, anchor: Word = 0) -> Tensor:
    """One number in [0, 1) per element, as ``tl.rand`` turns a word into a float.

    Args:
        seed: int64 of any shape; the other arguments broadcast with it.
        position: absolute position the number is for.
        purpose: a `Purpose`, or an int64 tensor of them.
        anchor: first position the step decides; 0 for seeded requests.

    Returns:
        float32 of the common shape. 0 can occur, 1 cannot: ``uniform(...) < h`` has chance h.
    """
    word = philox(seed, position, 0, purpose, anchor)[0]
    # The word read as a signed integer, negative values folded onto the others.
    return torch.where(word >= 2**31, _LOW - word, word).to(torch.float32) * _SCALE


def exponential(
    seed: Tensor,
    position: Word,
    token: Word,
    purpose: Word = Purpose.TARGET,
    anchor: Word = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Positive unit-rate exponential noise, one per token.

    ``argmax(w / noise)`` over tokens is a draw from ``w / sum(w)``: the exponential race, which
    is the Gumbel rule ``argmax(log w + gumbel)`` without logarithms of w.

    64 random bits make the small values, the ones that win, fine enough for any vocabulary: with
    31 bits one position in 10,000 of a 248,000-token vocabulary would hold a spurious zero.

    Args:
        seed, position, token, purpose, anchor: see the module; they broadcast.
        dtype: float32 or float64.

    Returns:
        ``dtype`` of the common shape, in [2^-65, 17] for float32.
    """
    high, low, _, _ = philox(seed, position, token, purpose, anchor)
    u = (high.to(dtype) + (low.to(dtype) + 0.5) * 2.0**-32) * 2.0**-32
    # u may round to 1, whose logarithm is infinite; the largest float below 1 is close enough.
    below = 1.0 - torch.finfo(dtype).eps / 2
    return -torch.log1p(-u.clamp_(max=below))


def gumbel(
    seed: Tensor,
    position: Word,
    token: Word,
    purpose: Word = Purpose.TARGET,
    anchor: Word = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard Gumbel noise: minus the logarithm of `exponential` at the same address."""
    return -torch.log(exponential(seed, position, token, purpose, anchor, dtype))
