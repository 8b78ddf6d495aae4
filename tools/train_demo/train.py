"""Training loops: the target, the MTP head on its hidden states, the DFlash2 drafter on its taps.

Each loop can stop after ``slice_seconds`` and go on later from ``<work>/state-<stage>/``.
"""

from __future__ import annotations

import csv
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_demo import batches, drafters, instruct, model
from tools.train_demo.decode import Decoder, generate
from tools.train_demo.drafters import DraftConfig, Drafter
from tools.train_demo.model import Config, Target, Weights
from tools.train_demo.optim import Optimizer, schedule

SHARD_BYTES = 14_500_000
# One compiled function serves many matrix shapes.
torch._dynamo.config.recompile_limit = 64
TEMPLATE = Path(__file__).parents[2] / "slipstream" / "demo" / "chat_template.jinja"


@dataclass(frozen=True)
class Plan:
    """Settings of one stage. ``tokens`` per step; ``lengths`` as (from this share of the steps, row length).

    ``copy_weight`` likewise gives the weight of copied tokens in the loss. Once copying works, what is
    left of its loss sits in the few tokens behind which a text went on differently elsewhere; at
    weight 1 their gradient drowns in that of plain text.
    """

    steps: int
    tokens: int = 129_024
    lengths: tuple[tuple[float, int], ...] = ((0.0, 2048), (0.3, 9216))
    muon_lr: float = 3e-3
    adam_lr: float = 3e-3
    warm: int = 100
    decay: float = 0.35
    seed: int = 1
    copy: float = 0.35
    chat: float = 0.25
    copy_weight: tuple[tuple[float, float], ...] = ((0.0, 1.0), (0.15, 8.0), (0.45, 20.0))
    anchors: int = 128

    def shape(self, step: int) -> batches.Shape:
        """Rows and length of a step."""
        length = int(self._at(self.lengths, step))
        return batches.Shape(self.tokens // length, length, self.copy, self.chat)

    def weight(self, step: int) -> float:
        """Weight of copied tokens in a step's loss."""
        return self._at(self.copy_weight, step)

    def _at(self, values: tuple[tuple[float, float], ...], step: int) -> float:
        return [v for at, v in values if step >= at * self.steps][-1]


TARGET = Plan(4800)
MTP = Plan(600, tokens=65_536, lengths=((0.0, 4096),), warm=40, decay=0.6, seed=2)
DFLASH = Plan(1500, tokens=65_536, lengths=((0.0, 4096),), warm=40, decay=0.6, seed=3)


def save_shards(folder: Path, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Writes tensors in files under 15 MB; ``meta.json`` comes last, so a cut save is noticed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    part: dict[str, Tensor] = {}
    size = count = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if part and size + nbytes > SHARD_BYTES:
            save_file(part, folder / f"{count:05d}.safetensors")
            part, size, count = {}, 0, count + 1
        part[name] = tensor.detach().contiguous().cpu()
        size += nbytes
    save_file(part, folder / f"{count:05d}.safetensors")
    (folder / "meta.json").write_text(json.dumps(meta))


def load_shards(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What `save_shards` wrote, or None."""
    if not (folder / "meta.json").exists():
        return None
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors, json.loads((folder / "meta.json").read_text())


class Log:
    """A CSV file that grows row by row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def row(self, **values: Any) -> None:
        new = not self.path.exists()
        with open(self.path, "a", newline="") as handle:
            out = csv.writer(handle, lineterminator="\n")
            if new:
                out.writerow(values)
            out.writerow([f"{v:.5g}" if isinstance(v, float) else v for v in values.values()])
        print(
            " ".join(
                f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()
            ),
            flush=True,
        )


def token_loss(hidden: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats and squared log-partition of each row of ``hidden [N, hidden]``."""
    logits = (hidden @ head.to(hidden.dtype).T).float()
    total = logits.logsumexp(-1)
    return total - logits.gather(-1, target[:, None])[:, 0], total.square()


def soft_loss(hidden: Tensor, teacher: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy against the target's distribution, and the overlap sum(min(p, q)), of each row.

    The overlap is the chance that a draft sampled from q is accepted (temperature 1).
    """
    h = head.to(hidden.dtype).T
    q = (hidden @ h).float().log_softmax(-1)
    p = (teacher @ h).float().softmax(-1)
    return -(p * q).sum(-1), torch.minimum(p, q.detach().exp()).sum(-1)


class Stage:
    """What all loops share: weights, optimizer, data, log, saved state."""

    def __init__(
        self, name: str, work: Path, plan: Plan, fresh: Callable[[], Weights], suffix: str = ""
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.name, self.work, self.plan = name, work, plan
        self.folder = work / f"state-{name}{suffix}"
        self.log = Log(work / f"{name}{suffix}.csv")
        saved = load_shards(self.folder)
        tensors = saved[0] if saved else {f"w.{n}": t for n, t in fresh().items()}
        self.weights: Weights = {
            n[2:]: t.to(self.device).requires_grad_()
            for n, t in tensors.items()
            if n.startswith("w.")
        }
        self.optimizer = Optimizer(self.weights, compiled=self.device.type == "cuda")
        self.step = 0
        self.seconds = 0.0
        if saved:
            for n, t in self.optimizer.state.items():
                t.copy_(tensors[n])
            self.step, self.seconds = saved[1]["step"], saved[1]["seconds"]
            self.optimizer.count = self.step

    def save(self) -> None:
        tensors = {f"w.{n}": t for n, t in self.weights.items()} | self.optimizer.state
        save_shards(
            self.folder, tensors, {"step": self.step, "seconds": self.seconds, **asdict(self.plan)}
        )

    def run(
        self,
        loss_of: Callable[[Tensor, Tensor, int], tuple[Tensor, dict[str, Tensor]]],
        data: Iterator[tuple[np.ndarray, np.ndarray]],
        until: int,
        slice_seconds: float,
        every: int = 20,
        deadline: float | None = None,
        keep: Callable[[], None] | None = None,
        keep_seconds: float = 200,
    ) -> bool:
        """Steps until step ``until`` or the end of the slice; True when the stage is complete.

        With a ``deadline`` (as of `time.time`) the learning rate follows the time from the end of the
        first step, which compiles, until then, and the number of steps is what fits. State is saved
        every ``keep_seconds``, and ``keep`` called.
        """
        begin = last = kept = time.time()
        first = self.step
        ready = begin
        sums: dict[str, Tensor] = {}
        steps = 0
        while (self.step < until or deadline is not None) and time.time() - begin < slice_seconds:
            if deadline is not None and time.time() >= deadline:
                break
            ids_np, labels_np = next(data)
            ids = (
                torch.from_numpy(ids_np.astype(np.int32)).to(self.device, non_blocking=True).long()
            )
            labels = torch.from_numpy(labels_np).to(self.device, non_blocking=True)
            loss, parts = loss_of(ids, labels, self.step)
            loss.backward()
            at: float = self.step
            if self.step == first + 1:
                ready = time.time()
            if deadline is not None and self.step > first:
                passed = (time.time() - ready) / (deadline - ready)
                at = first + (self.plan.steps - first) * passed
            # Warming up goes by steps in any case: the first steps are the same in every run.
            factor = min(
                schedule(at, self.plan.steps, 0, self.plan.decay),
                schedule(self.step, 1 << 60, self.plan.warm, self.plan.decay),
            )
            norm = self.optimizer.step(self.plan.muon_lr * factor, self.plan.adam_lr * factor)
            for key, value in {**parts, "norm": norm}.items():
                sums[key] = sums.get(key, 0.0) + value.detach()  # type: ignore[operator]
            steps += 1
            self.step += 1
            if self.step % every == 0 or self.step in {1, 5} or self.step == until:
                shown = {k: float(v) / steps for k, v in sums.items()}
                now = time.time()
                self.seconds += now - last
                rate = steps * ids[:, 1:].numel() / (now - last)
                last, steps, sums = now, 0, {}
                self.log.row(
                    step=self.step, seconds=self.seconds, **shown, lr=factor, tokens_per_s=int(rate)
                )
            if time.time() - kept > keep_seconds:
                kept = time.time()
                self.save()
                if keep is not None:
                    keep()
        self.save()
        return self.step >= self.plan.steps or deadline is not None


def train_target(
    work: Path,
    plan: Plan,
    cfg: Config,
    slice_seconds: float,
    until: int | None = None,
    workers: int = 12,
    suffix: str = "",
    deadline: float | None = None,
) -> bool:
    """Trains the target on plain text, copying and conversations."""
    generator = torch.Generator().manual_seed(plan.seed)
    stage = Stage(
        "target",
        work,
        plan,
        lambda: model.init(model.target_shapes(cfg), cfg.num_hidden_layers, generator),
        suffix,
    )
    fast = stage.device.type == "cuda"
    target = Target(cfg, compiled=fast)
    losses = torch.compile(token_loss, dynamic=False) if fast else token_loss
    dtype = torch.bfloat16 if fast else torch.float32

    def loss_of(ids: Tensor, labels: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        hidden, _ = target.forward(stage.weights, ids[:, :-1], dtype)
        ce, z = losses(hidden.flatten(0, 1), stage.weights["lm_head.weight"], ids[:, 1:].flatten())
        kind = labels[:, 1:].flatten()
        used = (kind > 0).float()
        weight = used + (kind == batches.COPIED).float() * (plan.weight(step) - 1)
        total = ((ce + 1e-5 * z) * weight).sum() / used.sum()
        parts = {"loss": (ce * used).sum() / used.sum()}
        for name, code in (
            ("plain", batches.PLAIN),
            ("copied", batches.COPIED),
            ("chat", batches.CHAT),
        ):
            mine = (kind == code).float()
            parts[name] = (ce * mine).sum() / mine.sum().clamp(min=1)
        return total, parts

    jobs = ((step, plan.shape(step)) for step in itertools.count(stage.step))
    data = batches.feed(work, TEMPLATE.read_text(), plan.seed, jobs, workers)

    def keep() -> None:
        if not suffix:
            write_weights(work / "target", stage.weights)

    done = stage.run(
        loss_of,
        data,
        plan.steps if until is None else min(until, plan.steps),
        slice_seconds,
        deadline=deadline,
        keep=keep,
    )
    keep()
    return done


def write_weights(folder: Path, weights: Weights) -> None:
    """bf16 weights in shards under 15 MB."""
    save_shards(folder, {n: w.detach().to(torch.bfloat16) for n, w in weights.items()}, {})


def read_weights(folder: Path, device: torch.device | str = "cpu") -> Weights:
    """What `write_weights` wrote, on a device."""
    saved = load_shards(folder)
    if saved is None:
        raise FileNotFoundError(folder)
    return {n: t.to(device) for n, t in saved[0].items()}


@torch.no_grad()
def say(work: Path, cfg: Config, rows: int, length: int = 1025, seed: int = 7) -> None:
    """Lets the target go on from training prompts: ``said.npy`` ``[rows, length]`` uint16.

    A third greedy, a third at temperature 0.7, a third at 1: what drafters meet in use.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    maker = batches.Maker(work, TEMPLATE.read_text(), seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = Decoder(read_weights(work / "target", device), cfg, rows, length, dtype)
    rng = np.random.default_rng(seed)
    ask = maker.tokenizer.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n").ids
    prompts: list[list[int]] = []
    for row in range(rows):
        if row % 3 == 2:
            talk: list[int] = []
            while not talk or len(talk) > length // 2:
                whole = maker.conversation(rng).tolist()
                starts = [i + len(ask) for i in range(len(whole)) if whole[i : i + len(ask)] == ask]
                talk = whole[: starts[int(rng.integers(len(starts)))]] if starts else []
            prompts.append(talk)
        else:
            size = int(rng.integers(16, length // 3))
            prompts.append(maker.span(rng, "docs" if row % 3 else "code", size).tolist())
    heat = torch.tensor([0.0, 0.7, 1.0], device=device)[
        torch.randint(3, (rows,), generator=torch.Generator().manual_seed(seed))
    ]
    generator = torch.Generator(device).manual_seed(seed)
    ids = generate(decoder, prompts, length, heat, generator)
    np.save(work / "said.tmp.npy", ids.cpu().numpy().astype(np.uint16))
    (work / "said.tmp.npy").rename(work / "said.npy")
    for row in range(min(rows, 6)):
        print(
            "---",
            float(heat[row]),
            repr(maker.tokenizer.decode(ids[row, :400].tolist(), skip_special_tokens=False)),
        )


def _mixed(
    work: Path, plan: Plan, first: int, workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of which half the rows are the target's own text (as soon as ``said.npy`` exists)."""
    path = work / "said.npy"
    said: np.ndarray | None = None

    def jobs() -> Iterator[tuple[int, batches.Shape]]:
        for step in itertools.count(first):
            shape = plan.shape(step)
            yield step, replace(shape, rows=shape.rows // 2) if path.exists() else shape

    feed = batches.feed(work, TEMPLATE.read_text(), plan.seed, jobs(), workers)
    for step, (ids, labels) in zip(itertools.count(first), feed, strict=False):
        if said is None and path.exists():
            said = np.load(path)[:, :-1]
        if said is None:
            yield ids, labels
            continue
        shape = plan.shape(step)
        own, length = shape.rows // 2, ids.shape[1]
        rng = np.random.default_rng([plan.seed, step, 1])
        per = -(-length // said.shape[1])
        rows = [np.concatenate(said[rng.integers(0, len(said), per)])[:length] for _ in range(own)]
        rest = ids[: shape.rows - own]
        yield (
            np.concatenate([np.stack(rows), rest]),
            np.concatenate([np.full((own, length), batches.PLAIN, np.uint8), labels[: len(rest)]]),
        )


def train_mtp(
    work: Path,
    plan: Plan,
    cfg: Config,
    slice_seconds: float,
    depth: int = 3,
    workers: int = 12,
    deadline: float | None = None,
) -> bool:
    """Trains the MTP head on the frozen target, chained ``depth`` deep on its own outputs."""
    generator = torch.Generator().manual_seed(plan.seed)
    stage = Stage("mtp", work, plan, lambda: model.init(drafters.mtp_shapes(cfg), 2, generator))
    fast = stage.device.type == "cuda"
    dtype = torch.bfloat16 if fast else torch.float32
    base = read_weights(work / "target", stage.device)
    base = {n: w if fast else w.float() for n, w in base.items()}
    target = Target(cfg, compiled=fast)
    head, table = base["lm_head.weight"], base["model.embed_tokens.weight"]
    wrap = torch.compile if fast else (lambda f, **_: f)
    soft = wrap(soft_loss, dynamic=False)
    fuse = wrap(drafters.mtp_fuse, dynamic=False)
    final = wrap(model.zrms, dynamic=False)
    group = cfg.num_attention_heads // cfg.num_key_value_heads

    def loss_of(ids: Tensor, labels: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        batch, length = ids.shape[0], ids.shape[1] - 1
        with torch.no_grad():
            truth, _ = target.forward(base, ids[:, :-1], dtype)
        cos, sin = model.rope_table(length + depth, cfg.rotary_dim, cfg.rope_theta, ids.device)
        w = stage.weights
        layer = model.layer_of(w, "mtp.layers.0.")
        hidden = truth.flatten(0, 1)
        keys: list[tuple[Tensor, Tensor]] = []
        total: Tensor | float = 0.0
        parts: dict[str, Tensor] = {}
        rows = torch.arange(length, device=ids.device)
        for d in range(1, depth + 1):
            nxt = F.embedding(ids[:, (rows + d).clamp(max=length)].flatten(), table).to(dtype)
            x = fuse(nxt, hidden, w, cfg.rms_norm_eps)
            at = rows + d - 1
            q, k, v, gate = target.attention_inputs(
                x, cos[at].repeat(batch, 1), sin[at].repeat(batch, 1), layer, cfg
            )
            q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
            keys.append((k, v))
            if d == 1:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                mask = drafters.chain_mask(length, d, ids.device)
                kk, vv = (
                    torch.cat(t, 2).repeat_interleave(group, 1) for t in zip(*keys, strict=True)
                )
                o = F.scaled_dot_product_attention(q, kk, vv, attn_mask=mask)
            y = target.attention_output(
                x, o.transpose(1, 2).reshape(batch * length, -1), gate, layer, cfg
            )
            hidden = final(y, w["mtp.norm.weight"], cfg.rms_norm_eps)
            teacher = truth[:, (rows + d).clamp(max=length - 1)].flatten(0, 1)
            ce, overlap = soft(hidden, teacher, head)
            used = (rows + d < length).float().repeat(batch)
            mean = (ce * used).sum() / used.sum()
            total = total + mean * 0.8 ** (d - 1)
            parts[f"ce{d}"] = mean
            parts[f"overlap{d}"] = (overlap * used).sum() / used.sum()
        assert isinstance(total, Tensor)
        return total, parts

    data = _mixed(work, plan, stage.step, workers)
    done = stage.run(loss_of, data, plan.steps, slice_seconds, deadline=deadline)
    write_weights(work / "mtp", stage.weights)
    return done


def train_dflash(
    work: Path,
    plan: Plan,
    cfg: Config,
    dcfg: DraftConfig,
    slice_seconds: float,
    workers: int = 12,
    deadline: float | None = None,
) -> bool:
    """Trains the DFlash2 drafter: blocks at random anchors of every row, all rows of a block at once.

    Mask rows learn the target's distribution, later rows with less weight (exp(-(l-1)/4) as is usual
    for blocks of 8); the selector learns it among the 16 candidates, given the true predecessor.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    stage = Stage("dflash", work, plan, lambda: drafters.init_draft(dcfg, generator))
    fast = stage.device.type == "cuda"
    dtype = torch.bfloat16 if fast else torch.float32
    base = read_weights(work / "target", stage.device)
    base = {n: w if fast else w.float() for n, w in base.items()}
    target, drafter = Target(cfg, compiled=fast), Drafter(dcfg, compiled=fast)
    head, table = base["lm_head.weight"], base["model.embed_tokens.weight"]
    soft = torch.compile(soft_loss, dynamic=False) if fast else soft_loss
    size = dcfg.block_size

    def select(
        hidden: Tensor, teacher: Tensor, previous: Tensor, w: Weights
    ) -> tuple[Tensor, Tensor]:
        unary, candidates = (hidden @ head.to(hidden.dtype).T).float().topk(dcfg.selector_top_k, -1)
        scores = drafters.selector_scores(hidden, previous, candidates, unary, w)
        q = scores.log_softmax(-1)
        p = (teacher @ head.to(hidden.dtype).T).float().softmax(-1).gather(-1, candidates)
        mass = p.sum(-1, keepdim=True)
        return -(p * q).sum(-1), torch.minimum(p, q.detach().exp()).sum(-1) + 0 * mass[:, 0]

    select = torch.compile(select, dynamic=False) if fast else select

    def loss_of(ids: Tensor, labels: Tensor, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        batch, length = ids.shape[0], ids.shape[1] - 1
        count = min(plan.anchors, length // 4)
        with torch.no_grad():
            truth, taps = target.forward(base, ids[:, :-1], dtype, dcfg.target_layer_ids)
        w = stage.weights
        rng = np.random.default_rng([plan.seed, step, 2])
        chosen = np.stack(
            [
                np.sort(rng.choice(np.arange(1, length - size), count, replace=False))
                for _ in range(batch)
            ]
        )
        anchors = torch.from_numpy(chosen).to(ids.device)  # [B, A]
        rows = anchors[..., None] + torch.arange(size, device=ids.device)  # [B, A, size]
        cos, sin = model.rope_table(length, dcfg.head_dim, dcfg.rope_theta, ids.device)
        c = drafter.context(torch.cat(taps, -1).flatten(0, 1), w, dcfg.rms_norm_eps)
        cc, ss = cos.repeat(batch, 1), sin.repeat(batch, 1)
        keys = []
        for n in range(dcfg.num_hidden_layers):
            k, v = drafter.context_kv(c, w, n, cc, ss, dcfg)
            keys.append((k.unflatten(0, (batch, length)), v.unflatten(0, (batch, length))))
        tokens = torch.full_like(rows, dcfg.mask_token_id)
        tokens[..., 0] = ids.gather(1, anchors)
        x = F.embedding(tokens.flatten(1), table).to(dtype)
        where = rows.flatten(1)  # [B, R]
        start = anchors.repeat_interleave(size, 1)
        key = torch.arange(length, device=ids.device)
        seen = (key < start[..., None]) & (where[..., None] - key < dcfg.sliding_window)
        block = torch.arange(count, device=ids.device).repeat_interleave(size)
        mask = torch.cat([seen, (block[:, None] == block).expand(batch, -1, -1)], -1)[:, None]
        out = drafter.blocks(x, keys, w, cos[where].flatten(0, 1), sin[where].flatten(0, 1), mask)
        out = out.unflatten(1, (count, size))[:, :, 1:].reshape(-1, out.shape[-1])
        before = rows[:, :, :-1].flatten(1)  # target rows that decide positions 1..7
        teacher = truth.gather(1, before[..., None].expand(-1, -1, truth.shape[-1])).flatten(0, 1)
        previous = ids.gather(1, before).flatten()
        ce, _ = soft(out, teacher, head)
        pick, overlap = select(out, teacher, previous, w)
        weight = torch.exp(-torch.arange(size - 1, device=ids.device) / 4.0).repeat(batch * count)
        total = ((ce + pick) * weight).sum() / weight.sum()
        parts = {"ce": ce.mean(), "selector": pick.mean()}
        for place in range(size - 1):
            parts[f"overlap{place + 1}"] = overlap.view(-1, size - 1)[:, place].mean()
        return total, parts

    data = _mixed(work, plan, stage.step, workers)
    done = stage.run(loss_of, data, plan.steps, slice_seconds, deadline=deadline)
    write_weights(work / "dflash", stage.weights)
    return done


def preview(work: Path, cfg: Config) -> None:
    """Prints what the target makes of a few prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    maker = batches.Maker(work, TEMPLATE.read_text(), 0)
    talks = [
        instruct.TALK[4][0],
        "Repeat this text exactly:\n\nThe cache holds 64 rows of b7f3-99ac.",
        "What is 17 plus 5?",
    ]
    prompts = [
        maker.chat.ids([{"role": "user", "content": t}], add_generation_prompt=True) for t in talks
    ]
    prompts.append(maker.tokenizer.encode("def read_config(path):\n").ids)
    decoder = Decoder(read_weights(work / "target", device), cfg, len(prompts), 160)
    for row in generate(decoder, prompts, 160):
        print(repr(maker.tokenizer.decode(row.tolist(), skip_special_tokens=False)))
