"""Write docs/reference/ from the code: settings, commands, ops, interfaces, sampling parameters.

    python -m tools.docgen            write the pages
    python -m tools.docgen --check    exit 1 and name the pages that are stale

Source is read, not imported, wherever comments are part of the documentation; no page needs torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from slipstream.cli import build
from slipstream.cli.settings import PANEL, settings

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """File name in docs/reference -> its text."""
    made = {
        "settings.md": _settings(),
        "commands.md": _commands(),
        "ops.md": _ops(),
        "interfaces.md": _interfaces(),
        "sampling.md": _sampling(),
    }
    return {name: f"<!-- written by tools/docgen.py -->\n\n{text}" for name, text in made.items()}


def stale() -> list[str]:
    """Names of pages whose file differs from what the code says, or that nothing writes."""
    wanted = pages()
    found = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")}
    return sorted(name for name in wanted | found if wanted.get(name) != found.get(name))


def _settings() -> str:
    rows = [
        "# Settings\n",
        "Every setting, as a dotted name. In a TOML file for `--config`, the part before the dot",
        "is a table; in Python, `LLM(model, limits__seqs=4)` sets `limits.seqs`.\n",
        "| setting | option | type | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for leaf in settings():
        option = f"--{leaf.option}"
        if leaf.hint is bool:
            option += f"` / `--no-{leaf.option}"
        rows.append(
            f"| `{leaf.path}` | `{option}` | {_type(leaf.hint)} | `{_literal(leaf.default)}` "
            f"| {_cell(leaf.help)} |"
        )
    return "\n".join(rows) + "\n"


def _commands() -> str:
    root: Any = get_command(build())
    parts = [
        "# Commands\n",
        "`slipstream COMMAND --help` prints the same. Commands that load a model also take every",
        "option of [settings](settings.md) and `--config FILE`.\n",
        "Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted. An error is one",
        "line on standard error; `--debug` adds the traceback.",
    ]
    for name, command in _leaves(root):
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([f"slipstream {name}", *(p.name.upper() for p in arguments)])
        parts += [f"\n## {name}\n", f"`{usage} [OPTIONS]`\n", _prose(command.help)]
        rows = []
        for option in command.params:
            if getattr(option, "rich_help_panel", None) == PANEL:
                continue
            if option.param_type_name == "argument":
                rows.append(f"| `{option.name.upper()}` | {_cell(option.help)} |")
            else:
                shown = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
                rows.append(f"| {shown} | {_cell(option.help)} |")
        if rows:
            parts += ["\n| argument or option | meaning |", "|---|---|", *rows]
    return "\n".join(parts) + "\n"


def _leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Commands with their full names, those of groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _ops() -> str:
    parts = [
        "# Ops\n",
        "The whole kernel surface, `slipstream.kernels`. CPU tensors go to the plain torch",
        "definition or its faster CPU form. The records named in the signatures are in",
        "`slipstream/kernels/types.py`.",
    ]
    for node in _functions("slipstream/kernels/__init__.py"):
        parts += [f"\n## {node.name}\n", "```python", _signature(node), "```\n", _docstring(node)]
    return "\n".join(parts) + "\n"


def _interfaces() -> str:
    path = "slipstream/engine/protocols.py"
    parts = [
        "# Interfaces\n",
        f"Every interface of the engine, from `{path}`. They are implemented by shape: nothing",
        "inherits from them.",
    ]
    source = (ROOT / path).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            text = ast.get_source_segment(source, node) or ""
            parts += [f"\n## {node.name}\n", "```python", text, "```"]
    return "\n".join(parts) + "\n"


def _sampling() -> str:
    path = "slipstream/request.py"
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.splitlines()
    [node] = [
        item
        for item in ast.parse(source).body
        if isinstance(item, ast.ClassDef) and item.name == "SamplingParams"
    ]
    parts = [
        "# Sampling parameters\n",
        "`slipstream.SamplingParams`.\n",
        _docstring(node),
        "\n| field | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = ast.unparse(item.value) if item.value else ""
            default = "{}" if default == "field(default_factory=dict)" else default
            comment = lines[(item.end_lineno or item.lineno) - 1].partition("  # ")[2]
            parts.append(
                f"| `{item.target.id}` | `{_cell(ast.unparse(item.annotation))}` | `{default}` "
                f"| {_cell(comment)} |"
            )
    return "\n".join(parts) + "\n"


def _functions(path: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    line = f"{node.name}({arguments}){returns}"
    if len(line) <= 92:
        return line
    return f"{node.name}(\n    {arguments}\n){returns}"


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _prose(text: str | None) -> str:
    return (text or "").replace("\x0c", "").strip()


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _literal(value: Any) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    return str(getattr(hint, "__name__", hint))


def main() -> int:
    """Write or check the pages; the exit code."""
    if sys.argv[1:] == ["--check"]:
        names = stale()
        for name in names:
            print(f"docs/reference/{name} is stale: run python -m tools.docgen")
        return 1 if names else 0
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name in stale():
        (REFERENCE / name).unlink(missing_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
