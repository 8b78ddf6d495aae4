"""The embedded model samples from the same law with speculation and without.

Many samples of the first three tokens behind one prompt, drafted by everybody and drafted by
nobody, compared by a two-sample chi-square over the outcomes that occur often enough. All tests
together err with a chance below 0.01 (Bonferroni).
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter

import pytest

from slipstream import LLM, SamplingParams
from slipstream.request import Request

PROMPTS = (
    "def main(argv):\n    parser = argparse.ArgumentParser()\n    parser.add",
    "The module provides a function that returns the",
    "import os\nimport sys\nimport os\nimport sys\nimport os\nimport",
)
HEATS = (1.0, 0.7)
DEPTHS = (1, 2, 3)  # the first token, the first two, all three
SAMPLES = int(os.environ.get("SLIPSTREAM_TEST_SAMPLES", "20000"))
TESTS = len(PROMPTS) * len(HEATS) * len(DEPTHS)
Outcome = tuple[int, ...]


@pytest.fixture(scope="module")
def demo() -> LLM:
    # Four drafts are verified in every step, whoever makes them and whether they pay or not.
    return LLM(
        "demo",
        limits__context=256,
        limits__seqs=32,
        limits__tokens=1024,
        speculation__length=4,
        speculation__row_cost=0.1,
    )


def samples(llm: LLM, prompt: str, heat: float, count: int, speculate: bool) -> list[Outcome]:
    """The first three tokens, so often. The prompt's pages are shared, nothing else is."""
    engine = llm.engine
    tokens = tuple(llm.encode(prompt))
    params = SamplingParams(
        temperature=heat, top_k=64, top_p=1.0, max_tokens=4, ignore_eos=True,
        speculate=speculate, share=False,
    )  # fmt: skip
    found: dict[str, list[int]] = {}
    drafted = started = 0
    while len(found) < count or engine.busy:
        while (
            started < count and len(engine.scheduler.running) + len(engine.scheduler.waiting) < 32
        ):
            engine.add(Request(f"{started}", tokens, params))
            started += 1
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.tokens)
            drafted += output.speculation.drafted if output.finish else 0
    assert (drafted > 2 * count) == speculate, drafted
    return [tuple(text[:3]) for text in found.values()]


def survival(x: float, degrees: int) -> float:
    """Chance of a chi-square above x, by Wilson and Hilferty's cube root."""
    z = ((x / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def chance(a: list[Outcome], b: list[Outcome], least: int = 10) -> float:
    """p-value of the hypothesis that both come from one law; rare outcomes are pooled.

    Outcomes are pooled by their first two tokens, then by their first, then all together, so that
    a difference that is spread over many rare ones still shows.
    """
    counts = Counter(a), Counter(b)
    for size in (3, 2, 1, 0):
        pooled: tuple[Counter[Outcome], Counter[Outcome]] = (Counter(), Counter())
        for key in counts[0].keys() | counts[1].keys():
            short = key if counts[0][key] + counts[1][key] >= least else key[: max(0, size - 1)]
            for i in (0, 1):
                pooled[i][short] += counts[i][key]
        counts = pooled
    scale = math.sqrt(len(b) / len(a))
    keys = [k for k in counts[0].keys() | counts[1].keys() if counts[0][k] + counts[1][k]]
    x = sum(
        (scale * counts[0][k] - counts[1][k] / scale) ** 2 / (counts[0][k] + counts[1][k])
        for k in keys
    )
    return survival(x, max(1, len(keys) - 1))


def moved(sample: list[Outcome], mass: float, seed: int) -> list[Outcome]:
    """The sample if so much probability went from the most frequent first token to another."""
    rng = random.Random(seed)
    firsts = Counter(t[0] for t in sample).most_common()
    top, other = firsts[0][0], firsts[min(3, len(firsts) - 1)][0]
    share = mass / (firsts[0][1] / len(sample))
    return [(other, *t[1:]) if t[0] == top and rng.random() < share else t for t in sample]


def smallest(a: list[Outcome], b: list[Outcome]) -> float:
    """The smallest p-value of all depths."""
    return min(chance([t[:d] for t in a], [t[:d] for t in b]) for d in DEPTHS)


def test_the_law_of_the_first_tokens(demo: LLM) -> None:
    """A small form: it would see a drafter that is believed too much, not 0.02."""
    fast, plain = (samples(demo, PROMPTS[0], 1.0, 400, s) for s in (True, False))
    assert smallest(fast, plain) > 0.01 / TESTS
    assert smallest(moved(fast, 0.25, 1), plain) < 0.01 / TESTS


@pytest.mark.slow
@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_law_of_the_first_tokens_at_full_size(demo: LLM, prompt: str, heat: float) -> None:
    """20,000 samples each way; 0.02 of the mass moved is seen. An hour or more on two cores."""
    fast, plain = (samples(demo, prompt, heat, SAMPLES, s) for s in (True, False))
    as_is, wrong = smallest(fast, plain), smallest(moved(fast, 0.02, 1), plain)
    print(f"{SAMPLES} samples, T={heat}, {prompt[:30]!r}: p {as_is:.3f}; 0.02 moved {wrong:.1e}")
    assert as_is > 0.01 / TESTS
    assert wrong < 0.01 / TESTS
