"""`slipstream doctor`: what this machine can do, and what is wrong with a checkpoint.

Every check gives one finding, and a check that breaks is itself a finding: this command is run
when things are broken. torch is imported inside the checks, because it may be what is broken.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.cli.settings import Debug

if TYPE_CHECKING:
    from slipstream.weights.reader import Checkpoint

Status = Literal["ok", "warn", "fail"]

GIB = 2**30
ROOM = 5 * GIB  # free disk below this is worth a warning: a small quantized model takes as much
OLDEST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies begin here

# What installs a C compiler and Python's headers, by the ID or ID_LIKE of /etc/os-release.
PACKAGES = {
    "debian": "apt-get install gcc python3-dev",
    "ubuntu": "apt-get install gcc python3-dev",
    "fedora": "dnf install gcc python3-devel",
    "rhel": "dnf install gcc python3-devel",
    "suse": "zypper install gcc python3-devel",
    "arch": "pacman -S gcc python",
    "alpine": "apk add gcc musl-dev python3-dev",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    detail: str


def machine() -> Iterator[Finding]:
    """What this machine can do."""
    for name, check in (
        ("python", _python),
        ("torch", _torch),
        ("cpu", _cpu),
        ("memory", _memory),
        ("gpu", _gpus),
        ("triton", _triton),
        ("c compiler", _compiler),
        ("disk", _disk),
    ):
        yield from _guarded(name, check)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        text = " ".join(str(error).split())
        ours = isinstance(error, ValueError) and type(error).__module__.startswith("slipstream.")
        yield Finding(name, "fail", text if ours else f"{type(error).__name__}: {text}")


def _python() -> Iterator[Finding]:
    good = (3, 11) <= sys.version_info < (3, 14)
    yield Finding(
        "python",
        "ok" if good else "warn",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        + ("" if good else ": this version is not tested, use 3.11 to 3.13"),
    )


def _torch() -> Iterator[Finding]:
    import torch

    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    else:
        build = f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
    yield Finding("torch", "ok", f"{torch.__version__}, built for {build}")


def _cpu() -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    capability = torch.backends.cpu.get_cpu_capability()
    slow = capability == "DEFAULT" and platform.machine() in ("x86_64", "AMD64")
    yield Finding(
        "cpu",
        "warn" if slow else "ok",
        f"{torch.get_num_threads()} threads on {usable} usable cores, instruction set {capability}"
        + (": without AVX2 a CPU is several times slower" if slow else ""),
    )


def free_memory() -> tuple[int, int]:
    """Bytes of host memory that are free and in all, within the limit of a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):  # counts what the system would give back
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and limit[0].isdigit() and int(limit[0]) < total:
        total = int(limit[0])
        free = min(free, total - int(used[0]) if used else total)
    return free, total


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _memory() -> Iterator[Finding]:
    free, total = free_memory()
    yield Finding(
        "memory",
        "ok" if free >= GIB else "warn",
        f"{_gib(free)} free of {_gib(total)}"
        + ("" if free >= GIB else ": close other programs before you load a model"),
    )


def _gpus() -> Iterator[Finding]:
    import torch

    driver = _driver()
    if not torch.cuda.is_available():
        if driver:
            yield Finding(
                "gpu",
                "fail",
                f"driver {driver} is loaded, but torch sees no GPU: install a CUDA build of torch "
                f"that this driver supports (this one is {torch.__version__})",
            )
        else:
            yield Finding("gpu", "ok", "none, models run on the CPU")
        return
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        capability = (about.major, about.minor)
        detail = (
            f"{about.name}, capability {about.major}.{about.minor}, driver {driver or 'unknown'}, "
            f"{_gib(free)} free of {_gib(total)}"
        )
        status: Status = "ok"
        if capability < OLDEST_CAPABILITY:
            status, detail = "warn", f"{detail}: kernels need capability 8.0, use --device cpu"
        elif free < total * 0.8:
            status, detail = "warn", f"{detail}: other programs hold {_gib(total - free)}"
        yield Finding(f"gpu {i}", status, detail)


def _driver() -> str:
    """The NVIDIA driver's version, empty if there is none."""
    for line in _lines("/proc/driver/nvidia/version"):
        if line.startswith("NVRM"):
            words = [word for word in line.split() if word[:1].isdigit() and "." in word]
            return words[0] if words else "of unknown version"
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    lines = asked.stdout.split()
    return lines[0] if asked.returncode == 0 and lines else ""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _triton() -> Iterator[Finding]:
    try:
        import triton
    except ImportError as error:
        needed = _has_gpu()
        yield Finding(
            "triton",
            "fail" if needed else "ok",
            f"cannot be imported ({error}): pip install triton"
            if needed
            else "not installed, and not needed without a GPU",
        )
    else:
        yield Finding("triton", "ok", str(triton.__version__))


def _compiler() -> Iterator[Finding]:
    """Triton compiles its launchers with a C compiler and Python's headers, when they first run."""
    bad: Status = "fail" if _has_gpu() else "warn"
    why = "Triton's launchers need one on a GPU"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        yield Finding("c compiler", bad, f"none found, and {why}: {_install()}")
        return
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").is_file():
        yield Finding(
            "c compiler",
            bad,
            f"{compiler} is there, but {headers} has no Python.h, and {why}: {_install()}",
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.c"
        source.write_text("#include <Python.h>\nint one(void) { return 1; }\n")
        command = [compiler, "-shared", "-fPIC", f"-I{headers}", str(source), "-o", f"{source}.so"]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if tried.returncode:
        error = next((line for line in tried.stderr.splitlines() if "error" in line), "no reason")
        yield Finding(
            "c compiler", bad, f"{compiler} cannot compile ({error.strip()}): {_install()}"
        )
    else:
        yield Finding("c compiler", "ok", f"{compiler}, with Python's headers")


def _install() -> str:
    """The command that installs what is missing here."""
    named = dict(line.split("=", 1) for line in _lines("/etc/os-release") if "=" in line)
    systems = f"{named.get('ID', '')} {named.get('ID_LIKE', '')}".replace('"', "").split()
    for system in systems:
        for known, command in PACKAGES.items():
            if system.startswith(known):
                return command
    return "install gcc and Python's development headers"


def _disk() -> Iterator[Finding]:
    from huggingface_hub import constants

    from slipstream.weights.sources import cache_directory

    seen: dict[str, int] = {}
    for name, folder in (
        ("disk", cache_directory()),
        ("disk, hub", Path(constants.HF_HUB_CACHE)),
    ):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(name, "fail", f"{folder} cannot be written: change its permissions")
        elif free not in seen.values() or name == "disk":
            seen[name] = free
            low = free < ROOM
            detail = f"{_gib(free)} free for {folder}" + (": too little for most models" * low)
            yield Finding(name, "warn" if low else "ok", detail)


def checkpoint(model: str) -> Iterator[Finding]:
    """What is wrong with a checkpoint."""
    from slipstream.weights.sources import open_checkpoint, resolve

    opened: list[Checkpoint] = []

    def files() -> Iterator[Finding]:
        path = resolve(model)
        yield Finding("files", "ok", str(path))
        opened.append(open_checkpoint(path))
        yield _weights(opened[0])

    yield from _guarded("files", files)
    if not opened:
        return
    made = opened[0]
    for name, check in (
        ("model", lambda: _family(made)),
        ("tensors", lambda: _tensors(made)),
        ("tokenizer", lambda: _tokenizer(made)),
        ("template", lambda: _template(made)),
        ("sampling", lambda: _sampling(made)),
        ("numbers", lambda: _numbers(made)),
        ("room", lambda: _room(model)),
    ):
        yield from _guarded(name, check)


def _weights(made: Checkpoint) -> Finding:
    formats = Counter(made.entry(name).stored for name in made.names())
    listed = ", ".join(f"{kind} {count}" for kind, count in formats.most_common())
    return Finding(
        "weights",
        "ok" if formats else "fail",
        f"{sum(formats.values())} tensors, {_gib(made.nbytes)} ({listed})"
        if formats
        else "no tensors: download the checkpoint again",
    )


def _family(made: Checkpoint) -> Iterator[Finding]:
    from slipstream.models import FAMILIES

    kind = made.config.get("model_type")
    known = isinstance(kind, str) and kind in FAMILIES
    layers, hidden, context = (
        made.config.get(key, "?")
        for key in ("num_hidden_layers", "hidden_size", "max_position_embeddings")
    )
    yield Finding(
        "model",
        "ok" if known else "fail",
        f"{kind}, {layers} layers of {hidden}, context {context}"
        if known
        else f"model_type {kind!r} is none of {', '.join(FAMILIES)}: use another checkpoint",
    )


def _tensors(made: Checkpoint) -> Iterator[Finding]:
    """All that is missing, of a wrong shape or unknown: loading would name the first only."""
    import torch

    from slipstream import models
    from slipstream.models.blocks import Outline
    from slipstream.weights.linear import Linear
    from slipstream.weights.reader import CheckpointError

    kind = made.config.get("model_type")
    if not isinstance(kind, str) or kind not in models.FAMILIES:
        return
    missing: list[str] = []
    wrong: list[str] = []
    names = made.names()

    class Survey(Outline):
        """Compares what a model would read with what the headers say."""

        def linear(self, modules: list[str], out: int, into: int) -> Linear:
            plain = [f"{module}.weight" for module in modules]
            if all(name in names for name in plain):
                shapes = [made.shape(name) for name in plain]
                fits = all(len(s) == 2 and s[1] == into for s in shapes)
                if not fits or sum(s[0] for s in shapes) != out:
                    listed = " and ".join(
                        f"{n} {list(s)}" for n, s in zip(plain, shapes, strict=True)
                    )
                    wrong.append(f"{listed}, not {[out, into]}")
            for module in modules:
                stored = [name for name in names if name.startswith(f"{module}.")]
                made.skip(stored)
                if not stored:
                    missing.append(f"{module}.weight")
            return super().linear(modules, out, into)

        def vector(self, name: str, shape: tuple[int, ...], add: float = 0.0) -> torch.Tensor:
            if name not in names:
                missing.append(name)
            else:
                made.skip([name])
                if made.shape(name) != shape:
                    wrong.append(f"{name} {list(made.shape(name))}, not {list(shape)}")
            return super().vector(name, shape, add)

    models.FAMILIES[kind](Survey(made, torch.float32, torch.device("cpu")))
    advice = "check that config.json belongs to these weights and that the download is complete"
    if missing:
        yield Finding("tensors", "fail", f"{len(missing)} missing: {_few(missing)}; {advice}")
    if wrong:
        yield Finding("tensors", "fail", f"{len(wrong)} of a wrong shape: {_few(wrong)}; {advice}")
    try:
        made.finish()
    except CheckpointError as error:
        yield Finding("tensors", "fail", str(error))
        return
    if not missing and not wrong:
        yield Finding("tensors", "ok", "all there, all of the right shape, none unknown")


def _tokenizer(made: Checkpoint) -> Iterator[Finding]:
    from slipstream.text.tokenizer import Tokenizer

    inside = made.metadata  # of a GGUF file, which carries its tokenizer and template
    tokenizer = Tokenizer.from_gguf(inside) if inside else Tokenizer.from_directory(made.directory)
    rows = made.config.get("vocab_size")
    detail = f"{tokenizer.vocab_size} tokens, {rows} rows in the model"
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        yield Finding(
            "tokenizer", "fail", f"{detail}: it belongs to another model, download its files again"
        )
    else:
        yield Finding("tokenizer", "ok", detail)
    if tokenizer.eos_ids:
        named = ", ".join(
            f"{id} {tokenizer.token_bytes(id).decode(errors='replace')}" for id in tokenizer.eos_ids
        )
        yield Finding("end tokens", "ok", named)
    else:
        yield Finding(
            "end tokens",
            "warn",
            "none: answers end at max_tokens only; add eos_token_id to generation_config.json",
        )


def _template(made: Checkpoint) -> Iterator[Finding]:
    from slipstream.text.template import Template

    inside = made.metadata
    template = Template.from_gguf(inside) if inside else Template.from_directory(made.directory)
    if template is None:
        yield Finding(
            "template", "warn", "none: chat needs one, run --raw and text completions do not"
        )
        return
    rendered = template.render([{"role": "user", "content": "Hello"}])
    can = [
        word
        for word, name in (
            ("thinking", "enable_thinking"),
            ("efforts", "reasoning_effort"),
            ("tools", "tools"),
        )
        if template.mentions(name)
    ]
    if "Hello" in rendered:
        yield Finding("template", "ok", "renders" + (f"; knows {', '.join(can)}" if can else ""))
    else:
        yield Finding(
            "template", "fail", "it renders a message without its text: give another template"
        )


def _sampling(made: Checkpoint) -> Iterator[Finding]:
    keys = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = [f"{k} {made.generation[k]}" for k in keys if made.generation.get(k) is not None]
    broken = [
        k
        for k in keys[1:]
        if isinstance(made.generation.get(k), float) and not math.isfinite(made.generation[k])
    ]
    yield Finding(
        "sampling",
        "fail" if broken else "ok",
        f"{', '.join(broken)} in generation_config.json is no number: correct it"
        if broken
        else ", ".join(given) or "greedy, the checkpoint says nothing else",
    )


def _numbers(made: Checkpoint) -> Iterator[Finding]:
    """Every value of the weights; loading does not look, since that takes as long as reading."""
    wrong: list[str] = []
    for name in sorted(made.names()):
        tensor = made.entry(name).read()
        if tensor.is_floating_point() and tensor.itemsize > 1:
            count = int((~tensor.isfinite()).sum())
            if count:
                wrong.append(f"{name} ({count} of {tensor.numel()})")
    yield Finding(
        "numbers",
        "fail" if wrong else "ok",
        f"NaN or infinite values in {_few(wrong)}: download the weights again"
        if wrong
        else "all weights are finite",
    )
    vocab = made.config.get("vocab_size")
    for doubt in made.doubts(vocab) if isinstance(vocab, int) else ():
        yield Finding("settings", "warn", doubt)


def _room(model: str) -> Iterator[Finding]:
    import torch

    from slipstream.config import Config, override
    from slipstream.engine.memory import plan_for

    plan = plan_for(model, override(Config(), {"model": model}))
    free = torch.cuda.mem_get_info()[0] if plan.device == "cuda" else free_memory()[0]
    detail = f"{_gib(plan.total)} with default settings on {plan.device}, {_gib(free)} free"
    if plan.total > free:
        yield Finding(
            "room",
            "fail",
            f"{detail}: lower limits.context or limits.seqs, or use a smaller or quantized model",
        )
    else:
        yield Finding("room", "ok", detail)


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(items[:3]) + more


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 2 else f"{count / 2**20:.0f} MiB"


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="Also look at this checkpoint: a directory, .gguf file, name or hub id."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Say what this machine can do, and what is wrong with a checkpoint.

    Exit code 1 if anything fails.
    """
    findings: list[Finding] = []
    for finding in _all(model):
        findings.append(finding)
        if not as_json:
            print(f"{finding.status:<5}{finding.check:<12} {finding.detail}", flush=True)
    failed = sum(finding.status == "fail" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(f) for f in findings]}))
    if failed:
        raise typer.Exit(1)


def _all(model: str | None) -> Iterator[Finding]:
    yield from machine()
    if model is not None:
        yield from checkpoint(model)
