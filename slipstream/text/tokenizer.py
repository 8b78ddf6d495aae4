"""Text to token ids and back, whole or piece by piece.

Owns the token table: every id stands for bytes, and text is the UTF-8 of the bytes joined. Knows
no chat format, no model and no weights file; GGUF metadata comes in as a plain mapping.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from slipstream.request import RequestError, TooLong

PROBE = "Hello, world! 123 äß 你好 🙂\n\tx = y"  # in NFC, as some tokenizers normalize to it

_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of GGUF

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS: Mapping[str, str] = {
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_PRE_TOKENIZERS = (*_WORDS, "smollm", "gpt-2", "default")


_CHARACTERS = 16  # a token rarely spells more


class TokenizerError(ValueError):
    """A tokenizer that cannot be used as it stands; the text says what to do about it."""


class _Decoding(NamedTuple):
    """How a vocabulary spells bytes."""

    byte_level: bool  # GPT-2's byte alphabet; else SentencePiece pieces with <0xAB> for bytes
    strip: bool  # the first space of a text is the pieces' own


class Tokenizer:
    """A vocabulary with its splitting rules.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the splitting.
        vocab_size: largest id + 1. A model may have more rows; those decode to nothing.
        special_ids: ids of control tokens, which `decode` leaves out.
        eos_ids: ids that end a text; the first is the usual one.
        bos_id: the id that begins a text, if there is one.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, eos_ids: Iterable[int] = (), bos_id: int | None = None
    ) -> None:
        """Take a backend as it is; `from_directory` and `from_gguf` make one.

        Raises:
            TokenizerError: an unknown way to spell bytes, or encoding and decoding a fixed string
                does not give it back.
        """
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self._decoding = _find_decoding(backend.decoder)
        self._added = {i: token.content.encode() for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self._bytes: list[bytes | None] = [None] * self.vocab_size  # filled as ids are met
        self._plain: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None
        wrong = [i for i in self.eos_ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise TokenizerError(
                f"the end token {wrong[0]} is not among the {self.vocab_size} tokens: "
                f"check that the tokenizer belongs to this model"
            )
        back = self.decode(self.encode(PROBE))
        if back != PROBE:
            raise TokenizerError(
                f"the tokenizer ({self.vocab_size} tokens) turns {PROBE!r} into {back!r}: "
                f"its files are incomplete, download them again"
            )

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """The tokenizer of a checkpoint directory: tokenizer.json and the configs beside it.

        End tokens come from generation_config.json, else config.json, else tokenizer_config.json.

        Raises:
            TokenizerError: no tokenizer.json, one that cannot be read, or a failed self-check.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            others = [
                n for n in ("tokenizer.model", "vocab.json", "tekken.json") if (path / n).is_file()
            ]
            if others:
                raise TokenizerError(
                    f"{path} has {others[0]} but no tokenizer.json: make one with transformers "
                    f"(AutoTokenizer.from_pretrained, then save_pretrained)"
                )
            raise TokenizerError(
                f"{path} has no tokenizer.json: download the tokenizer's files into it"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"{file} cannot be read ({error}): download it again, or update the tokenizers package"
            ) from None
        backend.no_truncation()
        backend.no_padding()
        settings = _read_object(path / "tokenizer_config.json")
        bos = _token_name(settings.get("bos_token"))
        return cls(
            backend,
            _end_ids(path, settings, backend),
            None if bos is None else backend.token_to_id(bos),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer inside a GGUF file, from its key-value pairs (byte-level BPE only).

        End tokens are the ones that the file names, then control tokens that are known to end a
        turn or a text by their names.

        Raises:
            TokenizerError: no vocabulary, another kind of tokenizer, an unknown pre-tokenizer, or
                a failed self-check.
        """
        kind, pre = (metadata.get(f"tokenizer.ggml.{k}") for k in ("model", "pre"))
        if kind != "gpt2":
            raise TokenizerError(
                f"the GGUF file has a tokenizer of kind {kind!r}, and only byte-level BPE ('gpt2') is read: "
                f"use the safetensors checkpoint with its tokenizer.json"
            )
        pre = "default" if pre is None else pre
        if pre not in _PRE_TOKENIZERS:
            raise TokenizerError(
                f"the GGUF file splits words by the rules {pre!r}, which are none of "
                f"{', '.join(_PRE_TOKENIZERS)}: use the safetensors checkpoint with its tokenizer.json"
            )
        tokens, merges, types = (
            _strings_or_ints(metadata, key, of)
            for key, of in (("tokens", str), ("merges", str), ("token_type", int))
        )
        if not tokens or not merges:
            raise TokenizerError(
                f"the GGUF file has {len(tokens)} tokens and {len(merges)} merges: convert it again with its vocabulary"
            )
        types = types or [1] * len(tokens)
        if len(types) != len(tokens):
            raise TokenizerError(
                f"the GGUF file has {len(tokens)} tokens but {len(types)} token types: convert it again"
            )
        vocab: dict[str, int] = {}
        for i, (token, kind_of) in enumerate(zip(tokens, types, strict=True)):
            if kind_of != _UNUSED:
                vocab.setdefault(token, i)
        try:
            pairs = [tuple(merge.split(" ", 1)) for merge in merges]
            backend = tokenizers.Tokenizer(
                models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
            )
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"the GGUF file's merges do not fit its tokens ({error}): convert it again"
            ) from None
        if pre.startswith("qwen"):
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _pre_tokenizer(pre)
        backend.decoder = decoders.ByteLevel()
        for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            chosen = [
                AddedToken(token, special=special, normalized=False)
                for token, kind_of in zip(tokens, types, strict=True)
                if kind_of == number
            ]
            (backend.add_special_tokens if special else backend.add_tokens)(chosen)

        def known(name: str) -> int | None:
            value = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return value if isinstance(value, int) and 0 <= value < len(tokens) else None

        bos = known("bos")
        if bos is not None and metadata.get("tokenizer.ggml.add_bos_token") is True:
            name = tokens[bos]
            backend.post_processor = processors.TemplateProcessing(
                single=[name, "$A"], pair=[name, "$A", name, "$B"], special_tokens=[(name, bos)]
            )
        ends = [known(name) for name in ("eos", "eot", "eom")]
        # The file names one end token, and chat models have several.
        ends += [vocab[n] for n in _ENDS if n in vocab and types[vocab[n]] == _CONTROL]
        return cls(backend, [end for end in ends if end is not None], bos)

    def encode(self, text: str, *, begin: bool = False, most: int | None = None) -> list[int]:
        """Ids of a text in which special tokens are meant, such as a rendered chat template.

        Args:
            begin: put the tokenizer's own first tokens (bos) in front, for a text without a
                template.
            most: tokens that there is room for. A text far too long is refused by its beginning,
                before seconds go into the rest of it; one a little too long is not.

        Raises:
            TooLong: it does not fit.
        """
        if most is not None and len(text) > _CHARACTERS * most:
            # Where it is cut, the last word may come apart into other tokens: so twice as many.
            head = len(self._ids(self.backend, text[: _CHARACTERS * most], begin))
            if head > 2 * most:
                raise TooLong(
                    f"the prompt has {len(text)} characters, and its first {_CHARACTERS * most} are"
                    f" {head} tokens where prompt and answer together may have {most}: shorten it"
                )
        return self._ids(self.backend, text, begin)

    @staticmethod
    def _ids(backend: tokenizers.Tokenizer, text: str, begin: bool) -> list[int]:
        """Ids of one text.

        The batch call lets other Python threads run meanwhile: a prompt of megabytes takes seconds
        and must not stop a server. Without offsets it takes half the time.

        Raises:
            RequestError: the text holds a lone surrogate, which no encoding of text has.
        """
        try:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=begin)[0].ids
        except TypeError:
            at = next((i for i, c in enumerate(text) if 0xD800 <= ord(c) < 0xE000), None)
            if at is None:
                raise
            raise RequestError(
                f"character {at} of the text is a lone surrogate, so it is no valid Unicode:"
                " decode its source as UTF-8"
            ) from None
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is special: ``<|im_end|>`` is ten characters."""
        if self._plain is None:
            self._plain = self._without_added()
        plain, ids = self._plain
        return [ids.get(i, i) for i in self._ids(plain, text, False)]

    def _without_added(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same model without added tokens, and its own numbers for those that stay."""
        plain = tokenizers.Tokenizer(self.backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self.backend, part) is not None:
                setattr(plain, part, getattr(self.backend, part))
        # Runs of spaces are ordinary text that some vocabularies keep among the added tokens.
        added = self.backend.get_added_tokens_decoder().items()
        spaces = {i: token for i, token in added if not token.content.strip()}
        plain.add_tokens(list(spaces.values()))
        numbers = {plain.token_to_id(token.content): i for i, token in spaces.items()}
        return plain, {theirs: ours for theirs, ours in numbers.items() if theirs is not None}

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. Bytes that are not UTF-8 become U+FFFD; ids beyond the vocabulary nothing."""
        text = Incremental(self, skip_special=skip_special)
        return text.feed(ids) + text.finish()

    def token_bytes(self, token: int) -> bytes:
        """What one id stands for, special or not; empty if the vocabulary does not have it."""
        if not 0 <= token < self.vocab_size:
            return b""
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, ``<|im_end|>``; None if there is none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        name = self.backend.id_to_token(token)
        if name is None:
            return b""
        if self._decoding.byte_level:
            try:
                return bytes(_BYTE_OF[c] for c in name)
            except KeyError:  # not in the byte alphabet: a token that was written as plain text
                return name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes([int(name[3:5], 16)])
            except ValueError:
                return name.encode()
        return name.replace("▁", " ").encode()


class Incremental:
    """Decodes a growing sequence of ids; what it has returned never changes.

    However ids are cut into feeds, the pieces joined with `finish` are `Tokenizer.decode` of all:
    bytes of an unfinished character wait (at most 3) for those that complete it. Work per token is
    constant.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer._decoding.strip

    def feed(self, ids: Iterable[int]) -> str:
        """The text that became final with these ids."""
        spell = self._tokenizer.token_bytes
        new = b"".join(spell(i) for i in ids if i not in self._skipped)
        return self._first(self._utf8.decode(new))

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character is incomplete, else nothing."""
        return self._first(self._utf8.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF: Mapping[str, int] = _byte_alphabet()


def _find_decoding(decoder: decoders.Decoder | None) -> _Decoding:
    """What the decoder section of a tokenizer.json does, if it is one of the two usual kinds."""
    steps = _flatten(None if decoder is None else json.loads(decoder.__getstate__()))
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _Decoding(byte_level=True, strip=False)
    for step in steps:
        pattern = (
            (step.get("pattern") or {}).get("String") if step.get("type") == "Replace" else None
        )
        if pattern == "▁":
            strip = any(s.get("type") == "Strip" and s.get("start") for s in steps)
            return _Decoding(byte_level=False, strip=strip)
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return _Decoding(byte_level=False, strip=scheme != "never")
    raise TokenizerError(
        f"the tokenizer decodes by {', '.join(map(str, kinds)) or 'nothing'}, and only byte-level and "
        f"SentencePiece vocabularies are read: report the model"
    )


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _flatten(part)]
    return [decoder]


def _pre_tokenizer(pre: str) -> Any:
    """The word splitting that a GGUF file names; each regex is the published one of its family."""
    if pre in _WORDS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "default":
        # What llama.cpp does for files whose converter did not know the vocabulary's own rules.
        rules = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
        return pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in rules),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _strings_or_ints(metadata: Mapping[str, Any], key: str, of: type) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}") or []
    if not isinstance(values, list) or not all(isinstance(value, of) for value in values):
        raise TokenizerError(
            f"tokenizer.ggml.{key} in the GGUF file is not a list of {of.__name__}: convert it again"
        )
    return values


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not JSON ({error}): download it again") from None
    return value if isinstance(value, dict) else {}


def _token_name(value: Any) -> str | None:
    """A token in tokenizer_config.json is a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _end_ids(
    path: Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer
) -> Sequence[int]:
    config = _read_object(path / "config.json")
    text = config.get("text_config")
    for source in (_read_object(path / "generation_config.json"), text, config):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        ids = value if isinstance(value, list) else [value]
        found = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
        if found:
            return found
    name = _token_name(settings.get("eos_token"))
    end = None if name is None else backend.token_to_id(name)
    return [] if end is None else [end]
