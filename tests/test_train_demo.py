"""The embedded model and the script that makes it: template, tokenizer, packing, logits, drafters."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.train_demo import delta, drafters, instruct, model, optim, quantize, train
from tools.train_demo.compress import load_checkpoint
from tools.train_demo.corpus import CONTROL, SPECIAL, Chat
from tools.train_demo.decode import Decoder, generate
from tools.train_demo.drafters import DraftConfig
from tools.train_demo.evaluate import edit_distance
from tools.train_demo.model import TINY, Config, Target

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "slipstream" / "demo"
MASTER = ROOT / "models" / "demo-bf16"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> Chat:
    return Chat(tokenizer, (DEMO / "chat_template.jinja").read_text())


@pytest.fixture(scope="module")
def shipped() -> dict[str, torch.Tensor]:
    return load_checkpoint(DEMO)


@pytest.fixture(scope="module")
def master() -> dict[str, torch.Tensor]:
    return load_checkpoint(MASTER)


def config_of(folder: Path) -> Config:
    return model.load_config(str(folder / "config.json"))


def test_tokenizer_has_control_tokens_as_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == config_of(DEMO).vocab_size == 8192
    for token in (*SPECIAL, *CONTROL):
        assert len(tokenizer.encode(token).ids) == 1
    draft = json.loads((DEMO / "draft" / "config.json").read_text())
    assert draft["dflash_config"]["mask_token_id"] == tokenizer.token_to_id("<|mask|>")


@pytest.mark.parametrize(
    "text",
    [
        "def f(x: int) -> str:\n    return f'{x:>5}'\n",
        "Größe, naïve, 温度, 🙂 and \t tabs\r\n",
        "  two spaces, 12345 digits, isn't, x_y-z/4.5e-3\n\n\n",
        "\x00\x7f unusual bytes",
    ],
)
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_template_renders_turns_and_keeps_thinking_off(chat: Chat) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello "}]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    start = head + "<|im_start|>assistant\n<think>\n"
    assert chat.render(messages) == head
    assert chat.render(messages, add_generation_prompt=True) == start + "\n</think>\n\n"
    assert chat.render(messages, add_generation_prompt=True, enable_thinking=True) == start


def test_template_history_begins_with_the_generation_prompt(chat: Chat) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = chat.render(messages, add_generation_prompt=True)
    later = chat.render([*messages, {"role": "assistant", "content": "Hi."}])
    assert later == prompt + "Hi.<|im_end|>\n"


def test_template_renders_tools_calls_and_results(chat: Chat) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "note": "x"}}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    text = chat.render(messages, tools=[instruct.tool_schema("add")])
    assert '\n<tools>\n{"type": "function"' in text
    assert "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n" in text
    results = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (2, 3))
    assert text.endswith(f"<|im_start|>user{results}<|im_end|>\n")


@pytest.mark.parametrize("maker", [k.__name__ for k, _ in instruct.KINDS])
def test_every_kind_of_conversation_renders(chat: Chat, maker: str) -> None:
    source = (ROOT / "tools" / "train_demo" / "optim.py").read_text()
    prose = "\n\n".join(
        f"## Topic {i}\n\nThe `option_{i}` of the server decides how many workers are started. "
        f"It is read once when the server starts and cannot be changed later on. Case {i}."
        for i in range(6)
    )
    draw = {"docs": prose, "code": source, "module": source}
    messages, tools = instruct.conversation(random.Random(3), draw.__getitem__, maker)
    assert messages[-1]["role"] == "assistant"
    assert chat.render(messages, tools=tools).endswith("<|im_end|>\n")


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_round_trips(bits: int) -> None:
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (64, 256), dtype=torch.int8)
    assert torch.equal(quantize.unpack(quantize.pack(codes, bits), bits), codes)


def test_packing_is_that_of_compressed_tensors() -> None:
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers"
        if _has("compressed_tensors.compressors.pack_quantized.helpers")
        else "compressed_tensors.compressors"
    )
    if not hasattr(helpers, "pack_to_int32"):
        pytest.skip("this release keeps pack_to_int32 elsewhere")
    codes = torch.randint(-8, 8, (64, 256), dtype=torch.int8)
    assert torch.equal(quantize.pack(codes, 4), helpers.pack_to_int32(codes, 4))


def _has(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_gptq_beats_rounding_on_correlated_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(256, 256, generator=generator) * 0.2 + torch.eye(256)
    x = torch.randn(2048, 256, generator=generator) @ mix
    w = torch.randn(64, 256, generator=generator)

    def error(codes: torch.Tensor, scales: torch.Tensor) -> float:
        return float(((quantize.dequantize(codes, scales) - w) @ x.T).norm())

    assert error(*quantize.gptq(w, x.T @ x)) < 0.9 * error(*quantize.nearest(w, 4))


def test_delta_rule_in_blocks_equals_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.nn.functional.normalize(torch.randn(2, 150, 1, 32, generator=generator), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(2, 150, 3, 32, generator=generator)
    g, beta = (
        -torch.rand(2, 150, 3, generator=generator),
        torch.rand(2, 150, 3, generator=generator),
    )
    torch.testing.assert_close(
        delta.chunked(q, k, v, g, beta, 0.2), delta.recurrent(q, k, v, g, beta, 0.2)
    )


def test_block_gradients_are_those_of_autograd() -> None:
    """The replaced backward step, on one block: with no state, gradients follow from the scores."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 64, 1, 16, generator=generator, requires_grad=True) for _ in range(2))
    v, do = (torch.randn(1, 64, 1, 16, generator=generator) for _ in range(2))
    g = (-torch.rand(1, 64, 1, generator=generator)).cumsum(1)
    total = g[0, :, 0] * 0.693147180559945
    low = torch.ones(64, 64).tril() > 0
    decay = (total[:, None] - total).masked_fill(~low, float("-inf")).exp()
    out = ((q[0, :, 0] @ k[0, :, 0].T) * decay * 0.25) @ v[0, :, 0]
    out.backward(do[0, :, 0])
    empty = torch.zeros(1, 1, 1, 16, 16)
    with torch.no_grad():
        dq, dk, _, _ = delta._block_gradients(q, k, v, g, empty, do, empty, v, 0.25)
    torch.testing.assert_close(dq, q.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dk, k.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_master_logits_equal_transformers(master: dict[str, torch.Tensor]) -> None:
    transformers = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    cfg = config_of(MASTER)
    reference, info = transformers.Qwen3_5ForCausalLM.from_pretrained(
        MASTER, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 8000, (1, 96)))
    weights = {n: w.float() for n, w in master.items()}
    with torch.no_grad():
        expected = reference.eval()(ids).logits
        hidden, _ = Target(cfg).forward(weights, ids, torch.float32)
    torch.testing.assert_close(hidden @ weights["lm_head.weight"].T, expected, rtol=1e-4, atol=2e-4)


def test_shipped_checkpoint_is_the_master_rounded(
    shipped: dict[str, torch.Tensor], master: dict[str, torch.Tensor]
) -> None:
    assert shipped.keys() == master.keys()
    shapes = {**model.target_shapes(config_of(DEMO)), **drafters.mtp_shapes(config_of(DEMO))}
    assert {n: tuple(t.shape) for n, t in master.items()} == shapes
    for name, tensor in master.items():
        off = (shipped[name].float() - tensor.float()).norm() / tensor.float().norm().clamp(
            min=1e-9
        )
        assert off < 0.2, name
    draft = DraftConfig.from_hf(json.loads((DEMO / "draft" / "config.json").read_text()))
    ours = {n: tuple(t.shape) for n, t in load_checkpoint(DEMO / "draft").items()}
    assert ours == drafters.draft_shapes(draft)


def test_shipped_files_hold_packed_matrices_and_stay_small() -> None:
    raw = load_file(DEMO / "model.safetensors")
    packed = raw["model.layers.0.mlp.down_proj.weight_packed"]
    assert packed.dtype == torch.int32
    assert packed.shape == (384, 896 // 8)
    assert raw["lm_head.weight_packed"].shape == (8192, 384 // 4)
    assert raw["lm_head.weight_shape"].tolist() == [8192, 384]
    files = [p for p in DEMO.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) < 25_000_000
    assert all(p.stat().st_size < 25_000_000 for p in MASTER.rglob("*"))


def test_shipped_model_copies(
    shipped: dict[str, torch.Tensor], chat: Chat, tokenizer: Tokenizer
) -> None:
    text = "The cache holds 64 rows of b7f3-99ac."
    prompt = chat.ids(
        [{"role": "user", "content": f"Repeat this text exactly:\n\n{text}"}],
        add_generation_prompt=True,
    )
    weights = {n: w for n, w in shipped.items() if not n.startswith("mtp.")}
    decoder = Decoder(weights, config_of(DEMO), 1, len(prompt) + 32)
    said = generate(decoder, [prompt], len(prompt) + 32)[0, len(prompt) :].tolist()
    said = said[: said.index(tokenizer.token_to_id("<|im_end|>"))]
    assert tokenizer.decode(said) == text


def test_decoding_equals_the_full_forward() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = model.init(model.target_shapes(TINY), 4, generator)
    ids = torch.randint(0, 512, (2, 70), generator=generator)
    hidden, _ = Target(TINY).forward(weights, ids, torch.float32)
    decoder = Decoder(weights, TINY, 2, 70)
    steps = [decoder.step(ids[:, t], torch.full((2,), t))[1] for t in range(70)]
    torch.testing.assert_close(torch.stack(steps, 1), hidden, rtol=1e-4, atol=1e-5)


def test_muon_moves_weights_by_orthogonal_steps() -> None:
    weights = {"a.weight": torch.randn(64, 96), "norm.weight": torch.ones(64)}
    for w in weights.values():
        w.requires_grad_()
        w.grad = torch.randn_like(w)
    before = weights["a.weight"].detach().clone()
    optim.Optimizer(weights).step(0.1, 0.1, decay=0.0)
    step = (before - weights["a.weight"].detach()) / (0.1 * 0.2 * 96**0.5)
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_schedule_warms_up_holds_and_ends_at_zero() -> None:
    factors = [optim.schedule(s, 1000) for s in range(1001)]
    assert factors[0] < 0.02
    assert factors[300] == 1.0
    assert factors[-1] == 0.0
    assert max(factors) == 1.0


def test_edit_distance() -> None:
    assert edit_distance([1, 2, 3, 4], [1, 3, 4, 5]) == 2
    assert edit_distance([], [1, 2]) == 2
    assert edit_distance([5, 6], [5, 6]) == 0


def test_states_are_saved_in_small_files(tmp_path: Path) -> None:
    tensors = {f"w.{i}": torch.randn(1000, 1000) for i in range(5)}
    train.save_shards(tmp_path, tensors, {"step": 7})
    assert all(p.stat().st_size < 15_000_000 for p in tmp_path.iterdir())
    loaded = train.load_shards(tmp_path)
    assert loaded is not None
    assert loaded[1]["step"] == 7
    assert all(torch.equal(loaded[0][n], t) for n, t in tensors.items())
