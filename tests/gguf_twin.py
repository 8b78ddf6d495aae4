"""Tiny models whose GGUF files public tools wrote, and the safetensors twin of each file.

A twin is the original checkpoint with every weight replaced by what the file stores of it. Nothing
here knows how the converter reorders rows: a stored row is the one that the original resembles.
The file is read and dequantized by the `gguf` package, and names are mapped by its table.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny

FILES = Path(__file__).parent / "data" / "gguf"

# Six value heads on two key heads: an order that undoes itself would hide a reversed one. The
# narrow model is for formats of rows of 32, the wide one for rows of 256.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen35": {
        **{k: v for k, v in tiny.QWEN.items() if k != "mtp_num_hidden_layers"},
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            **tiny.QWEN["rope_parameters"],
            "mrope_section": [2, 1, 1],
        },
    },
    "llama": {
        **tiny.LLAMA,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
WIDE: dict[str, dict[str, Any]] = {
    "qwen35": {
        "vocab_size": 32,
        "hidden_size": 256,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 32,
    },
    "llama": {
        "vocab_size": 32,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}


def config(family: str, kind: str) -> dict[str, Any]:
    return CONFIGS[family] | (WIDE[family] if "_K" in kind else {})


def originals(config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of 20 bits: the same on every machine, and too fine for any format but F32."""
    made = {}
    for name, shape in tiny.shapes(config).items():
        random = np.random.RandomState(zlib.crc32(name.encode()))
        x = torch.from_numpy(random.randint(-(2**19), 2**19, size=shape)).float() / 2**19
        if len(shape) == 1:
            gated = config["model_type"] != "llama" and not name.endswith("linear_attn.norm.weight")
            made[name] = x / 4 + (1.0 if "norm" in name and not gated else 0.0)
        elif "embed" in name or "conv1d" in name:
            made[name] = x
        else:
            made[name] = x * 2.0 ** round(float(np.log2(2.5 / shape[1] ** 0.5)))
    return made


def write(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    whole = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    return directory


def stored(path: Path) -> dict[str, tuple[str, Tensor]]:
    """Type and dequantized values of every tensor of the file, by the public reader."""
    return {
        t.name: (
            t.tensor_type.name,
            torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), np.float32)),
        )
        for t in gguf.GGUFReader(path).tensors
    }


def twin(path: Path, family: str, config: dict[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """The original weights as the file has them, and the types that the file uses."""
    arch = {"qwen35": gguf.MODEL_ARCH.QWEN35, "llama": gguf.MODEL_ARCH.LLAMA}[family]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    file, made = stored(path), {}
    types = {kind for kind, _ in file.values()}
    for name, original in originals(config).items():
        short = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        kind, values = file.pop(short)
        if original.dim() != 2:
            # Vectors and the convolution: stored whole, so they are the originals.
            assert kind == "F32", (name, kind)
            made[name] = original
        else:
            made[name] = _arranged(name, original, values)
    assert not file, f"the file has more than the checkpoint: {sorted(file)}"
    return made, types


def _arranged(name: str, original: Tensor, values: Tensor) -> Tensor:
    """The stored values in the original's order of rows, or of columns."""
    assert values.shape == original.shape, name
    scale = float(original.square().mean())
    for flip in (False, True):
        a, b = (original.T, values.T) if flip else (original, values)
        distance = torch.cdist(a.double(), b.double()).square() / a.shape[1] / scale
        nearest, order = distance.min(dim=1)
        if float(nearest.max()) < 0.05 and len(set(order.tolist())) == len(order):
            found = b[order]
            return found.T if flip else found
    raise AssertionError(f"{name}: the file stores something else")
