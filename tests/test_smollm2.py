"""The real model against transformers on the same GGUF file. Needs the file: `-m e2e`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.weights.sources import resolve

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.e2e

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "Water boils at a temperature of",
    "List three fruits:\n1.",
    "import numpy as np\n\ndef mean(values):\n    ",
    "The quick brown fox jumps over",
    "Q: What is the largest planet in the solar system?\nA:",
    "In 1969, the first humans landed on",
    "To bake bread you need flour, water,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The derivative of x squared is",
    "<html>\n<head>\n<title>",
    "Photosynthesis is the process by which",
    "She opened the door and saw",
    "SELECT name, age FROM users WHERE",
    "Der schnelle braune Fuchs",
    "1, 1, 2, 3, 5, 8, 13,",
    "The meaning of the word 'ephemeral' is",
    "A haiku about autumn:\n",
]


def test_greedy_text_equals_transformers() -> None:
    """64 tokens of 20 prompts; where texts part, the two tokens' logits must be nearly equal."""
    file: Path = resolve("smollm2")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    llm = LLM("smollm2", dtype="float32", device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=2)
    outputs = llm.generate(PROMPTS, params)
    theirs.generation_config.eos_token_id = None
    parted = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([output.prompt_tokens])
        with torch.inference_mode():
            want = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
            )[0, ids.shape[1] :].tolist()
        got = output.completions[0].token_ids
        at = next((i for i in range(64) if got[i] != want[i]), None)
        if at is not None:
            parted += 1
            with torch.inference_mode():
                text = torch.tensor([output.prompt_tokens + got[:at]])
                logits = theirs(text).logits[0, -1]
            gap = float((logits[want[at]] - logits[got[at]]).abs() / logits.abs().max())
            print(f"{prompt!r} parts at token {at}: logit gap {gap:.2e} of the largest")
            assert gap < 1e-4, (prompt, at, gap)
    print(f"{len(PROMPTS) - parted} of {len(PROMPTS)} texts are equal for 64 tokens")
