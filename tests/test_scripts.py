"""The set-up script says in one sentence what a machine lacks, and does nothing twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the script reads."""
    (tmp_path / "scripts").mkdir()
    for name in ("setup.sh", "run.sh", "cpu.txt"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    return tmp_path


def interpreter(clone: Path, script: str) -> str:
    """A stand-in for python3."""
    path = clone / "python-stand-in"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def set_up(clone: Path, python: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "scripts/setup.sh", "env"],
        cwd=clone,
        env={"PATH": "/usr/bin:/bin", "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_python_is_named(clone: Path) -> None:
    python = interpreter(clone, '[ "$1" = --version ] && echo Python 3.9.2 && exit; exit 1')
    done = set_up(clone, python)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.11, 3.12 or 3.13 is needed, found Python 3.9.2")
    assert not (clone / "env").exists()


def test_no_python_at_all(clone: Path) -> None:
    done = set_up(clone, "/nowhere/python3")
    assert done.returncode == 1
    assert "found no /nowhere/python3" in done.stderr


def test_a_missing_venv_module_names_its_package(clone: Path) -> None:
    python = interpreter(clone, f'case "$2" in *venv*) exit 1;; esac; exec {sys.executable} "$@"')
    done = set_up(clone, python)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this Python has no venv module: apt install python3-venv")


def test_a_failed_install_says_so_and_is_tried_again(clone: Path) -> None:
    """pip is told to use an index that is not there."""
    (clone / "env" / "bin").mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fake = clone / "env" / "bin" / "python"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && echo {version} && exit\n'
        "echo Failed to establish a new connection; exit 1\n"
    )
    fake.chmod(0o755)
    for _ in range(2):
        done = set_up(clone, sys.executable)
        assert done.returncode == 1
        assert done.stderr.rstrip().endswith("then try again")
        assert "package index cannot be reached" in done.stderr
        assert not (clone / "env" / "stamp").exists()


def test_what_is_up_to_date_is_left_alone(clone: Path) -> None:
    (clone / "env" / "bin").mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fake = clone / "env" / "bin" / "python"
    fake.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {version} || echo "$@" >> ran\n')
    fake.chmod(0o755)
    first, second = set_up(clone, sys.executable), set_up(clone, sys.executable)
    assert (first.returncode, second.returncode) == (0, 0)
    assert (first.stderr.count("\n"), second.stderr) == (1, "")
    assert (clone / "ran").read_text().count("\n") == 1
    (clone / "scripts" / "cpu.txt").write_text("torch==9\n")
    assert set_up(clone, sys.executable).stderr.count("\n") == 1
    assert (clone / "ran").read_text().count("\n") == 2
