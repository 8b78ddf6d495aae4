"""``python -m tools.train_demo all --out DIR``: every step from packages to the shipped checkpoint.

Steps: fetch, tokenize, target, say, mtp, dflash, quantize, export, evaluate. Each goes on where it
stopped; training steps stop after ``--slice-seconds`` and save.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from tools.train_demo import corpus, train
from tools.train_demo.drafters import DraftConfig
from tools.train_demo.model import Config

STARTED = time.time()
ROOT = Path(__file__).parents[2]
STEPS = ("fetch", "tokenize", "target", "say", "mtp", "dflash", "quantize", "export", "evaluate")


def run(step: str, args: argparse.Namespace) -> bool:
    """Runs one step; False where a training slice ended before its stage did."""
    work: Path = args.out
    work.mkdir(parents=True, exist_ok=True)
    cfg, dcfg = Config(), DraftConfig()
    deadline = STARTED + args.deadline_seconds if args.deadline_seconds else None
    plans = {
        name: replace(plan, steps=args.steps or plan.steps, seed=args.seed + plan.seed - 1)
        for name, plan in (("target", train.TARGET), ("mtp", train.MTP), ("dflash", train.DFLASH))
    }
    if step == "fetch":
        from tools.train_demo.fetch import fetch

        if not (work / "documents.jsonl.xz").exists():
            fetch(work)
    elif step == "tokenize":
        if not (work / "tokenizer.json").exists():
            corpus.write_tokenizer(work)
        if not (work / "corpus.xz").exists():
            corpus.tokenize(work)
    elif step == "target":
        return train.train_target(
            work,
            plans["target"],
            cfg,
            args.slice_seconds,
            args.until,
            args.workers,
            args.suffix,
            deadline,
        )
    elif step == "say":
        train.say(work, cfg, args.rows)
    elif step == "mtp":
        return train.train_mtp(
            work, plans["mtp"], cfg, args.slice_seconds, workers=args.workers, deadline=deadline
        )
    elif step == "dflash":
        return train.train_dflash(
            work,
            plans["dflash"],
            cfg,
            dcfg,
            args.slice_seconds,
            workers=args.workers,
            deadline=deadline,
        )
    elif step == "quantize":
        from tools.train_demo.compress import compress

        compress(work, cfg, dcfg, args.calibration_rows)
    elif step == "export":
        from tools.train_demo.compress import export

        export(work, cfg, dcfg, args.shipped, args.master)
    elif step == "evaluate":
        from tools.train_demo.evaluate import Effort, evaluate

        both = {"bf16": args.master, "w4a16": args.shipped}
        folders = {name: both[name] for name in args.checkpoints.split(",")}
        effort = Effort(args.documents, args.copies, args.prompts, args.draft_steps)
        evaluate(work / args.result, work, folders, cfg, dcfg, set(args.measure.split(",")), effort)
    return True


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__)
    parser.add_argument("step", choices=("all", *STEPS))
    parser.add_argument(
        "--out", type=Path, required=True, help="working folder (corpus, states, logs)"
    )
    parser.add_argument(
        "--slice-seconds", type=float, default=1e9, help="stop a training stage after this long"
    )
    parser.add_argument(
        "--deadline-seconds",
        type=float,
        default=0,
        help="fit the stage's learning-rate schedule into this long from the start",
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="optimizer steps of the stage (default: the plan's)"
    )
    parser.add_argument(
        "--until", type=int, default=None, help="stop the target at this step of its plan"
    )
    parser.add_argument(
        "--suffix", default="", help="name of a repeated run, kept apart from the real one"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that make batches (0: none)"
    )
    parser.add_argument(
        "--rows", type=int, default=2048, help="rows that the target writes for its drafters"
    )
    parser.add_argument("--measure", default="bits,copy,draft", help="what evaluate measures")
    parser.add_argument("--checkpoints", default="bf16,w4a16", help="which ones evaluate measures")
    parser.add_argument(
        "--result", default="evaluation.json", help="file of --out for measurements"
    )
    parser.add_argument(
        "--documents", type=int, default=200, help="documents per kind for bits per byte"
    )
    parser.add_argument("--copies", type=int, default=8, help="documents per kind and size to copy")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per kind for the drafters")
    parser.add_argument("--draft-steps", type=int, default=48, help="speculative steps per prompt")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    parser.add_argument(
        "--calibration-rows", type=int, default=32, help="rows of 4,096 tokens for GPTQ"
    )
    parser.add_argument("--shipped", type=Path, default=ROOT / "slipstream" / "demo")
    parser.add_argument("--master", type=Path, default=ROOT / "models" / "demo-bf16")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    for step in STEPS if args.step == "all" else (args.step,):
        if not run(step, args):
            print(f"{step}: slice ended, run again to go on")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
