"""Measures the model on held-out documents: bits per byte, copying, and what the drafters get accepted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_demo import batches, drafters, instruct, model, train
from tools.train_demo.decode import Decoder, cached_attention, sample
from tools.train_demo.drafters import DraftConfig, Drafter
from tools.train_demo.model import Config, Target, Weights


def spread(values: Sequence[Any] | np.ndarray, count: int) -> list[Any]:
    """Up to ``count`` of the values, evenly over their order: documents come sorted by package."""
    picks = np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).astype(int))
    return [values[int(i)] for i in picks]


def bits_per_byte(
    weights: Weights,
    cfg: Config,
    maker: batches.Maker,
    kind: str,
    device: torch.device,
    documents: int = 200,
) -> float:
    """Bits per UTF-8 byte over the first 2,048 tokens of held-out documents."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Target(cfg)
    nats = size = 0.0
    for index in spread(maker.docs[kind], documents):
        ids = maker.corpus.doc(int(index))[:2048].astype(np.int64)
        row = torch.from_numpy(np.concatenate([[maker.end], ids]))[None].to(device)
        row = F.pad(row, (0, -(row.shape[1] - 1) % 64), value=maker.end)
        with torch.no_grad():
            hidden, _ = target.forward(weights, row[:, :-1], dtype)
            loss, _ = train.token_loss(
                hidden[0].float(), weights["lm_head.weight"].float(), row[0, 1:]
            )
        nats += float(loss[: len(ids)].sum())
        size += len(maker.tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode())
    return nats / math.log(2) / size


def edit_distance(a: list[int], b: list[int]) -> int:
    """Levenshtein distance of two id sequences."""
    first, second = np.array(a), np.array(b)
    steps = np.arange(len(second) + 1)
    row = steps.copy()
    for i, token in enumerate(first):
        cost = np.minimum(row[1:] + 1, row[:-1] + (second != token))
        fresh = np.concatenate([[i + 1], cost])
        row = np.minimum.accumulate(fresh - steps) + steps
    return int(row[-1])


def copy_prompts(
    maker: batches.Maker, per: int, sizes: tuple[int, ...]
) -> list[tuple[str, list[int], list[int]]]:
    """(kind, prompt ids, text ids) of held-out documents cut to each size, ``per`` of each kind and size."""
    found = []
    ask = maker.tokenizer.encode("<|im_start|>user\nRepeat this text exactly:\n\n").ids
    answer = maker.tokenizer.encode(
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ).ids
    for kind in ("docs", "code"):
        for size in sizes:
            fitting = [d for d in maker.docs[kind] if len(maker.corpus.doc(int(d))) >= size]
            for d in spread(fitting, per):
                text = maker.tokenizer.decode(maker.corpus.doc(int(d))[:size].tolist()).strip()
                ids = maker.tokenizer.encode(text).ids[:size]
                found.append((kind, [*ask, *ids, *answer], ids))
    return found


@torch.no_grad()
def greedy_copy(
    weights: Weights, target: Target, prompt: list[int], text: list[int], turn: int, passes: int
) -> list[int]:
    """What greedy decoding says after ``prompt``, by checking guesses in whole passes.

    Each pass guesses that the rest of ``text`` follows, keeps what equals the model's own choice and
    the choice at the first difference; the next guess goes on behind the place in ``text`` that looks
    like the last words. After ``passes`` passes the rest counts as missing.
    """
    device = weights["lm_head.weight"].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    said: list[int] = []
    for _ in range(passes):
        place = min(len(said), len(text))
        recent = said[-6:]
        found = [
            i for i in range(len(recent), len(text) + 1) if text[i - len(recent) : i] == recent
        ]
        if recent and found:
            place = min(found, key=lambda i: abs(i - len(said)))
        guess = text[place:]
        row = torch.tensor([[*prompt, *said, *guess]], device=device)
        hidden, _ = target.forward(weights, row, dtype)
        tail = hidden[0, len(prompt) + len(said) - 1 :]
        choice = (tail @ weights["lm_head.weight"].to(dtype).T).argmax(-1).tolist()
        same = 0
        while same < len(guess) and choice[same] == guess[same]:
            same += 1
        said += choice[: same + 1]
        if said[-1] == turn or len(said) > 2 * len(text):
            break
    return said[: said.index(turn)] if turn in said else said


def copying(
    weights: Weights,
    cfg: Config,
    maker: batches.Maker,
    per: int = 8,
    sizes: tuple[int, ...] = (500, 1000, 2000, 4000),
    passes: int = 24,
) -> dict[str, Any]:
    """Greedy copies of held-out documents: share of tokens right by alignment, by kind and size."""
    turn = maker.tokenizer.token_to_id("<|im_end|>")
    target = Target(cfg)
    sums: dict[str, list[int]] = {}
    for kind, prompt, text in copy_prompts(maker, per, sizes):
        said = greedy_copy(weights, target, prompt, text, turn, passes)
        distance = edit_distance(text, said)
        size = next(s for s in sizes if len(text) <= s)
        print(f"copy {kind} {len(text)} tokens, {distance} wrong", flush=True)
        for key in (f"{kind}_{size}", kind, "all"):
            entry = sums.setdefault(key, [0, 0, 0, 0])
            for i, value in enumerate((distance, len(text), int(distance == 0), 1)):
                entry[i] += value
    names = ("wrong", "tokens", "without_error", "documents")
    return {
        key: {"share_right": 1 - entry[0] / entry[1], **dict(zip(names, entry, strict=True))}
        for key, entry in sums.items()
    }


class Proposer(Protocol):
    """A drafter over a batch of sequences."""

    count: int

    def observe(self, following: Tensor, hidden: Tensor, taps: Tensor, pos: Tensor) -> None:
        """A target row at ``pos [B]`` and the token after it."""

    def settle(self, kept: Tensor) -> None:
        """Of the rows observed since the last call, row ``kept [B]`` is the last real one."""

    def propose(self, anchor: Tensor, pos: Tensor, heat: float) -> tuple[Tensor, Tensor]:
        """Drafts ``[B, count]`` after the anchor at ``pos`` and their distributions ``[B, count, vocab]``."""


class MtpProposer:
    """The MTP head, chained on its own outputs."""

    def __init__(
        self,
        w: Weights,
        base: Weights,
        cfg: Config,
        batch: int,
        context: int,
        dtype: torch.dtype,
        count: int = 4,
    ) -> None:
        self.cfg, self.count = cfg, count
        self.w = {n: t.to(dtype) for n, t in w.items()}
        self.layer = model.join(model.layer_of(self.w, "mtp.layers.0."))
        self.table, self.head = (
            base["model.embed_tokens.weight"].to(dtype),
            base["lm_head.weight"].to(dtype),
        )
        device = self.head.device
        shape = (batch, cfg.num_key_value_heads, context + count, cfg.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=dtype),
        )
        self.cos, self.sin = model.rope_table(
            context + count, cfg.rotary_dim, cfg.rope_theta, device
        )
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None

    def _row(self, token: Tensor, hidden: Tensor, pos: Tensor) -> Tensor:
        x = drafters.mtp_fuse(F.embedding(token, self.table), hidden, self.w, self.cfg.rms_norm_eps)
        q, k, v, gate = model.attention_inputs(
            x, self.cos[pos], self.sin[pos], self.layer, self.cfg
        )
        o = cached_attention(q, k, v, self.keys, self.values, pos)
        y = model.attention_output(x, o, gate, self.layer, self.cfg)
        return model.zrms(y, self.w["mtp.norm.weight"], self.cfg.rms_norm_eps)

    def observe(self, following: Tensor, hidden: Tensor, taps: Tensor, pos: Tensor) -> None:
        self.seen.append(self._row(following, hidden, pos))

    def settle(self, kept: Tensor) -> None:
        self.last = torch.stack(self.seen, 1)[torch.arange(len(kept)), kept]
        self.seen = []

    def propose(self, anchor: Tensor, pos: Tensor, heat: float) -> tuple[Tensor, Tensor]:
        assert self.last is not None
        z, tokens, shares = self.last, [], []
        for j in range(self.count):
            logits = (z @ self.head.T).float()
            token = sample(logits, heat)
            tokens.append(token)
            shares.append((logits / max(heat, 1e-6)).softmax(-1))
            if j + 1 < self.count:
                z = self._row(token, z, pos + j)
        return torch.stack(tokens, 1), torch.stack(shares, 1)


class DflashProposer:
    """The DFlash2 block drafter with its selector walk."""

    def __init__(
        self,
        w: Weights,
        base: Weights,
        cfg: DraftConfig,
        batch: int,
        context: int,
        dtype: torch.dtype,
    ) -> None:
        self.cfg, self.count = cfg, cfg.block_size - 1
        self.w = {n: t.to(dtype) for n, t in w.items()}
        self.table, self.head = (
            base["model.embed_tokens.weight"].to(dtype),
            base["lm_head.weight"].to(dtype),
        )
        device = self.head.device
        shape = (batch, context + cfg.block_size, cfg.num_key_value_heads, cfg.head_dim)
        self.kv = [
            (
                torch.zeros(shape, device=device, dtype=dtype),
                torch.zeros(shape, device=device, dtype=dtype),
            )
            for _ in range(cfg.num_hidden_layers)
        ]
        self.cos, self.sin = model.rope_table(
            context + cfg.block_size, cfg.head_dim, cfg.rope_theta, device
        )
        self.drafter = Drafter(cfg)

    def observe(self, following: Tensor, hidden: Tensor, taps: Tensor, pos: Tensor) -> None:
        c = drafters.context(taps, self.w, self.cfg.rms_norm_eps)
        rows = torch.arange(len(pos), device=pos.device)
        for n, (keys, values) in enumerate(self.kv):
            k, v = drafters.context_kv(c, self.w, n, self.cos[pos], self.sin[pos], self.cfg)
            keys[rows, pos], values[rows, pos] = k, v

    def settle(self, kept: Tensor) -> None:
        return

    def propose(self, anchor: Tensor, pos: Tensor, heat: float) -> tuple[Tensor, Tensor]:
        cfg, batch = self.cfg, len(anchor)
        tokens = torch.full((batch, cfg.block_size), cfg.mask_token_id, device=anchor.device)
        tokens[:, 0] = anchor
        rows = pos[:, None] + torch.arange(cfg.block_size, device=pos.device)
        key = torch.arange(self.kv[0][0].shape[1], device=pos.device)
        seen = (key < pos[:, None, None]) & (rows[..., None] - key < cfg.sliding_window)
        block = torch.ones(
            batch, cfg.block_size, cfg.block_size, dtype=torch.bool, device=pos.device
        )
        out = self.drafter.blocks(
            F.embedding(tokens, self.table),
            self.kv,
            self.w,
            self.cos[rows].flatten(0, 1),
            self.sin[rows].flatten(0, 1),
            torch.cat([seen, block], -1)[:, None],
        )
        unary = (out[:, 1:] @ self.head.T).float()
        top, ids = unary.topk(cfg.selector_top_k, -1)
        previous, drafts, shares = anchor, [], []
        for place in range(self.count):
            scores = drafters.selector_scores(
                out[:, place + 1], previous, ids[:, place], top[:, place], self.w
            )
            choice = sample(scores, heat)
            previous = ids[:, place].gather(1, choice[:, None])[:, 0]
            q = (scores / max(heat, 1e-6)).softmax(-1)
            shares.append(torch.zeros_like(unary[:, 0]).scatter(1, ids[:, place], q))
            drafts.append(previous)
        return torch.stack(drafts, 1), torch.stack(shares, 1)


class Prefilled(NamedTuple):
    """Prompt length, the last row's logits, hidden and taps, and the recurrent state behind it."""

    length: int
    logits: Tensor
    hidden: Tensor
    taps: Tensor
    state: tuple[Tensor, Tensor]


@torch.no_grad()
def prefill(decoder: Decoder, proposers: list[Proposer], prompts: Tensor) -> Prefilled:
    """Feeds prompts ``[B, P]`` to the target and all but their last rows to the drafters."""
    batch, size = prompts.shape
    decoder.reset()
    zero = torch.zeros(batch, dtype=torch.long, device=prompts.device)
    for t in range(size - 1):
        _, hidden, taps = decoder.step(prompts[:, t], zero + t)
        for proposer in proposers:
            proposer.observe(prompts[:, t + 1], hidden, taps, zero + t)
            proposer.settle(zero)
    logits, hidden, taps = decoder.step(prompts[:, -1], zero + size - 1)
    return Prefilled(size, logits.clone(), hidden.clone(), taps.clone(), decoder.snapshot())


@torch.no_grad()
def speculate(
    decoder: Decoder,
    proposer: Proposer,
    start: Prefilled,
    steps: int,
    heat: float,
    ends: tuple[int, ...],
) -> dict[str, Any]:
    """Speculative decoding by rejection sampling (greedy: by equality), counting what is accepted.

    Counting of a sequence stops at its first end token. Returns tokens per step and,
    for each draft position, how often it was accepted of all steps and of the steps that reached it.
    """
    batch, device = len(start.logits), start.logits.device
    rows = torch.arange(batch, device=device)
    zero = torch.zeros(batch, dtype=torch.long, device=device)
    decoder.restore([start.state], zero)
    anchor = sample(start.logits, heat)
    pos = zero + start.length
    proposer.observe(anchor, start.hidden, start.taps, pos - 1)
    proposer.settle(zero)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    counts = torch.zeros(proposer.count + 1, device=device)
    for _ in range(steps):
        drafts, q = proposer.propose(anchor, pos, heat)
        fed = torch.cat([anchor[:, None], drafts], 1)
        seen, snapshots = [], []
        for r in range(proposer.count + 1):
            logits, hidden, taps = decoder.step(fed[:, r], pos + r)
            seen.append((logits.clone(), hidden.clone(), taps.clone()))
            snapshots.append(decoder.snapshot())
        all_logits = torch.stack([s[0] for s in seen], 1)
        if heat > 0:
            p = (all_logits / heat).softmax(-1)
            px = p[:, :-1].gather(2, drafts[..., None])[..., 0]
            qx = q.gather(2, drafts[..., None])[..., 0]
            good = torch.rand_like(px) * qx < px
        else:
            good = drafts == all_logits[:, :-1].argmax(-1)
        kept = good.long().cumprod(1).sum(1)
        if heat > 0:
            rest = p[rows, kept] - F.pad(q, (0, 0, 0, 1))[rows, kept]
            rest = rest.clamp(min=0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[rows, kept])
            new = torch.multinomial(rest, 1)[:, 0]
        else:
            new = all_logits[rows, kept].argmax(-1)
        counts += torch.bincount(kept[alive], minlength=proposer.count + 1)
        following = torch.cat([drafts, new[:, None]], 1)
        following[rows, kept] = new
        inside = torch.arange(proposer.count + 1, device=device) <= kept[:, None]
        for end in ends:
            alive &= ~((following == end) & inside).any(1)
        decoder.restore(snapshots, kept)
        for r, (_, hidden, taps) in enumerate(seen):
            proposer.observe(following[:, r], hidden, taps, pos + r)
        proposer.settle(kept)
        anchor, pos = new, pos + kept + 1
    reached = counts.flip(0).cumsum(0).flip(0)
    total = float(counts.sum())
    tokens = float((counts * torch.arange(1, proposer.count + 2, device=device)).sum())
    return {
        "tokens_per_step": tokens / max(total, 1),
        "steps": int(total),
        "accepted": [float(r) / max(total, 1) for r in reached[1:]],
        "accepted_if_reached": [
            float(reached[i + 1]) / max(float(reached[i]), 1) for i in range(proposer.count)
        ],
    }


def draft_prompts(maker: batches.Maker, kind: str, count: int, size: int) -> Tensor:
    """``[count, size]``: starts of held-out documents, or conversations behind other held-out text."""
    rng = np.random.default_rng(5)
    rows: list[np.ndarray] = []
    if kind != "chat":
        fitting = [d for d in maker.docs[kind] if len(maker.corpus.doc(int(d))) >= size + 64]
        rows = [maker.corpus.doc(int(d))[:size] for d in spread(fitting, count)]
    ask = maker.tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n").ids
    kinds = [k.__name__ for k, _ in instruct.KINDS if k.__name__ != "talk"]
    while len(rows) < count:
        talk = maker.conversation(rng, kinds[len(rows) % len(kinds)]).tolist()
        starts = [i + len(ask) for i in range(len(talk)) if talk[i : i + len(ask)] == ask]
        if not starts or starts[0] > size - 16:
            continue
        prompt = talk[: starts[0]]
        before = maker.span(rng, "docs", size)[-(size - len(prompt) - 1) :].tolist()
        before = [maker.end] * (size - len(prompt) - 1 - len(before)) + before
        rows.append(np.array([*before, maker.end, *prompt]))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def drafting(
    weights: Weights,
    mtp: Weights,
    draft: Weights,
    cfg: Config,
    dcfg: DraftConfig,
    maker: batches.Maker,
    count: int = 32,
    steps: int = 48,
) -> dict[str, Any]:
    """Acceptance of both drafters on held-out prompts: docs, code and chat, greedy and at 0.7."""
    device = weights["lm_head.weight"].device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ends = tuple(maker.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>"))
    result: dict[str, Any] = {}
    size = 384
    context = size + steps * dcfg.block_size + 16
    decoder = Decoder(weights, cfg, count, context, dtype, dcfg.target_layer_ids)
    for kind in ("docs", "code", "chat"):
        prompts = draft_prompts(maker, kind, count, size).to(device)
        proposers: dict[str, Proposer] = {
            "mtp": MtpProposer(mtp, weights, cfg, count, context, dtype),
            "dflash2": DflashProposer(draft, weights, dcfg, count, context, dtype),
        }
        start = prefill(decoder, list(proposers.values()), prompts)
        for heat in (0.0, 0.7):
            for name, proposer in proposers.items():
                torch.manual_seed(0)
                key = f"{name}_{kind}_{'greedy' if heat == 0 else heat}"
                result[key] = speculate(decoder, proposer, start, steps, heat, ends)
                print(key, json.dumps(result[key]), flush=True)
    return result


@dataclass(frozen=True)
class Effort:
    """How much is measured: documents per kind (bits), per kind and size (copying), prompts and steps (drafts)."""

    documents: int = 200
    copies: int = 8
    prompts: int = 32
    steps: int = 48


def evaluate(
    path: Path,
    work: Path,
    folders: dict[str, Path],
    cfg: Config,
    dcfg: DraftConfig,
    parts: set[str],
    effort: Effort,
) -> dict[str, Any]:
    """All measurements of the named checkpoints; written to ``path`` as they come."""
    from tools.train_demo.compress import load_checkpoint

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    maker = batches.Maker(work, train.TEMPLATE.read_text(), 5, out=True)
    latest: dict[str, Any] = {}
    for name, folder in folders.items():
        tensors = {n: t.to(device) for n, t in load_checkpoint(folder).items()}
        weights = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
        mtp = {n: t for n, t in tensors.items() if n.startswith("mtp.")}
        draft = {n: t.to(device) for n, t in load_checkpoint(folder / "draft").items()}
        entry: dict[str, Any] = {}
        begin = time.time()
        if "bits" in parts:
            entry["bits_per_byte"] = {
                k: bits_per_byte(weights, cfg, maker, k, device, effort.documents)
                for k in ("docs", "code")
            }
        if "copy" in parts:
            entry["copy"] = copying(weights, cfg, maker, effort.copies)
        if "draft" in parts:
            entry["draft"] = drafting(
                weights, mtp, draft, cfg, dcfg, maker, effort.prompts, effort.steps
            )
        latest = json.loads(path.read_text()) if path.exists() else {}
        latest[name] = {**latest.get(name, {}), **entry}
        path.write_text(json.dumps(latest, indent=1) + "\n")
        print(name, round(time.time() - begin, 1), "s", json.dumps(entry)[:1500], flush=True)
    return latest
