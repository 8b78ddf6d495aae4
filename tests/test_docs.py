"""Whatever a user can set or call is documented, and the documents are true about the code."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import slipstream
from slipstream.cli import build
from slipstream.cli.settings import settings
from tools import docgen

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(text: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_reference_is_fresh() -> None:
    assert docgen.stale() == [], "run: python -m tools.docgen"


def test_every_setting_says_what_it_is() -> None:
    page = (docgen.REFERENCE / "settings.md").read_text(encoding="utf-8")
    for leaf in settings():
        assert len(leaf.help) > 10, leaf.path
        assert f"| `{leaf.path}` | `--{leaf.option}`" in page


def test_every_command_and_option_says_what_it_does() -> None:
    root: Any = get_command(build())
    for name, command in docgen._leaves(root):
        assert command.help, name
        for option in command.params:
            assert option.help, f"{name}: {option.name}"


def test_every_op_is_described() -> None:
    ops = list(docgen._functions("slipstream/kernels/__init__.py"))
    assert len(ops) > 8
    assert not [node.name for node in ops if not ast.get_docstring(node)]


def test_every_interface_is_described() -> None:
    tree = ast.parse((ROOT / "slipstream/engine/protocols.py").read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 3
    assert not [node.name for node in classes if not ast.get_docstring(node)]


def test_public_names_are_sorted_and_complete() -> None:
    source = (ROOT / "slipstream" / "__init__.py").read_text(encoding="utf-8")
    declared = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream.")
        for alias in node.names
    }
    # The order of ruff's RUF022: constants, then classes, then functions.
    order = sorted(slipstream.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))
    assert slipstream.__all__ == order
    assert set(slipstream.__all__) == declared == set(slipstream._HOME)


@pytest.mark.parametrize("name", slipstream.__all__)
def test_public_name_exists(name: str) -> None:
    value = getattr(slipstream, name)
    assert value.__name__ == name
    assert value.__doc__
    assert name in dir(slipstream)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = slipstream.nothing_here


def test_readme_begins_with_the_two_commands() -> None:
    first, second, *_ = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    for block, script in ((first, "scripts/run.sh"), (second, "scripts/test.sh")):
        assert block.count("\n") == 1, "one command, on one line"
        assert block.startswith(f"sh {script}")
        assert (ROOT / script).exists()


def test_ci_runs_the_commands_of_the_readme() -> None:
    source = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    given = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    for variable, block in (("first", given[0]), ("command", given[1])):
        [line] = [line for line in source.splitlines() if line.startswith(f"{variable}=")]
        told = subprocess.run(
            ["bash", "-c", f'{line}; printf %s "${variable}"'],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert told.stdout.strip() == block.strip()
        assert f'bash -c "${variable}"' in source


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    assert not broken_links(page.read_text(encoding="utf-8"), page)


def broken_links(text: str, page: Path) -> list[str]:
    """Links of a page to files, headings or names in code that are not there.

    A link [`Class.name`](file.py) claims that the file defines that name.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    broken = []
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (
            anchor and anchor not in anchors(file.read_text(encoding="utf-8"))
        ):
            broken.append(target)
        elif file.suffix == ".py" and label.startswith("`") and not defines(file, label.strip("`")):
            broken.append(f"{label} in {target}")
    return broken


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def defines(file: Path, dotted: str) -> bool:
    """Whether the file defines ``Class.method``, a class or a function of that name."""
    if dotted.endswith(".py"):
        return True  # the label is the file's own name
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in dotted.removesuffix("()").split("."):
        found = [node for node in body if part in titles_of(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def titles_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_broken_links_are_found() -> None:
    page = ROOT / "docs" / "x.md"
    assert broken_links("[a](none.md)", page)
    assert broken_links("[a](glossary.md#no-such-heading)", page)
    assert broken_links("[`Config.walk`](../slipstream/config.py)", page)
    assert not broken_links("[`Config.model`](../slipstream/config.py)", page)
    assert not broken_links("[a](glossary.md#glossary)", page)


def test_numbers_say_where_they_are_from() -> None:
    text = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        for word in ("command", "commit", "machine"):
            assert word in section.lower(), f"{title} does not give its {word}"


def test_log_has_the_newest_entry_first() -> None:
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    dates = re.findall(r"^## (\d{4}-\d{2}-\d{2})", text, re.MULTILINE)
    assert dates == sorted(dates, reverse=True)
