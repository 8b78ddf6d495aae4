"""Tiny targets with an MTP head and a block drafter, in the shapes of real checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.draft.loading import Heads, find, load
from slipstream.engine.params import ParamTable
from slipstream.engine.propose import Proposals
from slipstream.models.blocks import Loader
from slipstream.weights.reader import CheckpointError, open_directory
from tools.train_demo import drafters, model
from tools.train_demo.drafters import DraftConfig
from tools.train_demo.model import TINY, Config

CONFIG = replace(TINY, vocab_size=128, max_position_embeddings=4096)
DRAFT = DraftConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
    num_target_layers=4,
    sliding_window=48,
    rope_theta=10_000.0,
    block_size=8,
    mask_token_id=3,
    selector_rank=8,
    selector_top_k=6,
    target_layer_ids=(1, 2),
)
Weights = dict[str, torch.Tensor]


def lively(weights: Weights, seed: int) -> Weights:
    """Norms that do something, a head with clear winners, convolutions that mix."""
    g = torch.Generator().manual_seed(seed)
    for name, w in weights.items():
        if name.endswith(("norm.weight", "norm_hidden.weight", "norm_embedding.weight")):
            w += 0.2 * torch.randn(w.shape, generator=g)
        if name == "lm_head.weight":
            w *= 8
        if name.endswith(("base_kernel", "kernel_projection.weight")):
            w += 0.1 * torch.randn(w.shape, generator=g)
        if name.endswith("codebook"):
            w *= 8
    return weights


def configs(vocab: int = 128) -> tuple[Config, DraftConfig]:
    """Target and drafter of this vocabulary."""
    draft = replace(DRAFT, vocab_size=vocab, selector_top_k=min(vocab, DRAFT.selector_top_k))
    return replace(CONFIG, vocab_size=vocab), draft


def make(seed: int = 0, vocab: int = 128) -> tuple[Weights, Weights]:
    """Weights of the target with its MTP head, and of its block drafter."""
    g = torch.Generator().manual_seed(seed)
    config, draft = configs(vocab)
    shapes = {**model.target_shapes(config), **drafters.mtp_shapes(config)}
    target = lively(model.init(shapes, config.num_hidden_layers, g), seed)
    return target, lively(drafters.init_draft(draft, g), seed)


def as_first(draft: Weights) -> Weights:
    """The first version as a special case of the second."""
    made = {n: w.clone() for n, w in draft.items()}
    for name, w in made.items():
        if name.endswith("base_kernel"):
            w.zero_()[:, 0] = 1
        if name.endswith(("kernel_projection.weight", "codebook")):
            w.zero_()
    return made


def write(
    path: Path, seed: int = 0, first: bool = False, vocab: int = 128, **draft_changes: Any
) -> Path:
    """A checkpoint directory with ``draft`` beside the weights; ``first``: its first version."""
    target, draft = make(seed, vocab)
    sizes, draft_sizes = configs(vocab)
    whole, config = sizes.to_hf(1, 0), draft_sizes.to_hf()
    if first:
        draft = {n: w for n, w in draft.items() if "_conv" not in n and "selector" not in n}
        part = config["dflash_config"]
        for key in ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"):
            del part[key]
    for key, value in draft_changes.items():
        if key in config["dflash_config"]:
            config["dflash_config"][key] = value
        config[key] = value
    for folder, settings, weights in (
        (path, whole, target),
        (path / "draft", config, draft),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float32"}))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return path


def heads(
    model: Any,
    path: Path,
    params: ParamTable,
    drafts: int,
    vocab: int = 128,
    choose: Any = None,
) -> Heads:
    """The drafters of such a checkpoint around a loaded target."""

    def refuse(name: str, error: CheckpointError) -> None:
        raise error

    return load(
        find(open_directory(path), True, "auto", refuse),
        model,
        choose or Proposals(params),
        loader=Loader,
        dtype=torch.float64,
        device=torch.device("cpu"),
        drafts=drafts,
        vocab=vocab,
        refuse=refuse,
    )
