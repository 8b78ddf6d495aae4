"""Random numbers: the published vectors, Triton's float, and no draw used twice."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from slipstream.kernels.random import Purpose, exponential, gumbel, philox, uniform


def signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


# Known answers of philox4x32-10, published with the Random123 library: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    seed = torch.tensor([signed(key[0] | key[1] << 32)])
    assert tuple(int(w) for w in philox(seed, *counter)) == words


def plain_philox(seed: int, counter: list[int]) -> list[int]:
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    c = list(counter)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right >> 32 ^ c[1] ^ k0, right & 0xFFFFFFFF, left >> 32 ^ c[3] ^ k1, left & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_tensors_equal_plain_integers() -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**62), 2**62, (200,), generator=generator) * 2 + 1
    counter = torch.randint(0, 2**32, (4, 200), generator=generator)
    words = torch.stack(philox(seed, *counter))
    for i in range(200):
        assert words[:, i].tolist() == plain_philox(int(seed[i]), counter[:, i].tolist())


def test_uniform_is_the_float_triton_makes_of_a_word() -> None:
    """0 and -1 become 0; the largest magnitude stays below 1."""
    position = torch.arange(200_000)
    words = philox(torch.tensor(3), position, 0, Purpose.ACCEPT, 0)[0]
    got = uniform(torch.tensor(3), position, Purpose.ACCEPT)
    as_int32 = torch.where(words >= 2**31, words - 2**32, words)
    folded = torch.where(as_int32 < 0, -as_int32 - 1, as_int32)
    want = folded.to(torch.int32).to(torch.float32) * torch.tensor(4.6566127342e-10)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert float(got.min()) >= 0
    assert float(torch.tensor(float(2**31 - 1)) * 4.6566127342e-10) < 1


def test_moments() -> None:
    position = torch.arange(400_000)
    u = uniform(torch.tensor(11), position, Purpose.DRAFT).double()
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 400_000)
    e = exponential(torch.tensor(11), position, 5).double()
    assert abs(float(e.mean()) - 1) < 4 / math.sqrt(400_000)
    assert abs(float((e > 2).double().mean()) - math.exp(-2)) < 0.003
    g = gumbel(torch.tensor(11), position, 5).double()
    assert abs(float(g.mean()) - 0.57721566) < 4 * math.pi / math.sqrt(6 * 400_000)


def test_exponential_stays_finite_and_positive_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The extreme words, where 1 - u rounds to 0 or u to nothing."""
    ends = torch.tensor([0, 2**32 - 1])
    zero = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr("slipstream.kernels.random.philox", lambda *_: (ends, ends, zero, zero))
    for dtype in (torch.float32, torch.float64):
        e = exponential(zero, 0, 0, dtype=dtype)
        assert torch.isfinite(e).all() and (e > 0).all()
        assert float(e[0]) == pytest.approx(2.0**-65)


def test_no_two_decisions_share_a_number() -> None:
    seen: set[tuple[int, ...]] = set()
    count = 0
    for purpose, anchor, seed in itertools.product(Purpose, (0, 7, 8), (0, 1, -1, 2**40)):
        for position, token in itertools.product(range(7, 12), range(4)):
            words = philox(torch.tensor(seed), position, token, purpose, anchor)
            seen.add(tuple(int(w) for w in words))
            count += 1
    assert len(seen) == count


def test_noise_of_a_token_does_not_depend_on_its_neighbours() -> None:
    seed = torch.tensor([5, 6, 7])
    whole = exponential(seed[:, None], torch.tensor([[4], [9], [2]]), torch.arange(1001))
    for row, position in enumerate((4, 9, 2)):
        for token in (0, 1, 499, 1000):
            assert torch.equal(whole[row, token], exponential(seed[row], position, token))
