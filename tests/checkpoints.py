"""Tiny checkpoints that are whole: weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(path: Path, config: dict[str, Any] = tiny.LLAMA) -> Path:
    """A checkpoint of 257 tokens, the last of which ends a text."""
    tiny.write(path, config, vocab_size=300, eos_token_id=256)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
