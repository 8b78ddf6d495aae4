"""The MTP head and the block drafter in the engine, against the code that trains them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config import Config, override
from slipstream.draft.fuse import Fuse
from slipstream.draft.table import empty
from slipstream.engine.build import build
from slipstream.engine.engine import Engine
from slipstream.kernels.types import Draft
from slipstream.request import Request, SamplingParams
from slipstream.weights.reader import CheckpointError, open_directory
from tests.drafters import CONFIG, DRAFT, as_first, make, write
from tools.train_demo import model as train
from tools.train_demo.evaluate import DflashProposer, MtpProposer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("drafters"))


def engine(path: Path, **settings: Any) -> Engine:
    base = {
        "dtype": "float32",
        "limits.seqs": 3,
        "limits.tokens": 160,
        "limits.context": 512,
        "speculation.lookup": False,
        "speculation.length": 15,  # everybody drafts in every step
        "speculation.require_drafter": True,
    }
    config = override(Config(model=str(path)), {**base, **settings})
    return build(config, open_directory(path))


@torch.no_grad()
def twin(
    kind: str, text: list[int], heat: float = 0.0, plain: bool = False
) -> tuple[list[int], Tensor]:
    """Drafts behind a text and their distributions [K, V], every row computed afresh.

    ``plain``: the first version of the block drafter, which is the second with convolutions that
    change nothing and a selector that adds nothing; it sees the whole text.
    """
    target, draft = make()
    cfg = DRAFT
    if plain:
        draft, cfg = as_first(draft), replace(DRAFT, sliding_window=4096)
    target = {n: t.float() for n, t in target.items()}
    net = train.Target(CONFIG)
    size = len(text) - 1  # the newest token has not been through the target
    row = torch.tensor([text[:-1]])
    hidden, taps = net.forward(
        target, torch.nn.functional.pad(row, (0, -size % 64)), torch.float32, DRAFT.target_layer_ids
    )
    made: Any
    if kind == "mtp":
        made = MtpProposer(target, target, CONFIG, 1, 512, torch.float32)
    else:
        made = DflashProposer(draft, target, cfg, 1, 512, torch.float32)
    for t in range(size):
        joined = torch.cat(taps, -1)[:, t]
        made.observe(torch.tensor([text[t + 1]]), hidden[:, t], joined, torch.tensor([t]))
        made.settle(torch.tensor([0]))
    tokens, q = made.propose(torch.tensor([text[-1]]), torch.tensor([size]), heat)
    return tokens[0].tolist(), q[0]


def proposals(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> Iterator[tuple[list[int], Draft, int]]:
    """Text, draft tables and slot after each step that decided something."""
    engine.add(Request("r", tuple(prompt), params))
    text = list(prompt)
    while engine.busy:
        slots = [s.slot for s in engine.scheduler.running]
        for output in engine.step():
            text += output.tokens
        running = engine.scheduler.running
        if running and len(text) > len(prompt):
            yield text, engine.draft, (slots or [running[0].slot])[0]


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 200])
def test_drafts_are_those_of_the_training_code(path: Path, kind: str, size: int) -> None:
    rng = random.Random(size)
    prompt = [rng.randrange(4, 128) for _ in range(size)]
    off = {"mtp": "dflash", "dflash": "mtp"}[kind]
    made = engine(path, **{f"speculation.{off}": "" if off == "dflash" else False})
    steps = 0
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for text, draft, slot in proposals(made, prompt, params):
        want, _ = twin(kind, text)
        count = int(draft.count[slot])
        assert count == min(len(want), 4 if kind == "mtp" else 7)
        assert draft.tokens[slot, :count].tolist() == want[:count], (size, len(text))
        steps += 1
        if steps == 5:
            break
    assert steps == 5


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_lists_are_the_distributions_that_drafts_are_drawn_from(path: Path, kind: str) -> None:
    prompt = [random.Random(5).randrange(4, 128) for _ in range(70)]
    off = {"mtp": "dflash", "dflash": "mtp"}[kind]
    made = engine(path, **{f"speculation.{off}": "" if off == "dflash" else False})
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=24, ignore_eos=True)
    for text, draft, slot in proposals(made, prompt, params):
        _, q = twin(kind, text, heat=1.0)
        ids, prob = draft.q_ids[slot, 0], draft.q_prob[slot, 0]
        used = prob > 0
        want = q[0][ids[used]]
        assert torch.allclose(prob[used], want / want.sum(), atol=2e-4)
        assert int(draft.tokens[slot, 0]) in ids[used].tolist()
        break


def test_the_first_version_sees_the_whole_text_and_draws_each_position_alone(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path,
        first=True,
        layer_types=["full_attention"] * 2,
        architectures=["DFlashDraftModel"],
    )
    made = engine(path, **{"speculation.mtp": False})
    prompt = [random.Random(3).randrange(4, 128) for _ in range(150)]
    steps = 0
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for text, draft, slot in proposals(made, prompt, params):
        want, _ = twin("dflash", text, plain=True)
        assert draft.tokens[slot, :7].tolist() == want
        steps += 1
        if steps == 4:
            break
    assert steps == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 96}, "hidden_size"),
        ({"vocab_size": 120}, "vocab_size"),
        ({"num_target_layers": 9}, "num_target_layers"),
        ({"target_layer_ids": [1, 4]}, "target_layer_ids"),
        ({"target_layer_ids": "all"}, "target_layer_ids"),
        ({"mask_token_id": 128}, "mask_token_id"),
        ({"block_size": 0}, "block_size"),
        ({"selector_rank": 9}, "predecessor_codebook"),
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"num_hidden_layers": 1}, "layers.1"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ],
)
def test_a_drafter_of_another_model_is_named_and_left_out(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = write(tmp_path, **changes)
    lines: list[str] = []
    config = override(Config(model=str(path)), {"limits.context": 512, "dtype": "float32"})
    made = build(config, open_directory(path), report=lines.append)
    assert len(lines) == 1, lines
    assert named in lines[0]
    assert "dflash" in lines[0]
    assert made.drafter is not None
    assert made.drafter.names == ("lookup", "mtp")
    with pytest.raises(CheckpointError, match=named):
        engine(path)


def test_a_reduced_vocabulary_drafts_only_its_ids(path: Path, tmp_path: Path) -> None:
    folder = write(tmp_path)
    ids = sorted(random.Random(0).sample(range(128), 40))
    (folder / "draft_vocab_ids.json").write_text(json.dumps(ids))
    prompt = [random.Random(5).randrange(4, 128) for _ in range(70)]
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=24, ignore_eos=True)
    made = engine(folder, **{"speculation.dflash": ""})
    for text, draft, slot in proposals(made, prompt, params):
        _, q = twin("mtp", text, heat=1.0)
        listed, prob = draft.q_ids[slot, 0], draft.q_prob[slot, 0]
        assert set(listed[prob > 0].tolist()) <= set(ids)
        want = q[0][listed]
        assert torch.allclose(prob, want / want.sum(), atol=2e-4)
        assert set(draft.tokens[slot, :4].tolist()) <= set(ids)
        break
    for wrong in ("[1, 1, 2]", "[1, 128]", "{}", "[1]", "[1, 2"):
        (folder / "draft_vocab_ids.json").write_text(wrong)
        with pytest.raises(CheckpointError, match="draft_vocab_ids"):
            engine(folder, **{"speculation.dflash": ""})


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafts_after_a_prefix_hit_are_those_of_a_cold_start(path: Path, kind: str) -> None:
    """The head's keys lie in the shared pages, the block drafter's window in the snapshot."""
    off = {"mtp": "dflash", "dflash": "mtp"}[kind]
    made = engine(path, **{f"speculation.{off}": "" if off == "dflash" else False})
    rng = random.Random(1)
    shared = [rng.randrange(4, 128) for _ in range(150)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first = [text for text, _, _ in proposals(made, shared, params)]
    # A longer prompt, a second turn behind the generated text, and a second turn inside it.
    for begin in (shared, [*first[-1]], first[-1][:-2]):
        prompt = begin + [rng.randrange(4, 128) for _ in range(20)]
        steps = 0
        for text, draft, slot in proposals(made, prompt, params):
            assert made.scheduler.running[0].cached >= 128
            want, _ = twin(kind, text)
            count = int(draft.count[slot])
            assert draft.tokens[slot, :count].tolist() == want[:count]
            steps += 1
        assert steps


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafts_behind_tokens_that_another_drafter_won(path: Path, kind: str) -> None:
    """Lookup copies a periodic text in long steps; the model drafters keep up with it."""
    prompt = [random.Random(2).randrange(4, 128) for _ in range(9)] * 12
    made = engine(path, **{"speculation.lookup": True})
    assert isinstance(made.drafter, Fuse)
    own = made.drafter.children[made.drafter.names.index(kind)]
    table = empty(4, 15, made.drafter.width)
    bias = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    original, heard = own.propose, []

    def propose(batch: Any, verdict: Any, out: Any) -> None:
        original(batch, verdict, out)
        own.__class__.propose(own, batch, verdict, table)
        heard.append(
            [table.tokens[s.slot, : int(table.count[s.slot])].tolist() for s in batch.spans]
        )

    own.propose = propose  # type: ignore[method-assign]
    for text, _, _ in proposals(made, prompt, bias):
        want, _ = twin(kind, text)
        assert heard[-1][0] == want[: len(heard[-1][0])]
