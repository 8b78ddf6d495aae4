"""The shape of the code: who may import whom, what may not occur where, what may be called what."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "slipstream"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room may import rooms to its left. `config` and `request` are plain data below all of them.
ORDER = ("config", "request", "kernels", "weights", "models", "draft", "engine", "llm", "server")
TOP = ("bench", "cli", "__main__", "__init__")  # may import anything
# `text` stands beside: it may read what a checkpoint file says about its tokenizer.
TEXT_MAY = {"config", "request", "text", "weights"}
MAY_USE_TEXT = {"text", "llm", "server", *TOP}

# Reading a tensor back to the host stalls a GPU. Files that may, and why.
READBACK = {
    "kernels/reference.py": "the definition: clarity before speed",
    "kernels/cpu.py": "the CPU's own form: nothing to stall",
    "engine/engine.py": "readback: the one wait of a step",
    "engine/examine.py": "before the first request, and to wait for what it times",
    "draft/lookup.py": "its index lives on the host; it reads a few integers a step",
    "draft/fuse.py": "asks lookup to continue another drafter's block",
}
HOT_ROOMS = ("kernels", "models", "draft", "engine")
ENVIRONMENT = ("__main__.py", "cli/", "weights/sources.py")
BANNED_WORDS = {"manager", "handler", "helper", "util", "utils", "impl", "wrapper"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Absolute names of the modules that a file imports, anywhere in it, with their lines."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (parent, node.module) if part)
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def order_faults(tree: ast.AST, path: Path) -> list[str]:
    here = room(path)
    faults = []
    for line, module in imports(tree, path):
        parts = module.split(".")
        if parts[0] != "slipstream" or len(parts) < 2 or here in TOP:
            continue
        there = parts[1]
        if there not in (*ORDER, *TOP, "text"):
            continue  # a name of slipstream/__init__.py, such as __version__
        if here == "text":
            good = there in TEXT_MAY
        elif there == "text":
            good = here in MAY_USE_TEXT
        elif there in TOP:
            good = False
        else:
            good = ORDER.index(there) <= ORDER.index(here)
        if not good:
            faults.append(f"{name(path)}:{line} imports {module}")
    return faults


def torch_faults(tree: ast.AST, path: Path) -> list[str]:
    return [
        f"{name(path)}:{line} imports {module}"
        for line, module in imports(tree, path)
        if module.split(".")[0] == "torch"
    ]


def readback_faults(tree: ast.AST, path: Path) -> list[str]:
    return [
        f"{name(path)}:{node.lineno} calls .{node.func.attr}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("item", "tolist", "cpu")
        and not node.args
    ]


def environment_faults(tree: ast.AST, path: Path) -> list[str]:
    return [
        f"{name(path)}:{node.lineno} reads the environment"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("environ", "getenv", "environb")
    ]


def word_faults(tree: ast.AST, path: Path) -> list[str]:
    named = [(1, path.stem)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named.append((node.lineno, node.name))
    return [
        f"{name(path)}:{line} {title} has a word that says nothing"
        for line, title in named
        if BANNED_WORDS & set(words(title))
    ]


def words(title: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", title)]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_room_has_its_place() -> None:
    rooms = {room(path) for path in FILES} - {"text"}
    assert rooms <= {*ORDER, *TOP}, "a new room: give it its place in ORDER"


def test_rooms_import_leftwards() -> None:
    assert not [fault for path in FILES for fault in order_faults(parse(path), path)]


def test_no_tensor_where_none_belongs() -> None:
    files = [p for p in FILES if room(p) in ("server", "cli", "text", "config", "request")]
    files += [PACKAGE / "engine" / "scheduler.py"]
    assert not [f for path in files if path.exists() for f in torch_faults_at_top(path)]


def torch_faults_at_top(path: Path) -> list[str]:
    """`doctor` may import torch inside its command; elsewhere it is not imported at all."""
    tree = parse(path)
    if room(path) == "cli":
        tree = ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef)], [])
    return torch_faults(tree, path)


def test_tensors_stay_on_the_device() -> None:
    files = [path for path in FILES if room(path) in HOT_ROOMS and name(path) not in READBACK]
    assert not [fault for path in files for fault in readback_faults(parse(path), path)]
    assert all((PACKAGE / entry).exists() for entry in READBACK), "a stale entry in READBACK"


def test_the_environment_is_read_in_few_places() -> None:
    files = [path for path in FILES if not name(path).startswith(ENVIRONMENT)]
    assert not [fault for path in files for fault in environment_faults(parse(path), path)]


def test_names_say_something() -> None:
    assert not [fault for path in FILES for fault in word_faults(parse(path), path)]


def test_no_isinstance_on_drafters() -> None:
    found = [
        f"{name(path)}: {match.group()}"
        for path in FILES
        for match in re.finditer(r"isinstance\([^)]*Drafter", path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("where", "code", "check"),
    [
        ("models/m.py", "from slipstream.engine.batch import Sequence", order_faults),
        ("models/m.py", "from ..engine import batch", order_faults),
        ("kernels/k.py", "def f():\n    import slipstream.weights.reader", order_faults),
        ("engine/e.py", "from slipstream.cli import build", order_faults),
        ("text/t.py", "from slipstream.models import llama", order_faults),
        ("draft/d.py", "from slipstream.text import stream", order_faults),
        ("server/s.py", "from torch import Tensor", torch_faults),
        ("engine/e.py", "n = int(count.item())", readback_faults),
        ("engine/e.py", "os.environ['X']", environment_faults),
        ("engine/e.py", "class CacheManager: pass", word_faults),
        ("engine/e.py", "def _fill_helper(): pass", word_faults),
        ("engine/batch_utils.py", "", word_faults),
    ],
)
def test_the_checks_can_fail(where: str, code: str, check) -> None:
    assert check(ast.parse(code), PACKAGE / where)


def test_no_large_file_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / entry for entry in listed.stdout.split("\0") if entry]
    large = [p for p in paths if p.exists() and p.stat().st_size > 25 * 2**20]
    assert not large
