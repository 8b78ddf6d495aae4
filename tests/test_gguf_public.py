"""Logits of GGUF files that llama.cpp's converter and quantizer wrote, against transformers.

The files are committed, so this runs everywhere; tests/data/gguf/README.md says how they came.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream import models
from slipstream.weights.gguf import open_gguf
from tests import gguf_twin
from tests.test_models import hidden_states

transformers = pytest.importorskip("transformers")

# The types that each file must hold, beside F32 for vectors. The quantizer mixes: rows that a
# K format does not fit and tensors that matter more get another.
TYPES = {
    "F32": {"F32"},
    "F16": {"F16"},
    "BF16": {"BF16"},
    "Q8_0": {"Q8_0"},
    "Q4_0": {"Q4_0"},
    "Q4_1": {"Q4_1"},
    "Q4_K_M": {"Q4_K", "Q6_K"},
    "Q5_K_M": {"Q5_K", "Q6_K"},
    "Q6_K": {"Q6_K"},
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", gguf_twin.CONFIGS)
def test_logits_equal_those_of_the_safetensors_twin(family: str, kind: str, tmp_path: Path) -> None:
    path = gguf_twin.FILES / f"{family}-{kind}.gguf"
    config = gguf_twin.config(family, kind)
    weights, types = gguf_twin.twin(path, family, config)
    assert types >= TYPES[kind], types
    directory = gguf_twin.write(tmp_path / "twin", config, weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    checkpoint = open_gguf(path)
    ours = models.build(checkpoint, torch.float32, torch.device("cpu"))
    tokens = torch.randint(
        0, config["vocab_size"], (70,), generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        want = theirs(tokens[None]).logits[0].float()
    got = hidden_states(ours, directory, tokens.tolist(), [70])
    assert want.abs().max() > 1
    error = float((got - want).abs().max() / want.abs().max())
    print(f"{family} {kind}: {error:.1e} of the largest logit; {', '.join(sorted(types))}")
    assert error < 2e-5, error
