"""Tokenizer and tokenized corpus.

`train_tokenizer` makes a byte-level BPE with Qwen's pre-split and control tokens. `tokenize` writes
``corpus.xz``: token ids of all documents as uint16, with kind and split of each document.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tools.train_demo.fetch import read_documents

# The split of Qwen3.5's tokenizer.json: contractions, words with one leading mark, single digits,
# punctuation runs, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
CONTROL = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
VOCAB = 8192
HELD_OUT_PERCENT = 2
KINDS = ("docs", "code")
# Of the training code, the share that is kept: the packages hold twice as much code as documentation.
CODE_SHARE_PERCENT = 85


def held_out(doc: dict[str, str]) -> bool:
    """Whether a document is kept from training: by a hash of its source and path."""
    return _bucket(doc, b"") < HELD_OUT_PERCENT


def _bucket(doc: dict[str, str], salt: bytes) -> int:
    """A number in 0..99 from a document's source and path."""
    digest = hashlib.sha1(salt + f"{doc['source']}/{doc['path']}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100


def train_tokenizer(texts: Iterator[str], vocab: int = VOCAB) -> Tokenizer:
    """A byte-level BPE of ``vocab`` ids in all; the control tokens are the last ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL) - len(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=32,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CONTROL])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"vocabulary of {tokenizer.get_vocab_size()}, not {vocab}: too little text"
        )
    return tokenizer


def tokenizer_config(context: int) -> dict[str, Any]:
    """``tokenizer_config.json`` beside the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "errors": "replace",
        "split_special_tokens": False,
        "unk_token": None,
    }


def write_tokenizer(work: Path, sample_bytes: int = 60_000_000) -> None:
    """Trains on a fair sample of the training documents and writes ``tokenizer.json``."""
    total = 0

    def texts() -> Iterator[str]:
        nonlocal total
        for i, doc in enumerate(read_documents(work)):
            if i % 2 == 0 and not held_out(doc) and total < sample_bytes:
                total += len(doc["text"])
                yield doc["text"]

    train_tokenizer(texts()).save(str(work / "tokenizer.json"))


@dataclass(frozen=True)
class Corpus:
    """Token ids ``[N]`` uint16, document bounds ``[D + 1]``, kind ``[D]`` and hold-out flag ``[D]``.

    ``bytes`` ``[D]`` is each document's length in UTF-8, for bits per byte.
    """

    ids: np.ndarray
    bounds: np.ndarray
    kind: np.ndarray
    out: np.ndarray
    bytes: np.ndarray

    def doc(self, index: int) -> np.ndarray:
        """Token ids of one document."""
        return self.ids[self.bounds[index] : self.bounds[index + 1]]

    def select(self, kind: str, out: bool) -> np.ndarray:
        """Indices of the documents of a kind and split."""
        return np.nonzero((self.kind == KINDS.index(kind)) & (self.out == out))[0]


def tokenize(work: Path) -> None:
    """Writes ``corpus.xz`` from ``documents.jsonl.xz`` and ``tokenizer.json``."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    ids: list[np.ndarray] = []
    kind, out, sizes = [], [], []
    batch: list[dict[str, str]] = []

    def flush() -> None:
        for doc, enc in zip(batch, tokenizer.encode_batch([d["text"] for d in batch]), strict=True):
            ids.append(np.array(enc.ids, np.uint16))
            kind.append(KINDS.index(doc["kind"]))
            out.append(held_out(doc))
            sizes.append(len(doc["text"].encode()))
        batch.clear()

    for doc in read_documents(work):
        if (
            doc["kind"] == "code"
            and not held_out(doc)
            and _bucket(doc, b"share") >= CODE_SHARE_PERCENT
        ):
            continue
        batch.append(doc)
        if len(batch) == 256:
            flush()
    flush()
    lengths = np.array([len(i) for i in ids], np.uint32)
    head = json.dumps({"documents": len(ids)}).encode()
    raw = b"".join(
        [
            len(head).to_bytes(4, "little"),
            head,
            lengths.tobytes(),
            np.array(kind, np.uint8).tobytes(),
            np.array(out, np.uint8).tobytes(),
            np.array(sizes, np.uint32).tobytes(),
            np.concatenate(ids).tobytes(),
        ]
    )
    filters = [
        {"id": lzma.FILTER_LZMA2, "preset": 4, "dict_size": 1 << 27, "lp": 1, "lc": 2, "pb": 1}
    ]
    (work / "corpus.xz").write_bytes(lzma.compress(raw, filters=filters))


def read_corpus(work: Path) -> Corpus:
    """The corpus written by `tokenize`."""
    raw = lzma.decompress((work / "corpus.xz").read_bytes())
    size = int.from_bytes(raw[:4], "little")
    count = json.loads(raw[4 : 4 + size])["documents"]
    at = 4 + size

    def take(dtype: type, n: int) -> np.ndarray:
        nonlocal at
        part = np.frombuffer(raw, dtype, n, at)
        at += part.nbytes
        return part

    lengths = take(np.uint32, count)
    kind, out = take(np.uint8, count), take(np.uint8, count).astype(bool)
    sizes = take(np.uint32, count)
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Corpus(take(np.uint16, int(bounds[-1])), bounds, kind, out, sizes)


class Chat:
    """Renders messages with the model's own template and turns them into ids."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def fail(message: str) -> None:
            raise ValueError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = fail
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        self.template = environment.from_string(template)
        self.tokenizer = tokenizer

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The prompt text; options as in the template (tools, add_generation_prompt, enable_thinking)."""
        return self.template.render(messages=messages, **options)

    def ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """The prompt's token ids."""
        return self.tokenizer.encode(self.render(messages, **options)).ids
