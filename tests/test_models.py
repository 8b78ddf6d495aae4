"""Logits and greedy text against transformers, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import kernels, models
from slipstream.draft.lookup import Lookup
from slipstream.engine.batch import Span
from slipstream.engine.cache import Cache
from slipstream.request import Request, SamplingParams
from slipstream.weights.reader import CheckpointError, open_directory
from tests import tiny

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen", "llama"])
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any, Path]:
    """Our model, transformers' model, and the directory both were read from."""
    config = {"qwen": tiny.QWEN, "llama": tiny.LLAMA}[request.param]
    path = tiny.write(tmp_path_factory.mktemp(request.param), config, seed=3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return models.build(open_directory(path), torch.float32, CPU), theirs, path


def hidden_states(model: Any, path: Path, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits of every position, computed in spans of the given lengths.

    The first piece and all but the last of several are prompt chunks; ones are decode steps.
    """
    engine = tiny.engine(model, path, dtype="float32", tokens=1024, prefix=False)
    prompt = sum(n for n in pieces if n > 1)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    rows = []
    engine.add(Request("a", tuple(tokens[:prompt]), params))
    sequence = engine.scheduler.waiting[0]
    sequence.tokens, sequence.prompt = list(tokens), prompt
    assert engine.cache.admit(sequence)
    engine.inputs.admit(sequence.slot, tokens)
    cache: Cache = engine.cache
    at = 0
    for n in pieces:
        span = Span(sequence, at, n, 0, chunk=at < prompt)
        assert cache.reserve(sequence.slot, at + n)
        batch, _ = engine.inputs.fill([span], cache, engine.draft)
        with torch.inference_mode():
            rows.append(model.logits(model.forward(batch, cache).last))
        cache.committed(sequence.slot, at, at + n, at < prompt)
        at += n
    return torch.cat(rows)


@pytest.mark.parametrize(
    "pieces",
    [[200], [64, 64, 72], [128, 30, *[1] * 42]],
    ids=["whole", "chunked", "step by step"],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_equal_transformers(pair: Any, pieces: list[int], backend: str) -> None:
    ours, theirs, path = pair
    tokens = torch.randint(0, 97, (200,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = theirs(tokens[None]).logits[0].float()
    ops = ("matmul", "embed", "norm", "attend", "gdn")
    with kernels.use(**dict.fromkeys(ops, backend)):
        got = hidden_states(ours, path, tokens.tolist(), pieces)
    assert want.abs().max() > 1
    error = float((got - want).abs().max() / want.abs().max())
    print(f"largest difference {error:.1e} of the largest logit")
    assert error < 1e-4, error


@pytest.mark.parametrize("speculate", [False, True])
def test_greedy_text_equals_transformers(pair: Any, speculate: bool) -> None:
    ours, theirs, path = pair
    g = torch.Generator().manual_seed(5)
    prompt = torch.randint(2, 97, (37,), generator=g)
    theirs.generation_config.eos_token_id = None
    with torch.inference_mode():
        want = theirs.generate(
            prompt[None], max_new_tokens=256, do_sample=False,
            attention_mask=torch.ones(1, 37, dtype=torch.long),
        )[0, 37:]  # fmt: skip
    engine = tiny.engine(
        ours, path, dtype="float32",
        drafter=(lambda i, lim, _: Lookup(i.history, i.length, lim.drafts)) if speculate else None,
    )  # fmt: skip
    engine.add(
        Request("a", tuple(prompt.tolist()), SamplingParams(max_tokens=256, ignore_eos=True))
    )
    got: list[int] = []
    while engine.busy:
        for output in engine.step():
            got += output.tokens
        engine.cache.check()
    assert got == want.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tiny.write(tmp_path, tiny.QWEN, seed=1, dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours = models.build(open_directory(path), torch.float32, CPU)
    tokens = torch.arange(2, 80)
    with torch.inference_mode():
        want = theirs(tokens[None]).logits[0]
    got = hidden_states(ours, path, tokens.tolist(), [78])
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


def test_unknown_family_is_named(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.LLAMA, model_type="mamba2")
    with pytest.raises(CheckpointError, match="mamba2"):
        models.build(open_directory(path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"num_hidden_layers": 2}, "not understood"),
        ({"hidden_size": 64}, "model.embed_tokens"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"head_dim": 8.0}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_config_that_disagrees_is_named(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    path = tiny.write(tmp_path, tiny.LLAMA)
    (path / "config.json").write_text(json.dumps({**tiny.LLAMA, **change}))
    with pytest.raises(CheckpointError, match=match):
        models.build(open_directory(path), torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layer_types": 4}, "layer_types"),
        ({"layer_types": ["full_attention", None, 3, []]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "for 4 layers"),
        ({"attn_output_gate": "false"}, "attn_output_gate"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"linear_num_value_heads": 5}, "multiple"),
    ],
)
def test_hybrid_config_that_disagrees_is_named(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    path = tiny.write(tmp_path, tiny.QWEN)
    (path / "config.json").write_text(json.dumps({**tiny.QWEN, **change}))
    with pytest.raises(CheckpointError, match=match):
        models.build(open_directory(path), torch.float32, CPU)
