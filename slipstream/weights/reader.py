"""A checkpoint as names and tensors: safetensors directories, read lazily, every byte accounted for.

Owns the file format, the canonical tensor names and the record of what was read. Knows no model
and no quantization. Nothing found in a checkpoint is ever executed.

Sources: the safetensors format (an 8-byte little-endian header length, a JSON header with
``dtype``, ``shape`` and ``data_offsets`` per tensor, then the bytes) and the shard index
``model.safetensors.index.json`` of Hugging Face checkpoints.
"""

from __future__ import annotations

import difflib
import json
import math
import mmap
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

JSON_LIMIT = 2**28  # bytes of a config or an index
HEADER_LIMIT = 100_000_000  # bytes; the limit of the format's own reader

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_RENAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# What sampling values of generation_config.json may be.
_SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (-1, 1_000_000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
}
_UNUSED = (
    "model.visual.",
    "visual.",
    "model.vision_tower.",
    "vision_tower.",
    "model.vision_model.",
    "vision_model.",
    "model.multi_modal_projector.",
    "multi_modal_projector.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it stands; the text says what to do about it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor: what its header says, and how to get it."""

    shape: tuple[int, ...]
    stored: str  # number format on disk, as the file names it: "BF16", "I32", "Q4_K"
    nbytes: int  # on disk
    file: Path
    read: Callable[[], Tensor]


class Checkpoint:
    """An opened model source.

    Tensors come lazily; each is marked when read, so that `finish` can tell a checkpoint that was
    only half understood. Names are canonical: ``model.language_model.X`` and
    ``language_model.model.X`` are ``model.X``; vision and audio towers are left out.

    Attributes:
        path: the directory or file.
        config: the text model's config.json, flattened (``text_config`` over the top level).
        generation: generation_config.json, or empty.
        metadata: a GGUF file's key-value pairs, empty for a directory.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        entries: Mapping[str, Entry],
        generation: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.generation = generation or {}
        self.metadata = metadata or {}
        self._entries = dict(entries)
        self._used: set[str] = set()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._entries)} tensors)"

    @property
    def directory(self) -> Path:
        """Where files beside the weights (tokenizer, template) are."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def nbytes(self) -> int:
        """Bytes on disk of all tensors of the text model."""
        return sum(entry.nbytes for entry in self._entries.values())

    def names(self) -> frozenset[str]:
        """All canonical tensor names."""
        return frozenset(self._entries)

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """What the file says of a tensor, without marking it as read.

        Raises:
            CheckpointError: there is no such tensor.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise self._missing(name) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header.

        Raises:
            CheckpointError: there is no such tensor.
        """
        return self.entry(name).shape

    def expect(self, name: str, shape: Iterable[int]) -> None:
        """Check a tensor's shape before reading it.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        want, entry = tuple(shape), self.entry(name)
        if entry.shape != want:
            raise CheckpointError(
                f"{name} in {entry.file.name} has shape {list(entry.shape)} where the config asks for "
                f"{list(want)}: check that config.json belongs to these weights"
            )

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, shape: Iterable[int] | None = None
    ) -> Tensor:
        """Read a tensor and mark it as read.

        With ``dtype`` None the result may share memory with the file's private mapping: writing to
        it is harmless and never reaches the file.

        Raises:
            CheckpointError: it is missing (close names are suggested) or not of ``shape``.
        """
        if shape is not None:
            self.expect(name, shape)
        tensor = self.entry(name).read()
        self._used.add(name)
        return tensor if dtype is None else tensor.to(dtype)

    def skip(self, names: str | Iterable[str]) -> None:
        """Mark tensors as deliberately unread: those beginning with a prefix, or a list of names."""
        if isinstance(names, str):
            names = [name for name in self._entries if name.startswith(names)]
        self._used.update(names)

    def finish(self) -> None:
        """Call after loading.

        Raises:
            CheckpointError: a tensor was neither read nor skipped.
        """
        unread = sorted(self._entries.keys() - self._used)
        if unread:
            more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
            raise CheckpointError(
                f"{len(unread)} of {len(self._entries)} tensors in {self.path} were not understood: "
                f"{', '.join(unread[:5])}{more}; this architecture or storage format is not supported as it "
                f"stands, report it with the config.json"
            )

    def doubts(self, vocab: int) -> list[str]:
        """Settings beside the weights that are ignored because they make no sense, one sentence each.

        vocab: token ids of the model, to check end ids by.
        """
        found: list[str] = []
        for file, source in (
            ("generation_config.json", self.generation),
            ("config.json", self.config),
        ):
            ends = source.get("eos_token_id")
            for end in ends if isinstance(ends, list) else [ends]:
                if end is not None and not (type(end) is int and 0 <= end < vocab):
                    found.append(
                        f"eos_token_id {end!r:.40} in {file} is no id from 0 to {vocab - 1}: correct it"
                    )
        for key, (low, high) in _SAMPLING.items():
            value = self.generation.get(key)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and low <= value <= high):
                found.append(
                    f"{key} {value!r:.40} in generation_config.json is no number from {low} to {high} "
                    f"and is ignored: correct it"
                )
        method = self.config.get("quantization_config")
        method = method.get("quant_method") if isinstance(method, dict) else method
        if method not in (None, "compressed-tensors"):
            found.append(
                f"config.json says the weights are quantized by {method!r:.40}, which is not read; they "
                f"are taken as the tensors are stored: check that both belong together"
            )
        return found

    def _missing(self, name: str) -> CheckpointError:
        close = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.75)
        hint = f"the nearest are {', '.join(close)}" if close else "no name is close to it"
        return CheckpointError(
            f"{self.path} has no tensor {name} among its {len(self._entries)} ({hint}): "
            f"check that config.json belongs to these weights and that the download is complete"
        )


def canonical(name: str) -> str | None:
    """The name a tensor has here; None for towers that a text model does not use."""
    if name.startswith(_UNUSED):
        return None
    for old, new in _RENAMES:
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's config: ``text_config``, where it says anything, over the top level."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return dict(config)
    flat = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
    flat.update({k: v for k, v in text.items() if v is not None or k not in flat})
    return flat


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: not readable, not JSON, or not an object.
    """
    try:
        size = path.stat().st_size
        if not path.is_file() or size > JSON_LIMIT:
            raise CheckpointError(
                f"{path} has {size} bytes and is no JSON file of a checkpoint: download it again"
            )
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): check its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__} where a JSON object is needed: download it again"
        )
    return value


def open_directory(path: Path) -> Checkpoint:
    """Open a Hugging Face style directory: config.json and safetensors, sharded or not.

    ``mtp.*`` tensors are also found in files that the index does not list.

    Raises:
        CheckpointError: something is missing, truncated, corrupt or contradictory.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"there is no directory {path}: give the path of a downloaded checkpoint"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} has no config.json: give the directory that holds config.json and the weights"
        )
    config = flatten(read_json(path / "config.json"))
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}

    entries: dict[str, Entry] = {}
    listed, weight_map = _weight_files(path)
    holds: dict[str, str] = {}
    for file in listed:
        header = read_header(file)
        holds.update((name, file.name) for name, _ in header)
        _add(entries, header)
    for name, file_name in weight_map.items():
        if holds.get(name) != file_name and canonical(name) is not None:
            raise CheckpointError(
                f"{name} is not in {file_name}, where the index puts it: download that shard again"
            )
    if not any(name.startswith("mtp.") for name in entries):
        for file in sorted(set(path.glob("*.safetensors")) - set(listed)):
            _add(entries, [(n, e) for n, e in read_header(file) if n.startswith("mtp.")])
    return Checkpoint(path, config, entries, generation)


def _add(entries: dict[str, Entry], found: Iterable[tuple[str, Entry]]) -> None:
    for stored_name, entry in found:
        name = canonical(stored_name)
        if name is None:
            continue
        if name in entries:
            raise CheckpointError(
                f"{name} is in {entries[name].file.name} and again in {entry.file.name}: "
                f"remove the file that does not belong to {entry.file.parent}"
            )
        entries[name] = entry


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and where the index (if any) puts each tensor."""
    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        return _indexed(path, index)
    if not files:
        unsafe = sorted(
            f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".ckpt")
        )
        if unsafe:
            raise CheckpointError(
                f"{path} has its weights in {unsafe[0]}, a format that can run code when opened: "
                f"convert it to safetensors first (transformers: save_pretrained)"
            )
        raise CheckpointError(f"{path} has no .safetensors file: download the weights into it")
    single = path / "model.safetensors"
    if single in files:
        return [single], {}
    numbered = {f: m for f in files if (m := re.search(r"-(\d+)-of-(\d+)\.safetensors$", f.name))}
    if not numbered:
        return files, {}
    total = max(int(m[2]) for m in numbered.values())
    present = {int(m[1]) for m in numbered.values()}
    absent = [n for n in range(1, total + 1) if n not in present] if total <= 10_000 else [total]
    if absent:
        raise CheckpointError(
            f"{path} lacks shard {absent[0]} of {total} ({len(absent)} missing): download the rest"
        )
    return sorted(numbered), {}


def _indexed(path: Path, index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(
            f"{index} has no weight_map of tensor names to files: download it again"
        )
    files = []
    for name in sorted(set(weight_map.values())):
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not a .safetensors file beside it: download it again"
            )
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path} lacks the shard {name} that its index lists: download it into the directory"
            )
        files.append(path / name)
    return files, weight_map


class MappedFile:
    """A file's bytes, mapped on first use; private, so that writes never reach the file."""

    def __init__(self, file: Path, size: int) -> None:
        self.file, self.size = file, size
        self._map: mmap.mmap | None = None

    def bytes(self) -> mmap.mmap:
        """The mapping.

        Raises:
            CheckpointError: the file went away or shrank since it was opened.
        """
        if self._map is None:
            try:
                with self.file.open("rb") as f:
                    self._map = self._open(f.fileno())
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{self.file} cannot be mapped ({error}): check that it is still there and readable"
                ) from None
            if len(self._map) < self.size:
                raise CheckpointError(
                    f"{self.file} shrank from {self.size} to {len(self._map)} bytes after it was "
                    f"opened: wait until its download ends"
                )
        return self._map

    @staticmethod
    def _open(fileno: int) -> mmap.mmap:
        if platform.system() == "Linux":
            # Without NORESERVE, a file larger than the memory may be refused: the pages are
            # writable, and the kernel cannot know that nobody writes them.
            no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
            return mmap.mmap(
                fileno,
                0,
                flags=mmap.MAP_PRIVATE | no_reserve,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)


def view(source: MappedFile, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor at ``offset`` of a mapped file; no copy unless its bytes are misaligned."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(source.bytes(), dtype=dtype, count=count, offset=offset).view(shape)
    return tensor if offset % dtype.itemsize == 0 else tensor.clone()


def read_header(file: Path) -> list[tuple[str, Entry]]:
    """Names and entries of one safetensors file; every length and offset is checked.

    Raises:
        CheckpointError: the file is truncated, corrupt, or of an unsupported number format.
    """

    def bad(what: str) -> CheckpointError:
        return CheckpointError(f"{file} {what}: download it again")

    try:
        size = file.stat().st_size
        if not file.is_file():  # a pipe would be waited for without end
            raise CheckpointError(f"{file} is no regular file: copy the weights there")
        with file.open("rb") as f:
            prefix = f.read(8)
            if len(prefix) < 8:
                raise bad(f"has {size} bytes, too few for a safetensors header")
            length = int.from_bytes(prefix, "little")
            if length > HEADER_LIMIT or 8 + length > size:
                raise bad(f"announces a header of {length} bytes but has {size} bytes in all")
            text = f.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}): check its permissions"
        ) from None
    try:
        header = json.loads(text, object_pairs_hook=partial(_unique, file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise bad(f"has a header that is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise bad("has a header that is not a JSON object")

    source, start = MappedFile(file, size), 8 + length
    found: list[tuple[str, Entry]] = []
    extents: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _fields(fields, partial(_about, bad, name))
        extents.append((begin, end, name))
        if dtype not in DTYPES:
            if canonical(name) is None:
                continue
            raise CheckpointError(
                f"{name} in {file} is stored as {dtype}, which is not supported: "
                f"convert it to one of {', '.join(DTYPES)}"
            )
        need = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != need:
            raise bad(f"gives {name} {end - begin} bytes where {dtype} {list(shape)} takes {need}")
        if start + end > size:
            raise bad(f"is truncated: {name} ends at byte {start + end} of {size}")
        read = partial(view, source, DTYPES[dtype], start + begin, shape)
        found.append((name, Entry(shape, dtype, need, file, read)))
    _check_extents(extents, size - start, bad)
    return found


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{file} lists {twice} twice in its header: download it again")
    return table


def _about(bad: Callable[[str], CheckpointError], name: str, what: str) -> CheckpointError:
    return bad(f"gives {name} {what}")


def _fields(
    fields: object, bad: Callable[[str], CheckpointError]
) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(fields, dict):
        raise bad("no dtype, shape and data_offsets")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise bad("no dtype")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise bad(f"an impossible shape {shape!r:.60}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise bad(f"impossible data_offsets {offsets!r:.60}")
    begin, end = offsets
    if end < begin:
        raise bad(f"data_offsets that run backwards, {begin} to {end}")
    return dtype, tuple(shape), begin, end


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_extents(
    extents: list[tuple[int, int, str]], size: int, bad: Callable[[str], CheckpointError]
) -> None:
    """The format leaves no gaps and no overlaps: a file that does was cut or patched."""
    at, previous = 0, "the header"
    for begin, end, name in sorted(extents):
        if begin < at:
            raise bad(f"has {name} begin at byte {begin}, inside {previous} (which ends at {at})")
        if begin > at:
            raise bad(f"leaves {begin - at} bytes unexplained between {previous} and {name}")
        at, previous = end, name
    if at != size:
        what = "is truncated" if at > size else "is too long"
        raise bad(f"{what}: its tensors take {at} bytes and {size} follow the header")
