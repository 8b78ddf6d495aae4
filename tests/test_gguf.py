"""GGUF files: every rewrite of the converter undone, every number of a header doubted."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.weights import sources
from slipstream.weights.gguf import open_gguf
from slipstream.weights.reader import Checkpoint, CheckpointError

Kind = gguf.GGMLQuantizationType

LLAMA: dict[str, Any] = {
    "embedding_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 96,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 512,
    "rope.freq_base": 1e5,
    "rope.dimension_count": 16,
}
HK, HV, DK, DV = 2, 6, 8, 4
QWEN35: dict[str, Any] = {
    "embedding_length": 32,
    "block_count": 5,  # four layers and the MTP one
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "feed_forward_length": 48,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": 1024,
    "rope.freq_base": 1e7,
    "rope.dimension_count": 4,
    "rope.dimension_sections": [1, 1, 0, 0],
    "ssm.conv_kernel": 4,
    "ssm.state_size": DK,
    "ssm.group_count": HK,
    "ssm.time_step_rank": HV,
    "ssm.inner_size": HV * DV,
    "full_attention_interval": 4,
    "nextn_predict_layers": 1,
}


def write(
    path: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, Tensor],
    kinds: Callable[[str], Kind] = lambda name: Kind.F32,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in keys.items():
        name = (
            key if key.startswith(("tokenizer.", "split.", "general.")) else f"{architecture}.{key}"
        )
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    for name, tensor in tensors.items():
        values = tensor.to(torch.float32).contiguous().numpy()
        kind = kinds(name)
        if kind == Kind.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- the converter's rewrites, one row or head at a time ----------------------------------------


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows i and i + d/2 of a head become neighbours."""
    d = weight.shape[0] // heads
    order = [
        h * d + part * (d // 2) + i for h in range(heads) for i in range(d // 2) for part in (0, 1)
    ]
    return weight[order]


def tile(weight: Tensor, size: int, skip: int = 0) -> Tensor:
    """Value heads from grouped to tiled order, along the first dimension."""
    ratio = HV // HK
    order = list(range(skip))
    for place in range(HV):  # tiled head `place` belongs to key head place % HK
        head = (place % HK) * ratio + place // HK
        order += [skip + head * size + i for i in range(size)]
    return weight[order]


def llama_tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors under their Hugging Face names, and what a file holds for them."""
    g = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    hf = {"model.embed_tokens.weight": r(40, 64), "model.norm.weight": r(64)}
    file = {
        "token_embd.weight": hf["model.embed_tokens.weight"],
        "output_norm.weight": hf["model.norm.weight"],
    }
    names = {
        "attn_norm": ("input_layernorm", (64,)),
        "ffn_norm": ("post_attention_layernorm", (64,)),
        "attn_q": ("self_attn.q_proj", (64, 64)),
        "attn_k": ("self_attn.k_proj", (32, 64)),
        "attn_v": ("self_attn.v_proj", (32, 64)),
        "attn_output": ("self_attn.o_proj", (64, 64)),
        "ffn_gate": ("mlp.gate_proj", (96, 64)),
        "ffn_up": ("mlp.up_proj", (96, 64)),
        "ffn_down": ("mlp.down_proj", (64, 96)),
    }
    for i in range(2):
        for short, (long, shape) in names.items():
            weight = hf[f"model.layers.{i}.{long}.weight"] = r(*shape)
            heads = {"attn_q": 4, "attn_k": 2}.get(short)
            file[f"blk.{i}.{short}.weight"] = weight if heads is None else interleave(weight, heads)
    return hf, file


def qwen35_tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(torch.bfloat16).to(torch.float32)

    hf: dict[str, Tensor] = {}
    file: dict[str, Tensor] = {}

    def both(
        long: str, short: str, weight: Tensor, change: Callable[[Tensor], Tensor] = lambda w: w
    ) -> None:
        hf[long], file[short] = weight, change(weight)

    def plus(w: Tensor) -> Tensor:
        return w + 1

    both("model.embed_tokens.weight", "token_embd.weight", r(40, 32))
    both("lm_head.weight", "output.weight", r(40, 32))
    both("model.norm.weight", "output_norm.weight", r(32), plus)
    for i in range(5):
        long, short = (f"model.layers.{i}" if i < 4 else "mtp.layers.0"), f"blk.{i}"
        both(f"{long}.input_layernorm.weight", f"{short}.attn_norm.weight", r(32), plus)
        both(
            f"{long}.post_attention_layernorm.weight",
            f"{short}.post_attention_norm.weight",
            r(32),
            plus,
        )
        for part, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48))):
            both(f"{long}.mlp.{part}_proj.weight", f"{short}.ffn_{part}.weight", r(*shape))
        if i >= 3:
            for part, rows in (("q", 128), ("k", 32), ("v", 32)):
                both(
                    f"{long}.self_attn.{part}_proj.weight",
                    f"{short}.attn_{part}.weight",
                    r(rows, 32),
                )
            both(f"{long}.self_attn.o_proj.weight", f"{short}.attn_output.weight", r(32, 64))
            for part in "qk":
                both(
                    f"{long}.self_attn.{part}_norm.weight",
                    f"{short}.attn_{part}_norm.weight",
                    r(16),
                    plus,
                )
            continue
        here, skip = f"{long}.linear_attn", 2 * HK * DK
        both(
            f"{here}.in_proj_qkv.weight",
            f"{short}.attn_qkv.weight",
            r(skip + HV * DV, 32),
            lambda w: tile(w, DV, 2 * HK * DK),
        )
        both(
            f"{here}.in_proj_z.weight",
            f"{short}.attn_gate.weight",
            r(HV * DV, 32),
            lambda w: tile(w, DV),
        )
        both(
            f"{here}.in_proj_a.weight", f"{short}.ssm_alpha.weight", r(HV, 32), lambda w: tile(w, 1)
        )
        both(
            f"{here}.in_proj_b.weight", f"{short}.ssm_beta.weight", r(HV, 32), lambda w: tile(w, 1)
        )
        both(
            f"{here}.conv1d.weight",
            f"{short}.ssm_conv1d.weight",
            r(skip + HV * DV, 1, 4),
            lambda w: tile(w[:, 0], DV, 2 * HK * DK),
        )
        both(f"{here}.A_log", f"{short}.ssm_a", r(HV), lambda w: tile(-torch.exp(w), 1))
        both(f"{here}.dt_bias", f"{short}.ssm_dt.bias", r(HV), lambda w: tile(w, 1))
        both(f"{here}.norm.weight", f"{short}.ssm_norm.weight", r(DV))
        both(
            f"{here}.out_proj.weight",
            f"{short}.ssm_out.weight",
            r(32, HV * DV),
            lambda w: tile(w.T, DV).T,
        )
    both("mtp.fc.weight", "blk.4.nextn.eh_proj.weight", r(32, 64))
    both("mtp.pre_fc_norm_embedding.weight", "blk.4.nextn.enorm.weight", r(32), plus)
    both("mtp.pre_fc_norm_hidden.weight", "blk.4.nextn.hnorm.weight", r(32), plus)
    both("mtp.norm.weight", "blk.4.nextn.shared_head_norm.weight", r(32), plus)
    return hf, file


def same(checkpoint: Checkpoint, want: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert checkpoint.names() == set(want)
    for name, tensor in want.items():
        got = checkpoint.tensor(name, torch.float32, shape=tensor.shape)
        assert torch.allclose(got, tensor, rtol=tolerance, atol=tolerance), name
    checkpoint.finish()


# --- architectures --------------------------------------------------------------------------------


def test_llama(tmp_path: Path) -> None:
    hf, file = llama_tensors()
    tokens = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
    checkpoint = open_gguf(write(tmp_path / "m.gguf", "llama", LLAMA | tokens, file))
    same(checkpoint, hf)
    assert checkpoint.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "vocab_size": 40,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
    }
    assert checkpoint.generation == {}
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.directory == tmp_path
    assert sources.open_checkpoint(tmp_path).names() == checkpoint.names()


def test_llama_with_a_head_of_its_own_and_unknown_tensors(tmp_path: Path) -> None:
    _, file = llama_tensors()
    more = {"output.weight": torch.ones(40, 64), "blk.0.strange.weight": torch.ones(3)}
    checkpoint = open_gguf(write(tmp_path / "m.gguf", "llama", LLAMA, file | more))
    assert not checkpoint.config["tie_word_embeddings"]
    assert checkpoint.tensor("lm_head.weight").shape == (40, 64)
    for name in checkpoint.names() - {"blk.0.strange.weight"}:
        checkpoint.tensor(name)
    with pytest.raises(CheckpointError, match=r"1 of 22 tensors .* blk\.0\.strange\.weight"):
        checkpoint.finish()


def test_llama3_frequencies(tmp_path: Path) -> None:
    _, file = llama_tensors()
    keys = LLAMA | {"rope.freq_base": 5e5}
    wavelength = [2 * np.pi * 5e5 ** (2 * i / 16) for i in range(8)]
    divisors = []
    for length in wavelength:  # Llama 3.1's rule, branch by branch
        if length < 8192 / 4:
            divisors.append(1.0)
        elif length > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / length - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    assert 1 < divisors[5] < 32 or 1 < divisors[4] < 32
    path = write(
        tmp_path / "m.gguf", "llama", keys, file | {"rope_freqs.weight": torch.tensor(divisors)}
    )
    rope = open_gguf(path).config["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors[5] *= 1.1
    path = write(
        tmp_path / "n.gguf", "llama", keys, file | {"rope_freqs.weight": torch.tensor(divisors)}
    )
    with pytest.raises(CheckpointError, match="its own RoPE frequencies"):
        open_gguf(path)


def test_qwen35(tmp_path: Path) -> None:
    hf, file = qwen35_tensors()
    checkpoint = open_gguf(write(tmp_path / "m.gguf", "qwen35", QWEN35, file))
    same(checkpoint, hf, tolerance=3e-7)  # 1 + w and exp are rounded to float32 in the file
    expected = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "mtp_num_hidden_layers": 1,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": HK,
        "linear_num_value_heads": HV,
        "linear_key_head_dim": DK,
        "linear_value_head_dim": DV,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    assert {k: checkpoint.config[k] for k in expected} == expected


def test_qwen35_that_contradicts_itself(tmp_path: Path) -> None:
    _, file = qwen35_tensors()
    for keys, message in (
        ({"ssm.time_step_rank": 5}, "do not divide"),
        ({"nextn_predict_layers": 5}, "announces 0 layers"),
        ({"ssm.inner_size": 12}, "does not hold 6 value heads of 2"),
        ({"ssm.group_count": 0}, "ssm.group_count is 0"),
    ):
        checkpoint = None
        with pytest.raises(CheckpointError, match=message):
            checkpoint = open_gguf(write(tmp_path / "m.gguf", "qwen35", QWEN35 | keys, file))
            for name in checkpoint.names():
                checkpoint.tensor(name)
    file["blk.1.ssm_a"] = torch.zeros(HV)
    with pytest.raises(CheckpointError, match="ssm_a that is not negative"):
        open_gguf(write(tmp_path / "m.gguf", "qwen35", QWEN35, file)).tensor(
            "model.layers.1.linear_attn.A_log"
        )


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma3", {}, "holds the architecture 'gemma3': use one of llama, qwen35"),
        ("llama", {"split.count": 3}, "is one of 3 parts"),
        ("llama", {"rope.scaling.type": "yarn"}, "scales its positions by 'yarn'"),
        ("llama", {"rope.dimension_count": 8}, "rotates 8 of 16 dimensions"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"attention.value_length": 8}, "keys of 16 and values of 8"),
        ("llama", {"embedding_length": 32}, r"token_embd.weight has shape \[40, 64\]"),
        ("llama", {"attention.head_count": [4, 4]}, r"head_count is \[4, 4\] where a number"),
        (
            "llama",
            {"attention.layer_norm_rms_epsilon": float("nan")},
            "epsilon is nan where a positive",
        ),
        ("llama", {"context_length": "long"}, "context_length is 'long' where a number"),
    ],
)
def test_files_that_are_not_for_us(
    architecture: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = llama_tensors()
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(write(tmp_path / "m.gguf", architecture, LLAMA | keys, file))
    assert "\n" not in str(caught.value)


def test_a_key_that_is_missing(tmp_path: Path) -> None:
    _, file = llama_tensors()
    keys = {k: v for k, v in LLAMA.items() if k != "feed_forward_length"}
    with pytest.raises(CheckpointError, match=r"llama\.feed_forward_length is missing"):
        open_gguf(write(tmp_path / "m.gguf", "llama", keys, file))


def test_wrong_head_counts_show_when_a_weight_is_read(tmp_path: Path) -> None:
    _, file = llama_tensors()
    keys = LLAMA | {"attention.head_count_kv": 4}
    checkpoint = open_gguf(write(tmp_path / "m.gguf", "llama", keys, file))
    with pytest.raises(CheckpointError, match="has 32 rows where 4 heads of 16"):
        checkpoint.tensor("model.layers.0.self_attn.k_proj.weight")


# --- number formats -------------------------------------------------------------------------------


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, np.float16)[0])


def scale_min(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (
        (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4,
        (scales[j + 4] >> 4) | (scales[j] >> 6) << 4,
    )


def one_value(kind: Kind, block: bytes, e: int) -> float:
    """Element e of a block, by the layout's definition."""
    if kind in (Kind.Q4_0, Kind.Q4_1):
        at = 2 if kind == Kind.Q4_0 else 4
        q = block[at + e] & 15 if e < 16 else block[at + e - 16] >> 4
        return (
            half(block[:2]) * (q - 8)
            if kind == Kind.Q4_0
            else half(block[:2]) * q + half(block[2:4])
        )
    if kind == Kind.Q8_0:
        return half(block[:2]) * struct.unpack_from("b", block, 2 + e)[0]
    if kind == Kind.Q6_K:
        h, k, low = e // 128, e % 128 // 32, e % 32
        byte = block[64 * h + 32 * (k & 1) + low]
        q = byte & 15 if k < 2 else byte >> 4
        q |= (block[128 + 32 * h + low] >> 2 * k & 3) << 4
        return half(block[208:210]) * struct.unpack_from("b", block, 192 + e // 16)[0] * (q - 32)
    j, low = e // 32, e % 32
    scale, minimum = scale_min(block[4:16], j)
    at = 16 if kind == Kind.Q4_K else 48
    q = block[at + 32 * (j // 2) + low] >> 4 * (j % 2) & 15
    if kind == Kind.Q5_K:
        q |= (block[16 + low] >> j & 1) << 4
    return half(block[:2]) * scale * q - half(block[2:4]) * minimum


BLOCKS = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
HALVES = {
    Kind.Q8_0: (0,),
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_block_formats_by_their_definition(kind: Kind, tmp_path: Path) -> None:
    block, width = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    rows, per_row = 40, 768 // block
    raw = rng.integers(0, 256, (rows, per_row, width), dtype=np.uint8)
    for at in HALVES[kind]:  # any bits are a block, but the scales must be numbers
        scale = rng.standard_normal((rows, per_row)).astype(np.float16)
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    for key, value in (LLAMA | {"embedding_length": 768, "attention.head_count": 48}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", raw.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_gguf(tmp_path / "m.gguf")
    got = checkpoint.tensor("model.embed_tokens.weight")
    entry = checkpoint.entry("model.embed_tokens.weight")
    assert (got.dtype, got.shape) == (torch.float32, (rows, 768))
    assert (entry.stored, entry.nbytes) == (kind.name, raw.nbytes)
    for n in (0, 17, 39):
        for k in (*range(0, 768, 5), 767):
            want = one_value(kind, raw[n, k // block].tobytes(), k % block)
            assert got[n, k].item() == pytest.approx(want, rel=1e-6, abs=1e-6), (n, k)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_model_in_each_writable_format(kind: Kind, tmp_path: Path) -> None:
    hf, file = llama_tensors()
    path = write(
        tmp_path / "m.gguf",
        "llama",
        LLAMA,
        file,
        lambda n: kind if file[n].dim() == 2 else Kind.F32,
    )
    checkpoint = open_gguf(path)
    # Row orders commute with formats that work along a row: quantize, then compare by name.
    for name, tensor in hf.items():
        if tensor.dim() == 2:
            raw = gguf.quants.quantize(tensor.numpy(), kind)
            tensor = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))
        assert torch.equal(checkpoint.tensor(name, torch.float32), tensor), name


def test_a_type_that_nothing_can_read(tmp_path: Path) -> None:
    _, file = llama_tensors()
    path = write(tmp_path / "m.gguf", "llama", LLAMA, file)
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", 9) + content[at + 4 :])  # Q8_1
    with pytest.raises(CheckpointError, match="Q8_1, which the gguf package cannot dequantize"):
        open_gguf(path).tensor("model.layers.0.mlp.down_proj.weight")
    path.write_bytes(content[:at] + struct.pack("<I", 200) + content[at + 4 :])
    with pytest.raises(CheckpointError, match="tensor type 200, which the installed gguf package"):
        open_gguf(path)


# --- headers that lie -----------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARRAY = text("k") + struct.pack("<I", 9)
LIES: dict[str, tuple[bytes, str]] = {
    "short": (b"GGUF", "has 4 bytes, too few"),
    "other": (b"GGML" + bytes(40), "does not begin with GGUF"),
    "version": (header(version=1), "is GGUF version 1"),
    "big endian": (header(version=3 << 24), "version 3 in big endian order"),
    "pairs": (
        header(pairs=2**60),
        "announces 1152921504606846976 metadata pairs with 0 bytes to go",
    ),
    "tensors": (header(tensors=2**60), "announces 1152921504606846976 tensors"),
    "text": (
        header(pairs=1) + struct.pack("<Q", 2**62) + bytes(8),
        "bytes of text with 8 bytes to go",
    ),
    "value": (
        header(pairs=1) + text("k") + struct.pack("<I", 10) + bytes(1),
        "ends inside its header",
    ),
    "kind": (header(pairs=1) + text("k") + struct.pack("<I", 99) + bytes(9), "unknown type 99"),
    "numbers": (
        header(pairs=1) + ARRAY + struct.pack("<IQ", 5, 2**61),
        "announces 2305843009213693952 values",
    ),
    "strings": (
        header(pairs=1) + ARRAY + struct.pack("<IQ", 8, 2**61),
        "announces 2305843009213693952 values",
    ),
    "nested": (header(pairs=1) + ARRAY + struct.pack("<IQ", 9, 1) * 50, "unknown type 9"),
    "rank": (header(tensors=1) + tensor("w", [1] * 5) + bytes(64), "gives 'w' 5 dimensions"),
    "zero": (header(tensors=1) + tensor("w", [0, 3]) + bytes(64), r"gives w the shape \[3, 0\]"),
    "huge": (header(tensors=1) + tensor("w", [2**62, 2**62]) + bytes(64), "is truncated: w"),
    "rows": (
        header(tensors=1) + tensor("w", [31], kind=2) + bytes(64),
        r"Q4_0 \(rows of 32\) cannot have",
    ),
    "offset": (header(tensors=1) + tensor("w", [1], offset=2**63) + bytes(64), "is truncated: w"),
    "overlap": (
        header(tensors=2) + tensor("v", [8]) + tensor("w", [8], offset=16) + bytes(128),
        "w begin inside v, at byte 16",
    ),
    "twice": (
        header(tensors=2) + tensor("w", [8]) + tensor("w", [8], offset=32) + bytes(128),
        "lists w twice",
    ),
    "alignment": (
        header(tensors=1, pairs=1)
        + text("general.alignment")
        + struct.pack("<II", 4, 0)
        + tensor("w", [8])
        + bytes(64),
        "general.alignment 0",
    ),
    "no architecture": (header(), "holds the architecture None"),
}


@pytest.mark.parametrize("case", LIES)
def test_lying_headers(case: str, tmp_path: Path) -> None:
    content, message = LIES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        open_gguf(tmp_path / "m.gguf")


@settings(max_examples=150)
@given(data=st.data())
def test_no_damage_gives_anything_but_a_checkpoint_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    if not path.with_suffix(".whole").exists():
        _, file = llama_tensors()
        write(path, "llama", LLAMA | {"tokenizer.ggml.tokens": ["a", "b"]}, file)
        path.rename(path.with_suffix(".whole"))
    content = bytearray(path.with_suffix(".whole").read_bytes())
    end = content.index(b"blk.1.ffn_up.weight")  # damage the header, not the numbers
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    damaged = path.with_suffix(".damaged")
    damaged.write_bytes(content[:cut])
    try:
        checkpoint = open_gguf(damaged)
        for name in checkpoint.names():
            checkpoint.tensor(name)
    except CheckpointError:
        pass


# --- the real file ------------------------------------------------------------------------------


def test_smollm2_if_it_is_in_the_cache() -> None:
    builtin = sources.BUILTINS["smollm2"]
    path = sources.cache_directory() / Path(builtin.member).name
    if not path.is_file():
        pytest.skip("smollm2 is not in the cache: 'slipstream run' fetches it")
    checkpoint = open_gguf(path)
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["vocab_size"] == 49152
    assert len(checkpoint.names()) == 272
    # Where the file's two matrices are and how they are stored, by gguf's own reader. Row 1 of a
    # head of queries is row 2 of the file, row 33 is row 3; values are not permuted.
    content = np.memmap(path, np.uint8, "r")
    for begin, rows, name in ((33_806_656, 576, "q_proj"), (34_014_016, 192, "v_proj")):
        raw = content[begin : begin + rows * 360].reshape(rows, 360)
        want = torch.from_numpy(np.array(gguf.quants.dequantize(raw, Kind.Q4_1)))
        got = checkpoint.tensor(f"model.layers.0.self_attn.{name}.weight")
        moved = name == "q_proj"
        assert torch.equal(got[[1, 33]], want[[2, 3] if moved else [1, 33]])
