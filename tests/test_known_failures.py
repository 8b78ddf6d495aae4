"""How speculation fails elsewhere, each as a test of its own. The twins cover most of it at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import models
from slipstream.draft.fuse import Fuse
from slipstream.draft.lookup import Lookup
from slipstream.engine.engine import Engine
from slipstream.request import Output, Request, SamplingParams
from slipstream.weights.reader import open_directory
from tests import drafters, tiny
from tests.toys import Oracle

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = drafters.write(tmp_path_factory.mktemp("heads"))
    return models.build(open_directory(path), torch.float64, torch.device("cpu")), path


def run(engine: Engine, request: Request) -> list[Output]:
    engine.add(request)
    outputs = []
    while engine.busy:
        outputs += engine.step()
        engine.cache.check()
    return outputs


def text(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.tokens]


def everything(model: tuple[Any, Path], truth: list[int]) -> Any:
    """All drafters, and one that is right four times of five."""

    def make(inputs: Any, limits: Any, params: Any) -> Any:
        lookup = Lookup(inputs.history, inputs.length, limits.drafts)
        each = drafters.heads(*model, params, limits.drafts).each
        oracle = Oracle(inputs.history, inputs.length, limits.drafts, [truth], right=0.8)
        return Fuse(oracle, lookup, *each, slots=limits.slots, tail=lookup)

    return make


def test_rejected_drafts_do_not_leak_into_the_recurrent_state(model: tuple[Any, Path]) -> None:
    """Every draft is wrong, in every step, over many folds: the numbers stay those without."""
    prompt = tuple(random.Random(0).randrange(4, 128) for _ in range(70))
    want = run(tiny.engine(*model), Request("a", prompt, GREEDY))
    wrong = [list(prompt) + [(t + 1) % 128 for t in text(want)]]

    def fool(inputs: Any, limits: Any, params: Any) -> Any:
        class Fool(Oracle):
            def propose(self, batch: Any, verdict: Any, out: Any) -> None:
                super().propose(batch, verdict, out)
                for span in batch.spans:
                    known = int(inputs.length[span.slot])
                    # Whatever it drew, the first draft is not what the target says.
                    right = text(want)[known - len(prompt) : known - len(prompt) + 1]
                    if out.count[span.slot] and right:
                        out.tokens[span.slot, 0] = out.q_ids[span.slot, 0, 0] = (right[0] + 1) % 128

        return Fool(inputs.history, inputs.length, limits.drafts, wrong, right=1.0, width=1)

    got = run(tiny.engine(*model, drafter=fool, row_cost=0.0), Request("a", prompt, GREEDY))
    assert text(got) == text(want)
    assert got[-1].speculation.drafted > 60
    assert got[-1].speculation.accepted == 0
    for a, b in zip(
        (p for o in want for p in o.logprobs), (p for o in got for p in o.logprobs), strict=True
    ):
        assert abs(a.logprob - b.logprob) < 1e-9


def test_log_probabilities_of_accepted_drafts_are_not_zero(model: tuple[Any, Path]) -> None:
    prompt = tuple(random.Random(1).randrange(4, 128) for _ in range(70))
    want = run(tiny.engine(*model), Request("a", prompt, GREEDY))
    truth = [[*prompt, *text(want)]]
    got = run(
        tiny.engine(
            *model,
            drafter=lambda i, lim, _: Oracle(
                i.history, i.length, lim.drafts, truth, right=1.0, width=1
            ),
            row_cost=0.0,
        ),
        Request("a", prompt, GREEDY),
    )
    assert got[-1].speculation.accepted > 30
    plain = [p.logprob for o in want for p in o.logprobs]
    fast = [p.logprob for o in got for p in o.logprobs]
    assert plain == pytest.approx(fast, abs=1e-9)
    assert max(fast) < 0


@pytest.mark.parametrize("size", [60, 63, 64, 65, 129])
def test_the_second_turn_after_adaptive_lengths(model: tuple[Any, Path], size: int) -> None:
    """A turn decoded in steps of all lengths, then a turn that goes on from its state."""
    rng = random.Random(size)
    prompt = tuple(rng.randrange(4, 128) for _ in range(size))
    truth = [*prompt, *text(run(tiny.engine(*model), Request("one", prompt, GREEDY)))]
    engine = tiny.engine(*model, drafter=everything(model, truth), row_cost=0.02)
    first = run(engine, Request("one", prompt, GREEDY))
    assert len({len(o.tokens) for o in first}) > 2, "the steps had one length"
    assert text(first) == truth[size:]
    second = Request("two", (*prompt, *text(first), 5, 6, 7), GREEDY)
    warm = run(engine, second)
    cold = run(tiny.engine(*model, prefix=False), second)
    assert warm[-1].usage.cached_tokens >= size
    assert text(warm) == text(cold)


def test_a_stop_inside_a_block_leaves_nothing_behind_it(model: tuple[Any, Path]) -> None:
    """The answer ends where it should, and a second turn does not know of the rest."""
    prompt = tuple(random.Random(4).randrange(4, 128) for _ in range(66))
    want = text(run(tiny.engine(*model), Request("a", prompt, GREEDY)))
    at = next(i for i in range(20, 60) if want[i] not in want[:i])
    stop = SamplingParams(
        temperature=0.0, max_tokens=60, stop_token_ids=(want[at],), ignore_eos=True
    )
    engine = tiny.engine(
        *model,
        drafter=lambda i, lim, _: Oracle(
            i.history, i.length, lim.drafts, [[*prompt, *want]], right=1.0, width=1
        ),
        row_cost=0.0,
    )
    got = run(engine, Request("a", prompt, stop))
    assert text(got) == want[: at + 1]
    second = Request("b", (*prompt, *text(got), 9, 8, 7), GREEDY)
    warm, cold = run(engine, second), run(tiny.engine(*model, prefix=False), second)
    assert warm[-1].usage.cached_tokens >= 66
    assert text(warm) == text(cold)
