"""A GGUF file as a Checkpoint: config from its metadata, names and layouts as Hugging Face has them.

Owns the container, the name map of each architecture, and the rewrites of the public converter
(llama.cpp's convert_hf_to_gguf), which are undone here so that a model never learns where its
weights came from. Dequantization is the `gguf` package's; its reader is not used, because it takes
seconds for a vocabulary and trusts the file's counts.

Sources: the GGUF specification (version 2 and 3, little endian); the tensor names of `gguf`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from slipstream.weights.reader import Checkpoint, CheckpointError, Entry, MappedFile, view

ALIGNMENT = 32  # bytes, where general.alignment says nothing
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_NATIVE: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

Undo = Callable[[Tensor], Tensor]


class Place(NamedTuple):
    """Where a tensor goes: its canonical name, its shape there, what turns the stored one into it."""

    name: str
    shape: tuple[int, ...]
    undo: Undo | None = None


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of the architectures ``llama`` and ``qwen35``.

    Tensors of block formats come as float32, floating point as stored. ``config`` has the keys of
    a Hugging Face config.json, ``metadata`` all key-value pairs. End tokens are the tokenizer's to
    know (`text.tokenizer.Tokenizer.from_gguf`): the file names only one of them.

    Raises:
        CheckpointError: no such file, not GGUF, truncated or contradictory, or an architecture,
            RoPE scaling or tensor type that is not supported.
    """
    metadata, stored = _read(path)
    architecture = metadata.get("general.architecture")
    families: dict[str, Callable[[_Keys, dict[str, Entry]], _Family]] = {
        "llama": _llama,
        "qwen35": _qwen35,
    }
    if architecture not in families:
        raise CheckpointError(
            f"{path} holds the architecture {architecture!r}: use one of {', '.join(families)}, "
            f"or a safetensors checkpoint"
        )
    keys = _Keys(path, str(architecture), metadata)
    if int(metadata.get("split.count") or 1) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts: join them with llama-gguf-split --merge"
        )
    family = families[architecture](keys, stored)
    entries: dict[str, Entry] = {}
    for name, entry in stored.items():
        place = family.place(name, entry)
        if place is None:
            continue
        if place.name in entries:
            raise CheckpointError(
                f"{path} has {place.name} twice, the second time as {name}: convert it again"
            )
        read = entry.read if place.undo is None else partial(_undone, place, entry.read)
        entries[place.name] = Entry(place.shape, entry.stored, entry.nbytes, path, read)
    return Checkpoint(path, family.config, entries, metadata=metadata)


def _undone(place: Place, read: Callable[[], Tensor]) -> Tensor:
    assert place.undo is not None
    return place.undo(read())


# --- the container ---------------------------------------------------------------------------


class _Cursor:
    """Reads forward through a file's bytes, and never past its end."""

    def __init__(self, path: Path, source: MappedFile) -> None:
        self.path, self.buffer, self.at = path, source.bytes(), 0
        self.size = len(self.buffer)

    def bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}: download it again")

    def left(self, what: str, count: int, least: int) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is allocated."""
        if count * least > self.size - self.at:
            raise self.bad(f"announces {count} {what} with {self.size - self.at} bytes to go")

    def scalar(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        if self.at + width > self.size:
            raise self.bad(f"ends inside its header, at byte {self.size}")
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += width
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self.left("bytes of text", length, 1)
        value = self.buffer[self.at : self.at + length]
        self.at += length
        return value.decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or depth > 3:
            raise self.bad(f"has a metadata value of unknown type {kind} at byte {self.at}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            self.left("values", count, struct.calcsize("<" + code))
            values = struct.unpack_from(f"<{count}{code}", self.buffer, self.at)
            self.at += count * struct.calcsize("<" + code)
            return list(values)
        self.left("values", count, 8)
        return [self.value(kind, depth + 1) for _ in range(count)]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Key-value pairs, and the stored tensors under their GGUF names."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}: give the path of a .gguf file")
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(
            f"{path} has {size} bytes, too few for a GGUF header: download it again"
        )
    source = MappedFile(path, size)
    cursor = _Cursor(path, source)
    if cursor.buffer[:4] != b"GGUF":
        raise CheckpointError(f"{path} does not begin with GGUF: give a .gguf file")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        order = " in big endian order" if version in (2 << 24, 3 << 24) else ""
        number = version >> 24 if order else version
        raise CheckpointError(
            f"{path} is GGUF version {number}{order}: convert it again, to version 3 in little endian order"
        )
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.left("metadata pairs", pair_count, 13)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    cursor.left("tensors", tensor_count, 32)
    headers = [_tensor_header(cursor) for _ in range(tensor_count)]

    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
        raise cursor.bad(f"has general.alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    stored: dict[str, Entry] = {}
    at, previous = 0, "the header"
    for name, shape, kind, offset in sorted(headers, key=lambda h: h[3]):
        if name in stored:
            raise cursor.bad(f"lists {name} twice")
        if offset < at:
            raise cursor.bad(f"has {name} begin inside {previous}, at byte {offset} of its data")
        entry = _stored(cursor, source, name, shape, kind, start + offset)
        at, previous = offset + entry.nbytes, name
        stored[name] = entry
    return metadata, stored


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = cursor.text(), cursor.scalar("I")
    if not 1 <= rank <= 4:
        raise cursor.bad(f"gives {name!r:.60} {rank} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _stored(
    cursor: _Cursor, source: MappedFile, name: str, shape: tuple[int, ...], kind: int, begin: int
) -> Entry:
    try:
        quant = gguf.GGMLQuantizationType(kind)
        block, width = gguf.GGML_QUANT_SIZES[quant]
    except (ValueError, KeyError):
        raise CheckpointError(
            f"{name} in {cursor.path} has tensor type {kind}, which the installed gguf package does not know: "
            f"update gguf"
        ) from None
    if min(shape) < 1 or shape[-1] % block:
        raise cursor.bad(
            f"gives {name} the shape {list(shape)}, which {quant.name} (rows of {block}) cannot have"
        )
    nbytes = math.prod(shape) // block * width
    if begin + nbytes > cursor.size:
        raise cursor.bad(
            f"is truncated: {name} ({quant.name} {list(shape)}) ends at byte {begin + nbytes} of {cursor.size}"
        )
    if quant.name in _NATIVE:
        read = partial(view, source, _NATIVE[quant.name], begin, shape)
    else:
        read = partial(_dequantize, source, name, quant, begin, nbytes, shape)
    return Entry(shape, quant.name, nbytes, cursor.path, read)


def _dequantize(
    source: MappedFile, name: str, quant: Any, begin: int, nbytes: int, shape: tuple[int, ...]
) -> Tensor:
    raw = np.frombuffer(source.bytes(), dtype=np.uint8, count=nbytes, offset=begin)
    try:
        # The package works through 16 rows at a time in Python: joining short rows (blocks do not
        # care) saves most of its overhead.
        rows = math.prod(shape[:-1])
        joined = math.gcd(rows, 1 << max(0, (16384 * rows // nbytes).bit_length() - 1))
        values = gguf.quants.dequantize(raw.reshape(rows // joined, -1), quant)
    except NotImplementedError:
        raise CheckpointError(
            f"{name} in {source.file} has tensor type {quant.name}, which the gguf package cannot dequantize: "
            f"use a file of another type, such as Q4_K_M or Q8_0"
        ) from None
    return torch.from_numpy(values.reshape(shape))


# --- the architectures -----------------------------------------------------------------------


class _Keys:
    """Metadata of one architecture, checked on the way out."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.path, self.architecture, self.metadata = path, architecture, metadata

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1 (of at least 0 where the default is 0)."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            what = "is missing" if value is None else f"is {value!r:.60}"
            raise CheckpointError(
                f"{self.path}: {name} {what} where a number from {least} up is needed; convert it again"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            what = "is missing" if value is None else f"is {value!r:.60}"
            raise CheckpointError(
                f"{self.path}: {name} {what} where a positive number is needed; convert it again"
            )
        # The file has float32: the shortest decimal that rounds to it is what the config said.
        return float(str(np.float32(value)))


class _Family(NamedTuple):
    config: dict[str, Any]
    place: Callable[[str, Entry], Place | None]  # GGUF name -> where it goes; None: not a weight


_TOP: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN35_LAYER: Mapping[str, str] = {
    **{k: v for k, v in _LLAMA_LAYER.items() if k != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN35_BARE: Mapping[str, str] = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_QWEN35_MTP: Mapping[str, str] = {
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
}


def _common(keys: _Keys, stored: Mapping[str, Entry]) -> dict[str, Any]:
    """The part of the config that all families share."""
    embedding = stored.get("token_embd.weight")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        shape = None if embedding is None else list(embedding.shape)
        raise CheckpointError(
            f"{keys.path}: token_embd.weight has shape {shape} where [vocabulary, {hidden}] is needed; convert it again"
        )
    head_dim = keys.count("attention.key_length", max(1, hidden // heads))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{keys.path} has keys of {head_dim} and values of {keys.count('attention.value_length')} numbers "
            f"a head: only equal sizes are supported"
        )
    theta = keys.real("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.count("feed_forward_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
        "vocab_size": embedding.shape[0],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in stored,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    for key in ("bos", "padding"):
        token = keys.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int):
            config[f"{key.removesuffix('ding')}_token_id"] = token
    return config


def _check_scaling(keys: _Keys) -> None:
    kind = keys.metadata.get(f"{keys.architecture}.rope.scaling.type", "none")
    if kind != "none":
        raise CheckpointError(
            f"{keys.path} scales its positions by {kind!r}, which is not supported for GGUF: "
            f"use the safetensors checkpoint"
        )


def _llama(keys: _Keys, stored: dict[str, Entry]) -> _Family:
    config = _common(keys, stored)
    heads, kv_heads, dim = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if keys.count("rope.dimension_count", dim) != dim:
        raise CheckpointError(
            f"{keys.path} rotates {keys.count('rope.dimension_count')} of {dim} dimensions of a head: "
            f"only all of them are supported"
        )
    if keys.count("expert_count", 0):
        raise CheckpointError(
            f"{keys.path} is a mixture of experts, which is not supported: use a dense model"
        )
    _check_scaling(keys)
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
    }
    if "rope_freqs.weight" in stored:
        config["rope_parameters"] |= _llama3_rope(
            keys, dim, config["rope_theta"], stored["rope_freqs.weight"]
        )

    def place(name: str, entry: Entry) -> Place | None:
        if name == "rope_freqs.weight":
            return None
        if name in _TOP:
            return Place(_TOP[name], entry.shape)
        layer, part, suffix = _layer_parts(name)
        if layer is None or part not in _LLAMA_LAYER:
            return Place(name, entry.shape)  # stays unread, and `Checkpoint.finish` names it
        undo: Undo | None = None
        if part in ("attn_q", "attn_k"):
            undo = partial(_unpermute, heads if part == "attn_q" else kv_heads, dim)
        return Place(f"model.layers.{layer}.{_LLAMA_LAYER[part]}.{suffix}", entry.shape, undo)

    return _Family(config, place)


def _layer_parts(name: str) -> tuple[int | None, str, str]:
    """``blk.3.attn_q.weight`` -> (3, "attn_q", "weight"); (None, ...) for anything else."""
    head, _, rest = name.partition(".")
    number, _, tail = rest.partition(".")
    part, _, suffix = tail.rpartition(".")
    if head != "blk" or not number.isdecimal():
        return None, "", ""
    return int(number), part, suffix


def _unpermute(heads: int, dim: int, rows: Tensor) -> Tensor:
    """Undo the converter's row order in q and k.

    The file pairs rows 2i and 2i+1 of a head for RoPE; Hugging Face pairs i and i + dim/2.
    """
    if rows.shape[0] != heads * dim or dim % 2:
        raise CheckpointError(
            f"a query or key weight has {rows.shape[0]} rows where {heads} heads of {dim} are needed: "
            f"convert the file again"
        )
    return rows.reshape(heads, dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _llama3_rope(keys: _Keys, dim: int, theta: float, entry: Entry) -> dict[str, Any]:
    """The ``llama3`` RoPE scaling behind a tensor of frequency divisors.

    The file has only the divisors. The published models share all parameters but the factor,
    which is the largest divisor; the formula (Llama 3.1's, as in transformers) must then give all.
    """
    divisors = entry.read().to(torch.float64).flatten()
    factor = float(divisors.max())
    if bool((divisors == 1).all()):
        return {}
    low, high, original = 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    want = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != want.shape or not torch.allclose(divisors, want, rtol=1e-3):
        raise CheckpointError(
            f"{keys.path} has its own RoPE frequencies (rope_freqs.weight), which are not those of Llama 3: "
            f"use the safetensors checkpoint"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _qwen35(keys: _Keys, stored: dict[str, Entry]) -> _Family:
    config = _common(keys, stored)
    _check_scaling(keys)
    mtp = keys.count("nextn_predict_layers", 0)
    layers = config["num_hidden_layers"] - mtp
    key_heads, value_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    key_dim, inner = keys.count("ssm.state_size"), keys.count("ssm.inner_size")
    interval = keys.count("full_attention_interval", 4)
    if layers < 1 or value_heads % key_heads or inner % value_heads:
        raise CheckpointError(
            f"{keys.path} announces {layers} layers, {key_heads} key heads, {value_heads} value heads and "
            f"{inner} values, which do not divide: convert it again"
        )
    value_dim = inner // value_heads
    config |= {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": mtp,
        "full_attention_interval": interval,
        "layer_types": [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)
        ],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "attn_output_gate": True,
        "attention_bias": False,
    }
    rotated = keys.count("rope.dimension_count", config["head_dim"] // 4)
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    config["rope_parameters"]["partial_rotary_factor"] = config["partial_rotary_factor"]
    sections = keys.metadata.get("qwen35.rope.dimension_sections")
    if isinstance(sections, list):
        config["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}

    grouped = partial(_grouped, key_heads, value_heads)
    skip = 2 * key_heads * key_dim
    undo: dict[str, Undo] = {
        "linear_attn.in_proj_qkv": partial(grouped, dim=0, size=value_dim, skip=skip),
        "linear_attn.in_proj_z": partial(grouped, dim=0, size=value_dim),
        "linear_attn.in_proj_a": partial(grouped, dim=0, size=1),
        "linear_attn.in_proj_b": partial(grouped, dim=0, size=1),
        "linear_attn.conv1d": lambda w: grouped(
            w.flatten(1), dim=0, size=value_dim, skip=skip
        ).unsqueeze(1),
        "linear_attn.out_proj": partial(grouped, dim=1, size=value_dim),
        "linear_attn.A_log": lambda a: grouped(_log_decay(keys.path, a), dim=0, size=1),
        "linear_attn.dt_bias": lambda a: grouped(a.flatten(), dim=0, size=1),
    }

    def place(name: str, entry: Entry) -> Place | None:
        if name in _TOP:
            shifted = _minus_one if name == "output_norm.weight" else None
            return Place(_TOP[name], entry.shape, shifted)
        layer, part, suffix = _layer_parts(name)
        if layer is None:
            return Place(name, entry.shape)
        tail = name.split(".", 2)[2]
        if tail in _QWEN35_MTP and layer == layers:
            return Place(_QWEN35_MTP[tail], entry.shape, _minus_one if "norm" in tail else None)
        where = f"model.layers.{layer}." if layer < layers else f"mtp.layers.{layer - layers}."
        if tail in _QWEN35_BARE:
            local = _QWEN35_BARE[tail]
            return Place(where + local, (math.prod(entry.shape),), undo[local])
        if part not in _QWEN35_LAYER or suffix != "weight":
            return Place(name, entry.shape)
        local = _QWEN35_LAYER[part]
        change = undo.get(local)
        if local.endswith("norm") and local != "linear_attn.norm":
            change = _minus_one
        shape = entry.shape
        if local == "linear_attn.conv1d":
            shape = (entry.shape[0], 1, math.prod(entry.shape[1:]))
        return Place(f"{where}{local}.weight", shape, change)

    return _Family(config, place)


def _minus_one(weight: Tensor) -> Tensor:
    """The converter stores 1 + w for zero-centred norms; float32 takes it back without loss."""
    return weight.to(torch.float32) - 1


def _log_decay(path: Path, a: Tensor) -> Tensor:
    """ssm_a = -exp(A_log) -> A_log."""
    a = a.flatten().to(torch.float32)
    if not bool((a < 0).all()):
        raise CheckpointError(f"{path} has a value of ssm_a that is not negative: convert it again")
    return torch.log(-a)


def _grouped(
    key_heads: int, value_heads: int, tensor: Tensor, *, dim: int, size: int, skip: int = 0
) -> Tensor:
    """Value heads from tiled order back to grouped order, along ``dim`` after ``skip`` entries.

    Tiled: value head h belongs to key head h % key_heads. Grouped (Hugging Face): to key head
    h // (value_heads / key_heads). ``size``: entries of one head.
    """
    if tensor.shape[dim] != skip + value_heads * size:
        raise CheckpointError(
            f"a linear attention weight of shape {list(tensor.shape)} does not hold {value_heads} value heads "
            f"of {size} after {skip} entries: convert the file again"
        )
    times = value_heads // key_heads
    if times == 1:
        return tensor
    kept, heads = torch.split(tensor, [skip, value_heads * size], dim)
    split = torch.unflatten(heads, dim, (times, key_heads, size)).transpose(dim, dim + 1)
    return torch.cat([kept, split.flatten(dim, dim + 2)], dim)
