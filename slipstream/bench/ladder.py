"""What each drafter adds: the same answers with one more thing switched on at every step.

One engine a step; rounds are interleaved prompt by prompt and the order turns with the round, so
that a machine whose speed drifts drifts for all alike. Figures are medians of the rounds, and
speed-ups are medians of ratios within a round. All answers are greedy and must be equal. Knows
engines through `LLM` alone, but for the switch to a fixed number of drafts.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from slipstream.config import Config, ConfigError, override
from slipstream.engine import memory
from slipstream.engine.engine import GREEDY
from slipstream.llm import LLM, RequestOutput, text_side
from slipstream.request import SamplingParams
from slipstream.weights.sources import open_checkpoint, resolve

_SHORT, _LONG = 8, 16  # rows of a span: the last token and its drafts
_WARM = 8  # tokens of an answer that nobody times

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (
        "no drafts",
        {
            "speculation.enabled": False,
            "speculation.lookup": False,
            "speculation.mtp": False,
            "speculation.dflash": "",
            "cache.prefix": False,
            "limits.span": _SHORT,
        },
    ),
    "mtp": (
        "drafts of the checkpoint's MTP head",
        {"speculation.enabled": True, "speculation.mtp": True},
    ),
    "dflash2": ("and of the block drafter", {"speculation.dflash": "auto"}),
    "lookup": ("and copies of the request's own text", {"speculation.lookup": True}),
    "long": (f"and spans of {_LONG} rows instead of {_SHORT}", {"limits.span": _LONG}),
    "prefix": ("and the prefix cache, which has seen every prompt once", {"cache.prefix": True}),
}
TASKS = {  # and most tokens of an answer: all of it in five minutes at 40 plain tokens/s
    "chat": 24,
    "code": 32,
    "reproduce": 320,
    "edit": 40,
    "quote": 40,
    "summarize": 40,
}
LENGTHS = (1, 2, 4, 7, 15)
WHOLE = "all"  # the name under which all tasks together are shown
PROMPTS = Path(__file__).with_name("prompts")


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the ladder."""

    step: str
    task: str
    tokens: int  # of all answers of one round
    tokens_per_step: float
    tokens_per_s: float  # after an answer's first token
    ttft_ms: float  # mean over the prompts
    speedup: float  # tokens_per_s against the plain step of the same round
    text: bool  # every answer is the plain step's, token for token
    accepted_by_source: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LengthRow:
    """One cell of the comparison with fixed numbers of drafts."""

    length: int  # drafts of every step; 0: adaptive
    task: str
    tokens_per_step: float
    tokens_per_s: float
    text: bool


@dataclass(frozen=True, slots=True)
class Ladder:
    """The ladder and where it was measured."""

    model: str
    machine: str
    threads: int
    dtype: str
    rounds: int
    rows: tuple[Row, ...]  # step by step, and within a step task by task
    totals: tuple[Row, ...]  # a step each, all tasks together
    lengths: tuple[LengthRow, ...] = ()
    notes: tuple[str, ...] = ()  # drafters that are missing, and why

    @property
    def equal(self) -> bool:
        """Every answer is the plain step's."""
        return all(row.text for row in self.rows) and all(row.text for row in self.lengths)

    def __str__(self) -> str:
        names = list(dict.fromkeys(row.step for row in self.rows))
        lines = [
            f"{self.model}, {self.dtype}, {self.machine}, {self.threads} threads,"
            f" median of {self.rounds} interleaved rounds",
            *(f"  {name:<8} {STEPS[name][0]}" for name in names),
            *self.notes,
            "",
            "| task | step | tokens/step | tokens/s | speed-up | ttft ms | text |",
            "|---|---|---:|---:|---:|---:|---|",
        ]
        tasks = list(dict.fromkeys(row.task for row in self.rows))
        shown = [row for task in tasks for row in self.rows if row.task == task]
        for row in [*shown, *(self.totals if len(tasks) > 1 else ())]:
            lines.append(
                f"| {row.task} | {row.step} | {row.tokens_per_step:.2f} | {row.tokens_per_s:.1f}"
                f" | {row.speedup:.2f}x | {row.ttft_ms:.0f}"
                f" | {'equal' if row.text else 'differs'} |"
            )
        if self.lengths:
            lines += ["", *self._lengths()]
        if not self.equal:
            lines += ["", "texts differ from plain decoding: the speeds above mean nothing"]
        return "\n".join(lines)

    def _lengths(self) -> Iterator[str]:
        fixed = sorted({row.length for row in self.lengths} - {0})
        yield "tokens/s with a fixed number of drafts a step, everything on"
        yield "| task | adaptive | " + " | ".join(map(str, fixed)) + " | adaptive / best fixed |"
        yield "|---|---:|" + "---:|" * len(fixed) + "---:|"
        for task in dict.fromkeys(row.task for row in self.lengths):
            speed = {row.length: row.tokens_per_s for row in self.lengths if row.task == task}
            best = max(speed[n] for n in fixed)
            cells = " | ".join(f"{speed[n]:.1f}" for n in fixed)
            ratio = speed[0] / best if best else 0.0
            yield f"| {task} | {speed[0]:.1f} | {cells} | {ratio:.2f} |"


def prompts(task: str) -> list[str]:
    """The user messages of a task, in order."""
    files = sorted((PROMPTS / task).glob("*.md"))
    return [file.read_text(encoding="utf-8").strip() for file in files]


@dataclass(slots=True)
class _Tally:
    """Answers of one round: a step's, in one task."""

    prompts: int = 0
    tokens: int = 0
    decided: int = 0  # tokens and steps of the drafting record
    steps: int = 0
    timed: int = 0  # tokens after the first of each answer
    seconds: float = 0.0
    first: float = 0.0
    equal: bool = True
    sources: dict[str, int] = field(default_factory=dict)

    def enter(self, output: RequestOutput, text: Sequence[int]) -> None:
        [answer] = output.completions
        spec, timing = output.speculation, output.timing
        self.prompts += 1
        self.tokens += output.usage.completion_tokens
        self.decided += spec.tokens
        self.steps += spec.steps
        self.timed += output.usage.completion_tokens - 1
        self.seconds += timing.total - timing.first_token
        self.first += timing.first_token
        self.equal &= list(answer.token_ids) == list(text)
        self._sources(spec.accepted_by_source)

    def __add__(self, other: _Tally) -> _Tally:
        both = replace(self, sources=dict(self.sources), equal=self.equal and other.equal)
        for name in ("prompts", "tokens", "decided", "steps", "timed", "seconds", "first"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        both._sources(other.sources)
        return both

    def _sources(self, accepted: dict[str, int]) -> None:
        for name, count in accepted.items():
            self.sources[name] = self.sources.get(name, 0) + count

    @property
    def speed(self) -> float:
        return self.timed / self.seconds if self.seconds > 0 else 0.0


Rounds = list[_Tally]  # of one step in one task
Texts = dict[tuple[str, tuple[int, ...]], list[int]]  # plain answers by task and prompt


def measure(
    config: Config,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    rounds: int = 5,
    max_tokens: int | None = None,
    lengths: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Ladder:
    """Climb the ladder.

    Args:
        rounds: timed ones, after one that warms up.
        max_tokens: of an answer at most; None: what the task has.
        lengths: also compare with fixed numbers of drafts.
        progress: is told what happens now, a line each.
    """
    wrong = next((task for task in tasks if task not in TASKS), None)
    if wrong is not None or not tasks:
        raise ConfigError(f"there is no task {wrong!r}: give some of {', '.join(TASKS)}")
    asked = _encoded(config, tasks)
    most = {task: max_tokens or TASKS[task] for task in tasks}
    room = max(len(prompt) + most[task] for task, group in asked.items() for prompt in group)
    changes: dict[str, Any] = {"limits.seqs": 1}
    if not config.limits.context:
        changes["limits.context"] = -(-room // 64) * 64 + 64
    notes: list[str] = []
    climbers: dict[str, LLM] = {}
    for name, (_, settings) in STEPS.items():
        progress(f"loading the engine of step {name}")
        changes |= settings
        if changes["cache.prefix"]:  # there must be room for every prompt, not for one
            changes["limits.context"] = config.limits.context
        climbers[name] = LLM(config=override(config, changes), report=notes.append)
    first, *_, last = STEPS
    found = {(name, task): [_Tally() for _ in range(rounds)] for name in STEPS for task in tasks}
    texts: Texts = {}
    for n in range(-1, rounds):
        progress(f"round {n + 1} of {rounds}" if n >= 0 else "warming up")
        for task, prompt in _every(asked):
            outputs = {}
            for name in _turned(tuple(STEPS), max(n, 0)):
                if n < 0 and name != last and prompt is not asked[tasks[0]][0]:
                    continue  # one question warms an engine; only the cache must see them all
                params = _greedy(most[task] if n >= 0 else min(_WARM, most[task]))
                outputs[name] = climbers[name].generate(prompt, params)[0]
            if n >= 0:
                text = outputs[first].completions[0].token_ids
                texts[task, tuple(prompt)] = text
                for name, output in outputs.items():
                    found[name, task][n].enter(output, text)
    whole = {name: _together(found[name, task] for task in tasks) for name in STEPS}
    return Ladder(
        model=config.model,
        machine=platform.processor() or platform.machine(),
        threads=torch.get_num_threads(),
        dtype=str(memory.number_format(config)).removeprefix("torch."),
        rounds=rounds,
        rows=tuple(
            _row(name, task, found[name, task], found[first, task])
            for name in STEPS
            for task in tasks
        ),
        totals=tuple(_row(name, WHOLE, whole[name], whole[first]) for name in STEPS),
        lengths=_lengths(climbers[last], asked, texts, most, rounds, progress) if lengths else (),
        notes=tuple(dict.fromkeys(notes)),
    )


def _encoded(config: Config, tasks: Sequence[str]) -> dict[str, list[list[int]]]:
    """The prompts as token ids, in the checkpoint's chat template if it has one."""
    tokenizer, template = text_side(open_checkpoint(resolve(config.model)))
    if tokenizer is None:
        raise ConfigError(f"{config.model} has no tokenizer: the ladder asks with text")

    def encode(text: str) -> list[int]:
        if template is None:
            return tokenizer.encode(text, begin=True)
        return tokenizer.encode(template.render([{"role": "user", "content": text}]))

    return {task: [encode(text) for text in prompts(task)] for task in tasks}


def _greedy(most: int) -> SamplingParams:
    return replace(GREEDY, max_tokens=most, share=False)  # nothing is drafted from earlier rounds


def _every(asked: dict[str, list[list[int]]]) -> Iterator[tuple[str, list[int]]]:
    for task, group in asked.items():
        for prompt in group:
            yield task, prompt


def _turned(names: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """Everyone in turn is first."""
    n %= len(names)
    return names[n:] + names[:n]


def _together(parts: Iterable[Rounds]) -> Rounds:
    whole, *rest = parts
    for part in rest:
        whole = [a + b for a, b in zip(whole, part, strict=True)]
    return whole


def _row(step: str, task: str, rounds: Rounds, plain: Rounds) -> Row:
    last = rounds[-1]
    ratios = [a.speed / b.speed for a, b in zip(rounds, plain, strict=True) if b.speed]
    return Row(
        step=step,
        task=task,
        tokens=last.tokens,
        tokens_per_step=sum(r.decided for r in rounds) / max(1, sum(r.steps for r in rounds)),
        tokens_per_s=statistics.median(r.speed for r in rounds),
        ttft_ms=statistics.median(r.first / r.prompts for r in rounds) * 1e3,
        speedup=statistics.median(ratios) if ratios else 0.0,
        text=all(r.equal for r in rounds),
        accepted_by_source=last.sources,
    )


def _lengths(
    llm: LLM,
    asked: dict[str, list[list[int]]],
    texts: Texts,
    most: dict[str, int],
    rounds: int,
    progress: Callable[[str], None],
) -> tuple[LengthRow, ...]:
    """Fixed numbers of drafts against the adaptive one, on one engine."""
    scheduler = llm.engine.scheduler
    kept = scheduler.drafting
    if kept is None:
        raise ConfigError("nothing drafts, so there are no lengths to compare: turn a drafter on")
    lengths = (0, *(n for n in LENGTHS if n <= llm.engine.limits.drafts))
    found = {(n, task): [_Tally() for _ in range(rounds)] for n in lengths for task in asked}
    try:
        for r in range(-1, rounds):  # the first warms up
            progress(f"lengths, round {r + 1} of {rounds}" if r >= 0 else "lengths, warming up")
            for task, prompt in _every(asked):
                for n in _turned(lengths, max(r, 0)):
                    scheduler.drafting = replace(kept, fixed=n or None)
                    params = _greedy(most[task] if r >= 0 else min(_WARM, most[task]))
                    output = llm.generate(prompt, params)[0]
                    if r >= 0:
                        found[n, task][r].enter(output, texts[task, tuple(prompt)])
    finally:
        scheduler.drafting = kept
    named = {(n, task): tally for (n, task), tally in found.items()}
    if len(asked) > 1:
        for n in lengths:
            named[n, WHOLE] = _together(found[n, task] for task in asked)
    rows = []
    for (n, task), tallies in named.items():
        row = _row("", task, tallies, tallies)
        rows.append(LengthRow(n, task, row.tokens_per_step, row.tokens_per_s, row.text))
    return tuple(rows)


COLOURS = ("#9aa0a6", "#7cb5ec", "#4f81bd", "#2ca089", "#e39f2e", "#c0504d")


def picture(ladder: Ladder) -> str:
    """An SVG: a group of bars for each task, a bar for each step, tokens per second."""
    rows = [*ladder.rows, *(ladder.totals if len({r.task for r in ladder.rows}) > 1 else ())]
    steps = list(dict.fromkeys(row.step for row in rows))
    tasks = list(dict.fromkeys(row.task for row in rows))
    bar, gap, left, top, height = 22, 26, 52, 64, 260
    group = bar * len(steps) + gap
    width, foot = max(left + group * len(tasks) + 8, 560), top + height
    most = max((row.tokens_per_s for row in rows), default=0.0) or 1.0
    unit = _unit(most)

    def at(speed: float) -> float:
        return foot - speed / most * height

    def text(x: float, y: float, what: str, anchor: str = "middle", size: int = 11) -> str:
        return (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(what)}</text>"
        )

    title = (
        f"tokens/s, {ladder.model}, {ladder.dtype}, {ladder.machine}, {ladder.threads} threads,"
        f" median of {ladder.rounds} rounds; speed-up over plain"
    )
    parts: list[str] = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{foot + 30}"'
        f' viewBox="0 0 {width} {foot + 30}" font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{foot + 30}" fill="#fff"/>',
        text(8, 18, title, "start", 12),
    ]
    for i, step in enumerate(steps):
        at_step = left + i * 84
        parts.append(
            f'<rect x="{at_step}" y="28" width="12" height="12" fill="{COLOURS[i % len(COLOURS)]}"/>'
        )
        parts.append(text(at_step + 16, 38, step, "start"))
    for n in range(int(most / unit) + 1):
        y = at(n * unit)
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{width - 8}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(text(left - 6, y + 4, f"{n * unit:g}", "end"))
    speed = {(row.task, row.step): row for row in rows}
    for g, task in enumerate(tasks):
        x = left + g * group + gap / 2
        for i, step in enumerate(steps):
            row, y = speed[task, step], at(speed[task, step].tokens_per_s)
            parts.append(
                f'<rect x="{x + i * bar:.1f}" y="{y:.1f}" width="{bar - 3}"'
                f' height="{foot - y:.1f}" fill="{COLOURS[i % len(COLOURS)]}"/>'
            )
            if i:
                parts.append(text(x + i * bar + bar / 2 - 1, y - 3, f"{row.speedup:.1f}", size=9))
        parts.append(text(x + bar * len(steps) / 2, foot + 18, task, size=12))
    return "\n".join([*parts, "</svg>", ""])


def _unit(most: float) -> float:
    """A round distance of grid lines that gives a few of them."""
    power = 10.0 ** (len(f"{int(most)}") - 1)
    return next(u for u in (power / 5, power / 2, power, 2 * power) if most / u <= 6)
