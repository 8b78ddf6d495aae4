"""The engine beside transformers' `generate` and the bare products, in one run on one machine.

Rounds are interleaved, so that a machine whose speed drifts drifts for all alike; figures are
medians. Acceptance is forced by drafting the text that plain decoding gave, so that the last row
measures the machinery and not a drafter.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.config import Config, ConfigError, override
from slipstream.draft.table import Rule, put_points
from slipstream.kernels.types import Batch, Dense, Draft, Verdict
from slipstream.llm import LLM, RequestOutput
from slipstream.request import SamplingParams
from slipstream.weights.linear import Linear
from slipstream.weights.sources import resolve


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """Tokens per second, medians over the rounds."""

    model: str
    machine: str
    threads: int
    rounds: int
    prompt_tokens: int
    new_tokens: int
    decode: float
    decode_transformers: float | None
    products: float  # one pass of all matrix-vector products, as a decode rate
    prefill: float
    prefill_transformers: float | None
    forced: float  # decode with right drafts
    forced_tokens_per_step: float

    def __str__(self) -> str:
        def against(a: float, b: float | None) -> str:
            return "" if b is None else f" | {b:.1f} | {a / b:.2f}x"

        head = " | transformers, fp32 | ratio" if self.decode_transformers is not None else ""
        lines = [
            f"{self.model}, float32, {self.machine}, {self.threads} threads,"
            f" median of {self.rounds} interleaved rounds",
            f"| tokens/s | slipstream{head} |",
            "|---|---:|" + ("---:|---:|" if head else ""),
            f"| decode, {self.new_tokens} tokens"
            f" | {self.decode:.1f}{against(self.decode, self.decode_transformers)} |",
            f"| prefill, {self.prompt_tokens} tokens"
            f" | {self.prefill:.1f}{against(self.prefill, self.prefill_transformers)} |",
            "",
            f"bare matrix-vector products: {self.products:.1f} passes/s;"
            f" decode is {self.decode / self.products:.0%} of that",
            f"drafts forced right: {self.forced:.1f} tokens/s at"
            f" {self.forced_tokens_per_step:.2f} tokens a step,"
            f" {self.forced / self.decode:.2f}x plain decoding",
        ]
        return "\n".join(lines)


class Replay(Rule):
    """Drafts the continuation of a known text."""

    names: tuple[str, ...] = ("replay",)

    def __init__(self, length: Tensor, k: int) -> None:
        self.length, self.max_len = length, k
        self.text: list[int] = []

    def propose(self, batch: Batch, verdict: Verdict, out: Draft) -> None:
        slots, drafts = [], []
        for b, span in enumerate(batch.spans):
            at = int(self.length[span.slot])
            slots.append(span.slot)
            drafts.append(self.text[at : at + self.max_len] if int(verdict.added[b]) else [])
        put_points(out, slots, drafts, [[1.0] * len(d) for d in drafts])


def measure(
    config: Config, prompt: str, *, new_tokens: int = 64, rounds: int = 5, peer: bool = True
) -> SpeedTable:
    """Time decoding and prefill of one prompt.

    Args:
        prompt: text; it is cut or repeated to 512 tokens for prefill.
        peer: also run transformers on the same file, if it can be imported.
    """
    if new_tokens < 2 or not prompt:
        raise ConfigError("give a prompt and 2 or more new tokens: a rate needs an interval")
    config = override(config, {"dtype": "float32", "device": "cpu", "cache.prefix": False})
    llm = LLM(config=config)
    short = llm.encode(prompt)
    long = (short * (512 // len(short) + 1))[:512]
    plain = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, speculate=False)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, speculate=False)
    replay = Replay(llm.engine.inputs.length, llm.engine.limits.drafts)
    theirs = _transformers(llm) if peer else None
    warm = llm.generate(short, plain)[0]
    replay.text = short + warm.completions[0].token_ids
    taken: dict[str, list[float]] = {}
    forced_steps: list[float] = []

    def clock(name: str, run: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        made = run()
        taken.setdefault(name, []).append(time.perf_counter() - begin)
        return made

    products = _products(llm)
    for n in range(rounds + 1):
        output = llm.generate(short, plain)[0]
        taken.setdefault("decode", []).append(_decoding(output))
        clock("products", products)
        clock("prefill", lambda: llm.generate(long, one))
        output = _forced(llm, replay, short, new_tokens)
        taken.setdefault("forced", []).append(_decoding(output))
        forced_steps.append(output.speculation.tokens_per_step)
        if theirs:
            clock("first", lambda: theirs(short, 1))
            clock("whole", lambda: theirs(short, new_tokens))
            clock("their prefill", lambda: theirs(long, 1))
        if n == 0:
            taken.clear()  # the first round warms up
            forced_steps.clear()
    middle = {name: statistics.median(values) for name, values in taken.items()}
    more = new_tokens - 1
    return SpeedTable(
        model=config.model,
        machine=platform.processor() or platform.machine(),
        threads=torch.get_num_threads(),
        rounds=rounds,
        prompt_tokens=len(long),
        new_tokens=new_tokens,
        decode=more / middle["decode"],
        decode_transformers=more / (middle["whole"] - middle["first"]) if theirs else None,
        products=1 / middle["products"],
        prefill=len(long) / middle["prefill"],
        prefill_transformers=len(long) / middle["their prefill"] if theirs else None,
        forced=more / middle["forced"],
        forced_tokens_per_step=statistics.median(forced_steps),
    )


def _decoding(output: RequestOutput) -> float:
    return output.timing.total - output.timing.first_token


def _forced(llm: LLM, replay: Replay, prompt: list[int], new_tokens: int) -> RequestOutput:
    """One answer with the right drafts, at whatever length the limits allow."""
    engine = llm.engine
    kept = (engine.drafter, engine.scheduler.drafting)
    engine.force(replay)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        return llm.generate(prompt, params)[0]
    finally:
        engine.drafter, engine.scheduler.drafting = kept


def _products(llm: LLM) -> Callable[[], None]:
    """One matrix-vector product with every weight that a decode step reads."""
    weights = [
        linear.packed.weight
        for linear in _linears(llm.engine.model)
        if isinstance(linear.packed, Dense)
    ]
    inputs = [torch.randn(1, w.shape[1]) for w in weights]

    def run() -> None:
        with torch.inference_mode():
            for w, x in zip(weights, inputs, strict=True):
                F.linear(x, w)

    return run


def _linears(node: Any, seen: set[int] | None = None) -> list[Linear]:
    """Every Linear a model holds, once; a tied table counts as the head it is."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return []
    seen.add(id(node))
    if isinstance(node, Linear):
        return [node]
    if isinstance(node, list | tuple):
        children = list(node)
    elif type(node).__module__.startswith("slipstream.models"):
        children = list(getattr(node, "__dict__", {}).values())
    else:
        return []
    return [found for child in children for found in _linears(child, seen)]


def _transformers(llm: LLM) -> Callable[[list[int], int], None] | None:
    try:
        import transformers
    except ImportError:
        return None
    path = resolve(llm.config.model)
    place = {"gguf_file": path.name} if path.is_file() else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent if path.is_file() else path, dtype=torch.float32, **place
    )
    model.train(False)
    model.generation_config.eos_token_id = None

    def run(tokens: list[int], count: int) -> None:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
            )

    return run
