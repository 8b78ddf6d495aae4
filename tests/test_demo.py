"""The embedded model in the engine, and its bf16 master against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
MASTER = ROOT / "models" / "demo-bf16"
TEXT = (
    "The function parse_header() in lib/httpd/request_2217.py returns a tuple of three values.\n"
    "It raises ValueError when the line is longer than 8190 bytes (see section 4.12).\n"
    "Set the option `max_line = 16384` in server.toml to change that.\n"
)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", device="cpu", limits__context=2048)


def test_it_repeats_a_text_exactly_and_by_lookup(demo: LLM) -> None:
    assert demo.template is not None
    assert demo.tokenizer is not None
    prompt = demo.template.render([{"role": "user", "content": f"Repeat this text:\n\n{TEXT}"}])
    [output] = demo.generate(
        [demo.tokenizer.encode(prompt)], SamplingParams(temperature=0.0, max_tokens=300)
    )
    [answer] = output.completions
    assert answer.text.strip() == TEXT.strip()
    assert answer.finish_reason == "stop"
    assert output.speculation.tokens_per_step > 3
    assert "lookup" in answer.sources


def test_text_does_not_depend_on_speculation(demo: LLM) -> None:
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=60, ignore_eos=True, speculate=s)
        for t in (0.0, 0.8)
        for s in (True, False)
    ]
    outputs = demo.generate(["def main(argv):\n"] * 4, params)
    a, b, c, d = (o.completions[0].token_ids for o in outputs)
    assert a == b
    assert c == d


@pytest.mark.slow
def test_master_equals_transformers() -> None:
    """Logits, and greedy text up to near ties, in float32."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(MASTER, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    llm = LLM(str(MASTER), device="cpu", dtype="float32", limits__context=2048)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT * 4)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([ids], params)
    with torch.inference_mode():
        logits = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    worst = max(
        abs(float(logits[i, t]) - p.logprob)
        for i, (t, p) in enumerate(zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True))
        if p is not None
    )
    print(f"worst difference in log-probability over {len(ids) - 1} tokens: {worst:.1e}")
    assert worst < 1e-3
    equal, greedy = 0, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for prompt in ("def main(argv):\n", "The module ", "# Installation\n\n", TEXT, "import os\n"):
        asked = llm.tokenizer.encode(prompt)
        [output] = llm.generate([asked], greedy)
        got = output.completions[0].token_ids
        inputs = torch.tensor([asked])
        with torch.inference_mode():
            want = theirs.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=64, do_sample=False
            )[0, len(asked) :].tolist()
        at = next((i for i in range(64) if got[i] != want[i]), None)
        equal += at is None
        if at is not None:
            with torch.inference_mode():
                row = theirs(torch.tensor([asked + got[:at]])).logits[0, -1]
            gap = float((row[want[at]] - row[got[at]]).abs() / row.abs().max())
            assert gap < 1e-4, (prompt, at, gap)
    print(f"greedy texts equal for 64 tokens: {equal} of 5")
