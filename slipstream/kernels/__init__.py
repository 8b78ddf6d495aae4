"""The op table: every kernel the engine calls, by one signature each.

CPU tensors go to `cpu` where it has a faster form and to `reference` otherwise; `reference` is
the definition. ``with use(gdn="reference"):`` swaps one op, so that finding a wrong kernel is one
line. T token rows, H heads, D head size; see `types` for the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from slipstream.kernels import cpu, reference
from slipstream.kernels.types import Batch, GdnState, Packed, PagedKV, Ring

_BACKENDS: dict[str, Any] = {"reference": reference, "cpu": cpu}
_swapped: dict[str, str] = {}  # op name -> backend, for `use` alone


@contextmanager
def use(**ops: str) -> Iterator[None]:
    """Run the named ops on the named backend inside the block, ``use(attend="reference")``.

    It holds in every thread, the inference thread too.

    Raises:
        KeyError: no such backend.
    """
    for backend in ops.values():
        _BACKENDS[backend]
    before = dict(_swapped)
    _swapped.update(ops)
    try:
        yield
    finally:
        _swapped.clear()
        _swapped.update(before)


def _op(name: str) -> Callable[..., Any]:
    backend = _BACKENDS[_swapped[name]] if name in _swapped else cpu
    found: Callable[..., Any] = getattr(backend, name, None) or getattr(reference, name)
    return found


def matmul(x: Tensor, w: Packed, split: int) -> Tensor:
    """x [T, K] times W [N, K] transposed -> [T, N].

    Rows 0:split are short rows, the rest chunk rows; the two never share a kernel call.
    """
    return _op("matmul")(x, w, split)  # type: ignore[no-any-return]


def embed(ids: Tensor, w: Packed) -> Tensor:
    """Rows of W [N, K] at ids [T] -> [T, K]."""
    return _op("embed")(ids, w)  # type: ignore[no-any-return]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: x * rsqrt(mean(x^2) + eps) * weight, in fp32 inside.

    Families whose checkpoints store weight - 1 add the 1 when they load it.
    """
    return _op("norm")(x, weight, eps)  # type: ignore[no-any-return]


def angles(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every rotation of a step, both [T, 1, len(inv_freq)], in fp32."""
    return _op("angles")(positions, inv_freq)  # type: ignore[no-any-return]


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2*R of D dimensions of x [T, H, D] by `angles` [T, 1, R].

    Pairs (i, i + R), rotation in fp32 (Su et al. 2021, NeoX pairing).
    """
    return _op("rope")(x, cos, sin)  # type: ignore[no-any-return]


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of gate_up [T, 2*I] -> [T, I]."""
    return _op("silu_mul")(gate_up)  # type: ignore[no-any-return]


def store_kv(k: Tensor, v: Tensor, kv: PagedKV, places: Tensor) -> None:
    """Write k, v [T, H, D] to places [T] (page * PAGE + offset)."""
    _op("store_kv")(k, v, kv, places)


def attend(q: Tensor, kv: PagedKV, table: Tensor, batch: Batch, scale: float) -> Tensor:
    """Causal attention of q [T, Hq, D] over each slot's pages, grouped heads -> [T, Hq, D].

    The rows' own keys must be stored already. Query head h reads KV head h // (Hq / H).
    """
    return _op("attend")(q, kv, table, batch, scale)  # type: ignore[no-any-return]


def attend_rows(
    q: Tensor,
    kv: PagedKV,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first: int,
    scale: float,
) -> Tensor:
    """One row per slot: q [N, Hq, D] at positions [N] over keys first..position -> [N, Hq, D].

    As `attend`, where only the device knows the positions. A row below ``first`` gives zeros.
    """
    return _op("attend_rows")(q, kv, table, slots, positions, first, scale)  # type: ignore[no-any-return]


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Ring | PagedKV,
    table: Tensor,
    slots: Tensor,
    end: Tensor,
    window: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Blocks q [N, R, Hq, D] over what is committed and over themselves -> [N, R, Hq, D].

    Row r of block n stands at position end[n] + r; its own keys k, v [N, R, H, D] are stored
    nowhere. It sees committed positions below end[n] and rows of its block, those before it only
    if ``causal``, and all of them at a distance below ``window`` (0: any distance).
    """
    return _op("attend_block")(  # type: ignore[no-any-return]
        q, k, v, past, table, slots, end, window, causal, scale
    )


def gdn_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b), both [T, Hv], fp32."""
    return _op("gdn_gates")(a, b, a_log, dt_bias)  # type: ignore[no-any-return]


def gdn(
    u: Tensor, g: Tensor, beta: Tensor, conv: Tensor, key_heads: int, state: GdnState, batch: Batch
) -> Tensor:
    """Gated delta rule (Yang et al. 2024) with its causal convolution -> [T, Hv, Dv].

    u [T, C] raw convolution inputs (queries and keys of `key_heads`, then values), g and beta
    [T, Hv], conv [C, taps]. Starts from the stored state of each slot, advances through the
    inputs that wait in its rings, then through the new rows, and keeps the new inputs in the
    rings. The state is stored again at the last multiple of FOLD that is certain: before the
    span's first row for a short span (its drafts may fall), before its end for a chunk. It is
    rounded to the stored format at multiples of FOLD while generating and of PAGE in a prompt,
    so no bit depends on how positions were grouped into steps.
    """
    return _op("gdn")(u, g, beta, conv, key_heads, state, batch)  # type: ignore[no-any-return]


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * rms(x) * silu(z) over the last dimension, x and z [T, H, D], in fp32 inside."""
    return _op("gated_norm")(x, z, weight, eps)  # type: ignore[no-any-return]
