"""Draws the training curves of the CSV logs as one SVG picture."""

from __future__ import annotations

import csv
import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 330, 220, 44, 34
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#0e7490", "#57606a")


def _panel(
    title: str, rows: list[dict[str, str]], columns: list[str], x0: int, log: bool
) -> list[str]:
    steps = [float(r["step"]) for r in rows]
    series = {c: [float(r[c]) for r in rows] for c in columns}
    scale = (lambda v: math.log10(max(v, 1e-4))) if log else (lambda v: v)
    values = [scale(v) for s in series.values() for v in s if v > 0 or not log]
    low, high = min(values), max(values)
    low, high = (math.floor(low), math.ceil(high)) if log else (0.0, max(1.0, high))

    def place(step: float, value: float) -> str:
        x = x0 + LEFT + (WIDTH - LEFT - 10) * step / steps[-1]
        y = TOP + (HEIGHT - TOP - 28) * (1 - (scale(value) - low) / (high - low))
        return f"{x:.1f},{min(max(y, TOP), HEIGHT - 28):.1f}"

    out = [f'<text x="{x0 + LEFT}" y="16" font-weight="bold">{title}</text>']
    ticks = range(int(low), int(high) + 1) if log else [i / 5 for i in range(6)]
    for tick in ticks:
        shown = 10.0**tick if log else tick
        at = place(0, shown).split(",")[1]
        out.append(
            f'<line x1="{x0 + LEFT}" x2="{x0 + WIDTH - 10}" y1="{at}" y2="{at}" stroke="#d0d7de"/>'
        )
        out.append(
            f'<text x="{x0 + LEFT - 5}" y="{float(at) + 4}" text-anchor="end">{shown:g}</text>'
        )
    out.append(
        f'<text x="{x0 + WIDTH - 10}" y="{HEIGHT - 12}" text-anchor="end">step {steps[-1]:.0f}</text>'
    )
    for i, (name, line) in enumerate(series.items()):
        points = " ".join(place(s, v) for s, v in zip(steps, line, strict=True))
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.4"/>'
        )
        out.append(f'<text x="{x0 + LEFT + 4 + 62 * i}" y="29" fill="{COLOURS[i]}">{name}</text>')
    return out


def draw(runs: Path, path: Path) -> None:
    """One panel for each of target (losses in nats), MTP and DFlash2 (overlap with the target)."""
    panels = []
    for i, (stage, title, columns, log) in enumerate(
        (
            ("target", "Target: loss (nats a token)", ["plain", "chat", "copied"], True),
            ("mtp", "MTP: overlap with the target", ["overlap1", "overlap2", "overlap3"], False),
            (
                "dflash",
                "DFlash2: overlap with the target",
                ["overlap1", "overlap3", "overlap5", "overlap7"],
                False,
            ),
        )
    ):
        with open(runs / f"{stage}.csv", newline="") as handle:
            rows = [r for r in csv.DictReader(handle) if int(r["step"]) >= 5]
        panels += _panel(title, rows, columns, i * WIDTH, log)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(panels)
        + "</svg>\n"
    )
