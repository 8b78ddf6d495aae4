"""Quantizes target, MTP head and drafter, each calibrated on training text, and writes checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_demo import batches, drafters, model, quantize, train
from tools.train_demo.corpus import tokenizer_config
from tools.train_demo.drafters import DraftConfig, Drafter
from tools.train_demo.model import Config, Target, Weights
from tools.train_demo.quantize import Moments, dequantize, gptq, nearest

INT4 = (
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "fc",
)
INT8 = ("model.embed_tokens", "lm_head")
Codes = dict[str, tuple[Tensor, Tensor, int]]


def is_int4(name: str) -> bool:
    """Whether a tensor is quantized to 4 bits (``fc`` and the projections of layers)."""
    return name.endswith(".weight") and name.removesuffix(".weight").rsplit(".", 1)[-1] in INT4


def calibration(work: Path, rows: int, length: int, seed: int = 11) -> Tensor:
    """Token rows ``[rows, length]`` of the training mix, from batches that training did not see."""
    maker = batches.Maker(work, train.TEMPLATE.read_text(), seed)
    ids, _ = maker.batch(0, batches.Shape(rows, length))
    return torch.from_numpy(ids[:, :-1].astype(np.int64))


def _solve(weights: Weights, moments: Moments, prefix: str, done: Codes, method: str) -> None:
    """Rounds the matrices that ``moments`` saw, in place, and keeps their codes."""
    for name, second in moments.sums.items():
        full = prefix + name
        w = weights[full].float()
        codes, scales = gptq(w, second) if method == "gptq" else nearest(w, 4)
        weights[full] = dequantize(codes, scales)
        done[full] = (codes, scales, 4)


@torch.no_grad()
def compress_target(
    weights: Weights, cfg: Config, ids: Tensor, method: str = "gptq"
) -> tuple[Weights, Codes]:
    """Rounded fp32 weights and their codes; layer by layer on inputs of the rounded layers below."""
    weights = {n: w.float() for n, w in weights.items()}
    done: Codes = {}
    for name in INT8:
        w = weights[name + ".weight"]
        codes, scales = nearest(w, 8)
        done[name + ".weight"] = (codes, scales, 8)
        weights[name + ".weight"] = dequantize(codes, scales)
    dtype = torch.bfloat16 if ids.is_cuda else torch.float32
    target = Target(cfg)
    batch, length = ids.shape
    pos = torch.arange(length, device=ids.device).repeat(batch)
    cos, sin = model.rope_table(length, cfg.rotary_dim, cfg.rope_theta, ids.device)
    cos, sin = cos.repeat(batch, 1), sin.repeat(batch, 1)
    x = F.embedding(ids.flatten(), weights["model.embed_tokens.weight"]).to(dtype)
    for i in range(cfg.num_hidden_layers):
        prefix = f"model.layers.{i}."

        def run(record: model.Record, x: Tensor = x, prefix: str = prefix, i: int = i) -> Tensor:
            w = model.layer_of(weights, prefix)
            if cfg.is_full(i):
                return target.attention_layer(x, w, cos, sin, batch, record)
            return target.gdn_layer(x, w, pos, batch, record)

        moments = Moments()
        run(moments.add)
        _solve(weights, moments, prefix, done, method)
        x = run(None)
    return weights, done


@torch.no_grad()
def compress_mtp(
    weights: Weights, base: Weights, cfg: Config, ids: Tensor, method: str = "gptq"
) -> tuple[Weights, Codes]:
    """As `compress_target` for the MTP head, on hidden states of the rounded target, two steps deep."""
    weights = {n: w.float() for n, w in weights.items()}
    dtype = torch.bfloat16 if ids.is_cuda else torch.float32
    target = Target(cfg)
    batch, length = ids.shape[0], ids.shape[1] - 2
    moments = Moments()
    hidden = target.forward(base, ids[:, :length], dtype)[0].flatten(0, 1)
    layer = model.layer_of(weights, "mtp.layers.0.")
    for d in (1, 2):
        nxt = F.embedding(ids[:, d : d + length].flatten(), base["model.embed_tokens.weight"]).to(
            dtype
        )
        x = drafters.mtp_fuse(nxt, hidden, weights, cfg.rms_norm_eps, moments.add)
        cos, sin = model.rope_table(length, cfg.rotary_dim, cfg.rope_theta, ids.device)

        def told(name: str, rows: Tensor) -> None:
            moments.add("mtp.layers.0." + name, rows)

        y = target.attention_layer(
            x, layer, cos.repeat(batch, 1), sin.repeat(batch, 1), batch, told
        )
        hidden = model.zrms(y, weights["mtp.norm.weight"], cfg.rms_norm_eps)
    done: Codes = {}
    _solve(weights, moments, "", done, method)
    return weights, done


@torch.no_grad()
def compress_draft(
    weights: Weights,
    base: Weights,
    cfg: Config,
    dcfg: DraftConfig,
    ids: Tensor,
    method: str = "gptq",
) -> tuple[Weights, Codes]:
    """As `compress_target` for the drafter, on taps of the rounded target and blocks all over the rows."""
    weights = {n: w.float() for n, w in weights.items()}
    dtype = torch.bfloat16 if ids.is_cuda else torch.float32
    batch, length = ids.shape
    _, taps = Target(cfg).forward(base, ids, dtype, dcfg.target_layer_ids)
    drafter, moments = Drafter(dcfg), Moments()
    cos, sin = model.rope_table(length, dcfg.head_dim, dcfg.rope_theta, ids.device)
    c = drafters.context(torch.cat(taps, -1).flatten(0, 1), weights, dcfg.rms_norm_eps, moments.add)
    keys = []
    for n in range(dcfg.num_hidden_layers):
        kv = drafters.context_kv(
            c, weights, n, cos.repeat(batch, 1), sin.repeat(batch, 1), dcfg, moments.add
        )
        keys.append(tuple(t.unflatten(0, (batch, length)) for t in kv))
    size = dcfg.block_size
    starts = torch.arange(16, length - size, 4 * size, device=ids.device)
    rows = (starts[:, None] + torch.arange(size, device=ids.device)).flatten()
    tokens = torch.full((batch, len(rows)), dcfg.mask_token_id, device=ids.device)
    tokens[:, ::size] = ids[:, starts]
    x = F.embedding(tokens, base["model.embed_tokens.weight"]).to(dtype)
    key = torch.arange(length, device=ids.device)
    start = starts.repeat_interleave(size)
    seen = (key < start[:, None]) & (rows[:, None] - key < dcfg.sliding_window)
    mask = torch.cat([seen, start[:, None] == start], -1)[None, None].expand(batch, -1, -1, -1)
    drafter.blocks(
        x, keys, weights, cos[rows].repeat(batch, 1), sin[rows].repeat(batch, 1), mask, moments.add
    )
    done: Codes = {}
    _solve(weights, moments, "", done, method)
    return weights, done


def _tensors(weights: Weights, codes: Codes) -> dict[str, Tensor]:
    """Checkpoint tensors: packed where there are codes, bf16 elsewhere (fp32 for A_log, dt_bias)."""
    out: dict[str, Tensor] = {}
    for name, w in weights.items():
        if name in codes:
            c, s, bits = codes[name]
            out |= quantize.packed_tensors(name.removesuffix(".weight"), c.cpu(), s.cpu(), bits)
        else:
            out[name] = w.detach().to(torch.bfloat16).cpu().contiguous()
    return out


def _pattern(names: tuple[str, ...]) -> list[str]:
    return [r"re:.*(^|\.)(" + "|".join(names) + ")$"]


def compress(
    work: Path, cfg: Config, dcfg: DraftConfig, rows: int = 32, length: int = 4096
) -> None:
    """Writes ``<work>/packed/`` with ``model.safetensors`` and ``draft.safetensors``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = calibration(work, rows, length).to(device)
    base, done = compress_target(train.read_weights(work / "target", device), cfg, ids)
    mtp, mtp_done = compress_mtp(train.read_weights(work / "mtp", device), base, cfg, ids)
    draft, draft_done = compress_draft(
        train.read_weights(work / "dflash", device), base, cfg, dcfg, ids
    )
    folder = work / "packed"
    folder.mkdir(exist_ok=True)
    save_file(
        _tensors({**base, **mtp}, {**done, **mtp_done}),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    save_file(_tensors(draft, draft_done), folder / "draft.safetensors", {"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_sharded(folder: Path, tensors: dict[str, Tensor], most: int = 20_000_000) -> None:
    """bf16 safetensors in files under ``most`` bytes, with the usual index."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(parts) == 1:
        save_file(parts[0], folder / "model.safetensors", {"format": "pt"})
        return
    index: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )


def export(work: Path, cfg: Config, dcfg: DraftConfig, shipped: Path, master: Path) -> None:
    """Writes the quantized checkpoint to ``shipped`` and the bf16 one to ``master``, drafter inside each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    end, turn = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    generation = {
        "bos_token_id": None,
        "do_sample": True,
        "eos_token_id": [turn, end],
        "pad_token_id": end,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
    }
    for folder in (shipped, master):
        (folder / "draft").mkdir(parents=True, exist_ok=True)
        shutil.copy(work / "tokenizer.json", folder / "tokenizer.json")
        _write_json(folder / "tokenizer_config.json", tokenizer_config(cfg.max_position_embeddings))
        _write_json(folder / "generation_config.json", generation)
        if folder != train.TEMPLATE.parent:
            shutil.copy(train.TEMPLATE, folder / "chat_template.jinja")
    plain = cfg.to_hf(turn, end)
    body = tuple(n for n in INT4 if n != "fc")
    block = quantize.config_block(
        [*_pattern(body), r"re:^mtp\.fc$"],
        [r"re:^lm_head$", r"re:^model\.embed_tokens$"],
        [r"re:.*\.in_proj_[ab]$", r"re:.*\.conv1d$"],
    )
    _write_json(master / "config.json", plain)
    _write_json(shipped / "config.json", {**plain, "quantization_config": block})
    draft_block = quantize.config_block(
        _pattern(
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")
        ),
        [],
        [r"re:.*kernel_projection$", r"re:.*hidden_projection$"],
    )
    _write_json(master / "draft" / "config.json", dcfg.to_hf())
    _write_json(
        shipped / "draft" / "config.json", {**dcfg.to_hf(), "quantization_config": draft_block}
    )
    shutil.copy(work / "packed" / "model.safetensors", shipped / "model.safetensors")
    shutil.copy(work / "packed" / "draft.safetensors", shipped / "draft" / "model.safetensors")
    _write_sharded(
        master, {**train.read_weights(work / "target"), **train.read_weights(work / "mtp")}
    )
    _write_sharded(master / "draft", train.read_weights(work / "dflash"))


def load_checkpoint(folder: Path) -> Weights:
    """All tensors of an exported checkpoint, packed ones dequantized to fp32."""
    tensors: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return quantize.unpack_checkpoint(tensors)
