"""Tokens and text: nothing lost or changed, however the pieces are cut."""

from __future__ import annotations

import datetime
import json
import lzma
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from slipstream.request import RequestError, TooLong
from slipstream.text.stop import StopStrings
from slipstream.text.template import Template, TemplateError, normalize
from slipstream.text.tokenizer import _BYTE_OF, PROBE, Incremental, Tokenizer, TokenizerError
from tests.shared import shared

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 12345 67",
    "ภาษาไทยเป็นภาษาที่มีระดับเสียง",
    "今天天气很好，我们去公园散步吧。",
    "👩‍👩‍👧‍👦 🙂 ñ é e\u0301 \u1100\u1161 🇩🇪",
    "def f(x):\n    return x ** 2\n\n\tprint(f(3))",
]


@cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE: every byte a token, merges that cut characters, special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(
        [AddedToken("<|im_end|>", special=True), AddedToken("<|bos|>", special=True)]
    )
    backend.add_tokens(["<think>", "    ", "<｜é｜>"])
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<|im_end|>")])


def test_a_text_far_too_long_is_refused_by_its_beginning() -> None:
    tokenizer = byte_level()
    text = "The quick brown fox. " * 100_000
    begin = time.perf_counter()
    with pytest.raises(TooLong, match=r"2100000 characters.* 1600 are .* may have 100"):
        tokenizer.encode(text, most=100)
    assert time.perf_counter() - begin < 0.2
    # Characters alone say nothing: runs of spaces are few tokens.
    spaces = " " * 4000
    assert tokenizer.encode(spaces, most=len(tokenizer.encode(spaces))) == tokenizer.encode(spaces)
    # A little too long is the caller's to say, with the exact number.
    assert len(tokenizer.encode(text[:1000], most=70)) > 70


@cache
def pieces() -> Tokenizer:
    """A SentencePiece-like vocabulary with byte fallback, as Llama 2 and Gemma have."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ("▁", "H", "e", "l", "o", "▁Hello", "▁world", "x", ",", "!", "1", "2", "3", "é"):
        vocab.setdefault(piece, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


VOCABULARIES = [byte_level, pieces]


@st.composite
def cut(draw: st.DrawFn, values: Any) -> list[Any]:
    """The same values in some number of pieces, empty ones among them."""
    places = sorted(draw(st.lists(st.integers(0, len(values)), max_size=12)))
    return [values[a:b] for a, b in zip([0, *places], [*places, len(values)], strict=True)]


# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", VOCABULARIES)
@settings(max_examples=300)
@given(data=st.data())
def test_pieces_make_the_whole(make: Any, data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    incremental = Incremental(tokenizer, skip_special=skip)
    parts = [incremental.feed(piece) for piece in data.draw(cut(ids))]
    assert "".join(parts) + incremental.finish() == tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=300)
@given(data=st.data())
def test_decoding_is_the_librarys(data: st.DataObject) -> None:
    tokenizer = byte_level()
    # All but one added token: the library reads its é as a byte of its alphabet.
    odd = tokenizer.token_id("<｜é｜>")
    number = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i != odd)
    ids = data.draw(st.lists(number, max_size=40))
    skip = data.draw(st.booleans())
    assert tokenizer.decode(ids, skip_special=skip) == tokenizer.backend.decode(
        ids, skip_special_tokens=skip
    )


@given(text=st.text(max_size=60) | st.sampled_from(CORPUS))
def test_a_text_comes_back_token_by_token(text: str) -> None:
    for encode in (byte_level().encode, byte_level().encode_plain):
        incremental = Incremental(byte_level(), skip_special=False)
        parts = [incremental.feed([i]) for i in encode(text)]
        assert "".join(parts) == text
        assert incremental.finish() == ""
        # U+FFFD may only be one that the text has itself.
        assert "".join(parts).count("\ufffd") == text.count("\ufffd")


def test_bytes_wait_for_their_character() -> None:
    tokenizer = byte_level()
    spelled = {b: tokenizer.token_id(c) for c, b in _BYTE_OF.items()}
    incremental = Incremental(tokenizer)
    smile = "🙂".encode()
    assert [incremental.feed([spelled[b]]) for b in smile] == ["", "", "", "🙂"]
    assert incremental.feed([spelled[smile[0]]]) == ""
    assert incremental.feed([spelled[0x41]]) == "\ufffdA"  # the character never came
    assert incremental.feed([spelled[0x80]]) == "\ufffd"  # nor did this one begin
    assert incremental.feed([spelled[b] for b in smile[:3]]) == ""
    assert incremental.finish() == "\ufffd"
    assert incremental.finish() == ""


def test_work_per_token_is_constant() -> None:
    """Counts calls into the interpreter's C and Python functions, not seconds."""
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂 word ภาษา " * 300)
    incremental = Incremental(tokenizer)
    incremental.feed(ids)  # all spellings are known from here on

    def events(part: list[int]) -> int:
        count = 0

        def see(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(see)
        try:
            for i in part:
                incremental.feed([i])
        finally:
            sys.setprofile(None)
        return count

    first = events(ids[:500])
    for _ in range(5):
        incremental.feed(ids)
    assert events(ids[:500]) == first
    assert len(incremental._utf8.getstate()[0]) <= 3  # all that is remembered


def test_spaces_and_bytes_of_pieces() -> None:
    tokenizer = pieces()
    hello, world = tokenizer.token_id("▁Hello"), tokenizer.token_id("▁world")
    assert hello is not None and world is not None
    assert tokenizer.decode([1, hello, world]) == "Hello world"
    assert tokenizer.decode([1, hello, world], skip_special=False) == "<s> Hello world"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.decode([3 + b for b in "é🙂".encode()]) == "é🙂"


def test_special_tokens_mean_or_are_spelled() -> None:
    tokenizer = byte_level()
    end, think = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<think>")
    assert tokenizer.eos_ids == (end,)
    assert tokenizer.encode("a<think>b<|im_end|>")[1::2] == [think, end]
    plain = tokenizer.encode_plain("a<think>    b<|im_end|>")
    assert tokenizer.encode_plain("it is 1 text") == tokenizer.encode("it is 1 text")
    assert not {think, end} & set(plain)
    assert tokenizer.token_id("    ") in plain  # runs of spaces are text
    assert tokenizer.decode(plain) == "a<think>    b<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("a<think><|im_end|>")) == "a<think>"
    assert tokenizer.token_bytes(end or 0) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([tokenizer.token_id("<｜é｜>") or 0]) == "<｜é｜>"


# --- where tokenizers come from ---------------------------------------------------------------------


def directory(path: Path, **files: object) -> Path:
    path.mkdir(exist_ok=True)
    byte_level().backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_end_tokens_and_their_order_of_sources(tmp_path: Path) -> None:
    settings_file = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|bos|>"}
    end, bos = byte_level().token_id("<|im_end|>"), byte_level().token_id("<|bos|>")
    path = directory(tmp_path, tokenizer_config=settings_file)
    tokenizer = Tokenizer.from_directory(path)
    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((end,), bos)
    assert tokenizer.special_ids == {end, bos}
    assert tokenizer.vocab_size == byte_level().vocab_size
    directory(path, config={"eos_token_id": 9, "text_config": {"eos_token_id": 8}})
    assert Tokenizer.from_directory(path).eos_ids == (8,)
    directory(path, generation_config={"eos_token_id": [5, 6, 5]})
    assert Tokenizer.from_directory(path).eos_ids == (5, 6)
    directory(path, generation_config={"eos_token_id": 99999})
    with pytest.raises(TokenizerError, match="end token 99999 is not among"):
        Tokenizer.from_directory(path)


def test_directories_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json: download"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has vocab\.json but no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_directory(tmp_path)
    directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"config\.json is not JSON"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    empty = tokenizers.Tokenizer(models.BPE())
    empty.pre_tokenizer, empty.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    with pytest.raises(TokenizerError, match=r"\(0 tokens\) turns .* into ''"):
        Tokenizer(empty)
    lower = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(TokenizerError, match="turns 'Hello"):
        Tokenizer(lower)
    lower.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="decodes by WordPiece"):
        Tokenizer(lower)


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    backend = byte_level().backend
    spec = json.loads(backend.to_str())
    tokens = [name for name, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    special = {t["content"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, "[PAD9]"],
        "token_type": [*(special.get(t, 1) for t in tokens), 5],
        "merges": merges,
        "eos_token_id": tokens.index("<|im_end|>"),
        "bos_token_id": tokens.index("<|bos|>"),
    } | changes
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items()}


def test_gguf_metadata_gives_the_same_tokenizer() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata())
    for text in [*CORPUS, PROBE, "a<think>    b<|im_end|><|bos|>\r\n  "]:
        assert tokenizer.encode(text) == byte_level().encode(text)
    assert tokenizer.eos_ids == byte_level().eos_ids
    assert tokenizer.bos_id == byte_level().token_id("<|bos|>")
    assert tokenizer.special_ids == byte_level().special_ids
    assert tokenizer.token_bytes(byte_level().vocab_size) == b""  # an unused row
    assert tokenizer.encode("a", begin=True) == tokenizer.encode("a")
    begun = Tokenizer.from_gguf(gguf_metadata(add_bos_token=True))
    assert begun.encode("a", begin=True) == [begun.bos_id, *begun.encode("a")]
    assert begun.encode("a") == tokenizer.encode("a")
    more = Tokenizer.from_gguf(gguf_metadata(eot_token_id=7, eom_token_id=10**9))
    assert more.eos_ids == (*tokenizer.eos_ids, 7)
    unnamed = Tokenizer.from_gguf(gguf_metadata(eos_token_id=None))
    assert unnamed.eos_ids == tokenizer.eos_ids  # <|im_end|>, by its name


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", " 1234", " CAN", "'", "T", " x", "==", "ไทย", "\u0e48", "\n\n", " é"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " CAN", "'", "T", " x", "==", "ไทย", "\u0e48", "\n\n", " é"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " CAN", "'T", " x", "==", "ไทย", "\u0e48\n\n", " é"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " CAN", "'T", " x", "==", "ไทย", "\u0e48\n\n", " é"]),
        ("qwen35", ["It", "'s", " ", "1", "2", "3", "4", " CAN", "'T", " x", "==", "ไทย\u0e48", "\n\n", " é"]),
    ],
)  # fmt: skip
def test_each_vocabulary_splits_words_its_way(pre: str, words: list[str]) -> None:
    text = "It's 1234 CAN'T x==ไทย\u0e48\n\n é"
    tokenizer = Tokenizer.from_gguf(gguf_metadata(pre=pre))
    assert tokenizer.backend.pre_tokenizer is not None
    split = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    raw = text.encode()
    assert [bytes(_BYTE_OF[c] for c in word).decode() for word, _ in split] == words
    assert b"".join(bytes(_BYTE_OF[c] for c in word) for word, _ in split) == raw
    decomposed = tokenizer.encode("e\u0301")
    assert (decomposed == tokenizer.encode("é")) == pre.startswith("qwen")  # NFC


def test_gguf_metadata_that_cannot_be_used() -> None:
    for changes, message in (
        ({"model": "llama"}, "a tokenizer of kind 'llama'"),
        ({"pre": "tekken"}, "by the rules 'tekken', which are none of"),
        ({"tokens": []}, "has 0 tokens"),
        ({"merges": None}, "0 merges"),
        ({"tokens": [1, 2]}, "is not a list of str"),
        ({"token_type": [1]}, "but 1 token types"),
        ({"merges": ["no such"]}, "merges do not fit its tokens"),
        ({"merges": ["nospace"]}, "merges do not fit its tokens"),
    ):
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_gguf(gguf_metadata(**changes))
    assert Tokenizer.from_gguf(gguf_metadata(pre=None)).encode("12 ab") != []


def test_smollm2_if_it_is_in_the_cache() -> None:
    from slipstream.weights import sources
    from slipstream.weights.gguf import open_gguf

    builtin = sources.BUILTINS["smollm2"]
    path = sources.cache_directory() / Path(builtin.member).name
    if not path.is_file():
        pytest.skip("smollm2 is not in the cache: 'slipstream run' fetches it")
    tokenizer = Tokenizer.from_gguf(open_gguf(path).metadata)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (49152, (2, 0))  # im_end, endoftext
    template = Template.from_gguf(open_gguf(path).metadata)
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    reader = pytest.importorskip(
        "transformers.integrations.gguf", reason="no reference is installed"
    )
    architecture, fields, _ = reader.get_gguf_tokenizer(str(path))
    reference, _ = reader.convert_gguf_tokenizer(architecture, fields)
    # transformers reads the vocabulary but not the file's word splitting, which is by digits first.
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), reference.pre_tokenizer]
    )
    source = Path(__file__).read_text("utf-8")
    texts = [source[i : i + 90 + i % 200] for i in range(0, len(source), len(source) // 200)]
    assert len(texts) >= 200
    for text in (*texts, *CORPUS, PROBE, "½ ١٢٣ 12345", "\r\n \n\t", "<|im_start|>a<|im_end|>"):
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids, text


# --- templates --------------------------------------------------------------------------------------

USER = [{"role": "user", "content": "Hi"}]


def test_the_environment_is_what_templates_expect() -> None:
    template = Template(
        "{% for m in messages %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}\n"
        "    {% if loop.last %}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{{ {'é<': [1, none, true]} | tojson }}{{ {'a': 1} | tojson(indent=2) }}{{ bos_token }}"
        "{{ strftime_now('%Y') }}{{ missing is defined }}",
        {"bos_token": "<s>"},
        now=lambda: datetime.datetime(2031, 5, 6),
    )
    assert template.render(USER) == 'Hi{"é<": [1, null, true]}{\n  "a": 1\n}<s>2031False'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Only two roles') }}", "refuses these messages: Only two roles"),
        ("{{ messages[0].content + 1 }}", r"fails on these messages \(TypeError"),
        ("{{ nothing.at.all }}", "refuses these messages: 'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "does what the sandbox forbids"),
        ("{{ messages.append(1) }}", "does what the sandbox forbids"),
        ("{% for i in range(10**9) %}{% endfor %}", r"fails on these messages \(OverflowError"),
    ],
)
def test_a_templates_complaints(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        Template(source).render(USER)


ENDLESS = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "turns",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}": "turns",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}": "turns",
    "{% for x in [1] recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}": "turns",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "characters",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}": "characters",
    "{{ 'a' * 10**10 }}": "characters",
    "{{ [0] * 10**10 }}": "characters",
    "{{ 10 ** 10 ** 10 }}": r"\*\*",
    "{% set x = 'a' * 10**6 %}{% for i in range(999) %}{{ x }}{% endfor %}": "characters",
    "{{ messages | tojson(indent=10**9) }}": "indented by 1000000000",
    "{{ messages | tojson(indent='a' * 10**6) }}": "indented",
}


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_ends_in_bounded_time_and_memory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.text.template.TURNS", 20_000)
    template = Template(source)
    with pytest.raises(TemplateError, match=ENDLESS[source]):
        template.render([{"role": "user", "content": "x"}])
    with pytest.raises(TemplateError, match=ENDLESS[source]):  # nothing is left of the first
        template.render([{"role": "user", "content": "x"}])


def test_long_conversations_stay_within_the_bounds() -> None:
    turns = [
        {"role": role, "content": f"{role} {i}"}
        for i in range(5000)
        for role in ("user", "assistant")
    ]
    rendered = Template.qwen().render(turns)
    assert rendered.count("<|im_start|>user") == 5000
    assert "assistant 4999" in rendered
    counted = Template("{% for m in messages %}{{ loop.index ~ m.content + ' ' * 3 }}{% endfor %}")
    assert counted.render(turns[:2]) == "1user 0   2assistant 0   "


def test_templates_that_cannot_be_compiled() -> None:
    with pytest.raises(TemplateError, match="syntax error in line 2"):
        Template("\n{% if %}")
    with pytest.raises(TemplateError, match="one must be 'default'"):
        Template({"other": ""})


def test_messages_take_one_shape() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
        {"role": "tool", "content": [], "tool_call_id": "c"},
        {"role": "developer", "content": "later"},
    ]
    before = json.dumps(messages)
    got = normalize(messages)
    assert json.dumps(messages) == before
    assert [m["role"] for m in got] == ["system", "user", "assistant", "tool", "system"]
    assert [m["content"] for m in got] == ["one\n\ntwo", "a\nb", "", "", "later"]
    assert got[2]["reasoning_content"] == "r"
    assert got[2]["tool_calls"][0]["function"]["arguments"] == {"a": [1]}
    for arguments in ("", None, {}):
        call = {"function": {"name": "f", "arguments": arguments}}
        [only] = normalize([{"role": "assistant", "tool_calls": [call]}])
        assert only["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user", "content": 3}], "message 0 has content of type int"),
        (
            [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "message 1 has a part of type 'image_url', and this model is given text only",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of type 'text'"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                }
            ],
            "message 0 calls 'f' with arguments that are not a JSON object",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], "a tool call that is not an object"),
    ],
)
def test_messages_that_cannot_be_rendered(messages: list[Any], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        Template("x").render(messages)


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert Template.from_directory(tmp_path) is None

    def render(**kwargs: Any) -> str:
        template = Template.from_directory(tmp_path)
        assert template is not None
        return template.render(USER, **kwargs)

    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    assert render() == "old"
    file = tmp_path / "tokenizer_config.json"
    token = {"content": "<e>"}
    file.write_text(json.dumps({"chat_template": "one {{ eos_token }}", "eos_token": token}))
    assert render() == "one <e>"
    named = [{"name": n, "template": n} for n in ("default", "tool_use", "rag")]
    file.write_text(json.dumps({"chat_template": named}))
    assert render() == "default"
    assert render(tools=[{"type": "function"}]) == "tool_use"
    assert render(tools=[]) == "default"
    file.write_text(json.dumps({"chat_template": [{"name": "x"}]}))
    with pytest.raises(TemplateError, match="an entry without name or template"):
        render()
    (tmp_path / "chat_template.jinja").write_text("newest é", "utf-8")
    with pytest.raises(TemplateError, match="is not JSON"):
        file.write_text("{")
        render()
    file.unlink()
    assert render() == "newest é"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert render(tools=[{"type": "function"}]) == "with tools"

    assert Template.from_gguf({}) is None
    metadata = {
        "tokenizer.chat_template": "{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    template = Template.from_gguf(metadata)
    assert template is not None
    assert template.render(USER) == "b"
    assert template.names == {"default", "tool_use"}


EFFORT = "{{ reasoning_effort | default('unset') }}"
STRICT = (
    "{% if reasoning_effort is defined and reasoning_effort not in allowed %}"
    "{{ raise_exception('no') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("fixed", dict.fromkeys(("none", "minimal", "low", "high"), "fixed")),
        (EFFORT, {"none": "none", "high": "high", "max": "max"}),
        (
            "{% set allowed = ['low', 'medium', 'high'] %}" + STRICT + EFFORT,
            {"none": "low", "minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high"},
        ),
        (
            "{% set allowed = ['medium', 'xhigh'] %}" + STRICT + EFFORT + "{{ enable_thinking | default(true) }}",
            {"none": "unsetFalse", "minimal": "unsetFalse", "low": "mediumTrue", "high": "xhighTrue"},
        ),
        (
            "{{ enable_thinking | default(true) }}",
            {"none": "False", "minimal": "False", "low": "True", "high": "True"},
        ),
    ],
)  # fmt: skip
def test_efforts_become_what_the_template_takes(source: str, expected: dict[str, str]) -> None:
    template = Template(source)
    for effort, text in expected.items():
        assert template.render(USER, reasoning_effort=effort) == text, effort
    assert template.render(USER, reasoning_effort=None) == template.render(USER)


def test_an_effort_that_nobody_knows_is_the_templates_to_refuse() -> None:
    with pytest.raises(TemplateError, match="reasoning_effort is much: give xhigh, medium or low"):
        Template.qwen().render(USER, reasoning_effort="much")
    thinking = Template.qwen().render(USER, reasoning_effort="none", enable_thinking=True)
    assert thinking.endswith("<think>\n")  # what was said outright counts
    assert Template.qwen().render(USER, reasoning_effort="none").endswith("</think>\n\n")


def fixtures() -> list[dict[str, Any]]:
    path = shared("qwen38_chat_fixtures.jsonl")
    if path is None:
        pytest.skip("the published template's renders are not beside this checkout")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_our_qwen_form_is_the_published_one() -> None:
    template, cases = Template.qwen(), fixtures()
    assert len(cases) == 30
    for case in cases:
        kwargs = {"add_generation_prompt": False, **case["kwargs"]}
        assert template.render(case["messages"], **kwargs) == case["render"], case["name"]
        for message in case["messages"]:  # arguments as the OpenAI API sends them
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        assert template.render(case["messages"], **kwargs) == case["render"], case["name"]


def test_the_qwen_vocabulary_gives_the_published_ids(tmp_path: Path) -> None:
    path = shared("qwen35_tokenizer.json.xz")
    if path is None:
        pytest.skip("the Qwen3.5 vocabulary is not beside this checkout")
    (tmp_path / "tokenizer.json").write_bytes(lzma.decompress(path.read_bytes()))
    tokenizer = Tokenizer.from_directory(tmp_path)
    for case in fixtures():
        assert tokenizer.encode(case["render"]) == case["ids"], case["name"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["render"]
    for text in CORPUS:  # NFC is what the vocabulary makes of text
        incremental = Incremental(tokenizer)
        parts = [incremental.feed([i]) for i in tokenizer.encode(text)]
        assert "".join(parts) == normalizers.NFC().normalize_str(text)


def test_the_qwen_form_beyond_the_fixtures() -> None:
    template = Template.qwen()

    def render(*turns: tuple[str, str], **kwargs: Any) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return template.render(messages, enable_thinking=False, **kwargs)

    answer = "<tool_response>\nx\n</tool_response>"
    with pytest.raises(TemplateError, match="has no user message"):
        render(("user", answer))
    with pytest.raises(TemplateError, match="can only be the first"):
        render(("user", "a"), ("system", "b"))
    with pytest.raises(TemplateError, match="cannot have the role critic"):
        render(("user", "a"), ("critic", "b"))
    # The last real question decides whose reasoning is kept, also when questions repeat.
    turns = (("user", "a"), ("assistant", "1"), ("user", "a"), ("assistant", "2"), ("user", answer))
    text = render(*turns, preserve_thinking=False)
    assert text.count("<think>") == 2  # of the answer "2" and of the generation prompt
    assert "<|im_start|>assistant\n1<|im_end|>" in text
    two = render(("user", "a"), ("tool", "x"), ("tool", "y"), ("user", "b"))
    responses = "\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response>"
    assert f"<|im_start|>user{responses}<|im_end|>\n<|im_start|>user\nb" in two
    calls = [{"function": {"name": n, "arguments": {"k": [1, "é"], "s": " raw "}}} for n in "fg"]
    text = template.render([*USER, {"role": "assistant", "content": "c", "tool_calls": calls}])
    one = '<function={}>\n<parameter=k>\n[1, "é"]\n</parameter>\n<parameter=s>\n raw \n</parameter>\n</function>'
    blocks = "\n".join(f"<tool_call>\n{one.format(n)}\n</tool_call>" for n in "fg")
    assert f"</think>\n\nc\n\n{blocks}<|im_end|>" in text


# --- stop strings -----------------------------------------------------------------------------------


def stopped(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The definition: the first string to be complete, of those the one that begins first."""
    for end in range(1, len(text) + 1):
        complete = [s for s in strings if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400)
@given(data=st.data())
def test_stop_strings_in_any_pieces(data: st.DataObject) -> None:
    letters = st.text("ab", max_size=30)
    text = data.draw(letters)
    strings = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
    want, hit = stopped(text, strings)
    stops, shown = StopStrings(strings), ""
    for piece in data.draw(cut(text)):
        emit, found = stops.feed(piece)
        shown += emit
        assert want.startswith(shown)  # nothing leaks, not even for a moment
        if found is not None:
            assert (shown, found) == (want, hit)
            assert stops.feed("more") == ("", hit)
            assert stops.finish() == ""
            return
    assert hit is None
    assert shown + stops.finish() == text


def test_no_more_is_held_back_than_could_begin_a_stop() -> None:
    stops = StopStrings(["<end>", "\n\nQ:"])
    assert stops.feed("text <e") == ("text ", None)
    assert stops.feed("lse> \n") == ("<else> ", None)
    assert stops.feed("\nA") == ("\n\nA", None)
    assert stops.feed("\n\nQ") == ("", None)
    assert stops.feed(": more") == ("", "\n\nQ:")
    assert StopStrings([]).feed("any") == ("any", None)
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings(["a", ""])


def test_a_lone_surrogate_is_named() -> None:
    tokenizer = Tokenizer.from_directory(Path(__file__).parent.parent / "slipstream" / "demo")
    with pytest.raises(RequestError, match="character 1 of the text is a lone surrogate"):
        tokenizer.encode("a\udcff")


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer.from_directory(Path(__file__).parent.parent / "slipstream" / "demo")
    worker = threading.Thread(target=lambda: tokenizer.encode("ab " * 300_000))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 50, ticks
