"""The embedded model in the engine, and its bf16 master against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.weights.reader import CheckpointError

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


def wrong_taps(folder: Path) -> None:
    """Every tap one layer too late: shapes fit, meanings do not."""
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [2, 5, 8, 11]
    (folder / "config.json").write_text(json.dumps(config))


def damaged(folder: Path) -> None:
    """Codes that belong to other rows."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            tensors[name] = tensor.roll(7, 0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("spoil", [wrong_taps, damaged])
def test_a_drafter_that_guesses_badly_is_left_out(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / "demo"
    shutil.copytree(ROOT / "slipstream" / "demo", path)
    spoil(path / "draft")
    lines: list[str] = []
    llm = LLM(str(path), limits__context=512, report=lines.append)
    assert len(lines) == 1, lines
    assert "without the dflash drafter" in lines[0] and "a step are right" in lines[0]
    assert llm.engine.drafter is not None
    assert llm.engine.drafter.names == ("lookup", "mtp")
    [output] = llm.generate(["import os\n"], SamplingParams(temperature=0.0, max_tokens=20))
    assert len(output.completions[0].token_ids) == 20
    with pytest.raises(CheckpointError, match="a step are right"):
        LLM(str(path), limits__context=512, speculation__require_drafter=True)


def test_the_shipped_drafters_pass(demo: LLM) -> None:
    assert demo.engine.drafter is not None
    assert demo.engine.drafter.names == ("lookup", "mtp", "dflash")


def test_a_stop_string_inside_a_block(demo: LLM) -> None:
    """The text before it is that of plain decoding, and nothing behind it leaks."""
    assert demo.template is not None and demo.tokenizer is not None
    prompt = demo.tokenizer.encode(
        demo.template.render([{"role": "user", "content": f"Repeat this text:\n\n{TEXT}"}])
    )
    texts = []
    for speculate in (True, False):
        params = SamplingParams(
            temperature=0.0, max_tokens=200, stop=("longer than", "never"), speculate=speculate
        )
        [output] = demo.generate([prompt], params)
        [answer] = output.completions
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "longer than")
        texts.append(answer.text)
        if speculate:
            assert output.speculation.tokens_per_step > 3
    assert texts[0] == texts[1] == TEXT[: TEXT.index("longer than")]
