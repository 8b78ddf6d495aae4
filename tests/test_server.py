"""The HTTP server in front of a fake engine, asked by the real openai client and by bare sockets."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake import END, START, VOCAB, FakeEngine, ServingFacts, answer_of
from served import HELLO, Site

import slipstream
from slipstream.request import Request, SamplingParams
from slipstream.server.gate import KeyFileError, read_keys
from slipstream.server.schema import ChatBody, CompletionBody

Opener = Callable[..., Site]


@pytest.fixture
def open_site() -> Iterator[Opener]:
    with contextlib.ExitStack() as stack:

        def open_one(engine: FakeEngine | None = None, **options: Any) -> Site:
            site = Site(engine or FakeEngine(), **options)
            stack.callback(site.close)
            return site

        yield open_one


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(FakeEngine())
    yield site
    site.close()


def says(answer: str | Sequence[int], **options: Any) -> FakeEngine:
    return FakeEngine(answer=lambda request: answer, **options)


def expected(messages: list[dict[str, Any]], seed: int | None = None) -> str:
    """What the fake answers when it is asked alone."""
    text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"
    return answer_of(Request("", tuple(text.encode()), SamplingParams(seed=seed)))


def alive(site: Site) -> bool:
    answer = site.chat()
    return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] != ""


# Whole answers and streams


def test_chat(site: Site) -> None:
    answer = site.client().chat.completions.create(model="fake", messages=HELLO)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(HELLO)
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    prompt = len(b"<user>hello\n<assistant>")
    completion = len(expected(HELLO).encode()) + 1  # the end token counts
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, completion)
    assert usage.total_tokens == prompt + completion
    assert usage.prompt_tokens_details.cached_tokens == 4
    details = usage.completion_tokens_details
    steps = -(-completion // 3)
    assert details.accepted_prediction_tokens == completion - steps
    assert details.rejected_prediction_tokens == 3 * steps - (completion - steps)


def test_chat_stream(site: Site) -> None:
    stream = site.client().chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *texts, last = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in texts) == expected(HELLO)
    assert [c.choices[0].finish_reason for c in texts[:-1]] == [None] * (len(texts) - 1)
    assert texts[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected(HELLO).encode()) + 1
    assert all(c.usage is None for c in texts)
    assert len({c.id for c in chunks}) == 1


def test_stream_without_usage_has_none(site: Site) -> None:
    answer = site.chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert '"usage"' not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_stream_arrives_as_it_is_made(open_site: Opener) -> None:
    site = open_site(says("x" * 40, block=4, pace=0.02))
    began = time.perf_counter()
    times = []
    for chunk in site.client().chat.completions.create(model="fake", messages=HELLO, stream=True):
        if chunk.choices[0].delta.content:
            times.append(time.perf_counter() - began)
    assert len(times) == 10
    assert times[0] < times[-1] / 2


def test_n_choices_are_those_of_consecutive_seeds(site: Site) -> None:
    client = site.client()
    answer = client.chat.completions.create(model="fake", messages=HELLO, n=3, seed=7)
    texts = [c.message.content for c in sorted(answer.choices, key=lambda c: c.index)]
    assert texts == [expected(HELLO, seed) for seed in (7, 8, 9)]
    assert len(set(texts)) == 3
    assert answer.usage.prompt_tokens == len(b"<user>hello\n<assistant>")
    assert answer.usage.completion_tokens == sum(len(t.encode()) + 1 for t in texts)

    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(
        model="fake", messages=HELLO, n=3, seed=7, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_seed_repeats_and_differs(site: Site) -> None:
    def ask(seed: int) -> str:
        answer = site.client().chat.completions.create(model="fake", messages=HELLO, seed=seed)
        return answer.choices[0].message.content

    assert ask(1) == ask(1) != ask(2)
    assert ask(2**64 - 1)


def test_parameters_reach_the_engine(site: Site) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "speculate": False,
    }
    assert site.chat(**given, logit_bias={"12": -3, "13": 2.5}).status_code == 200
    params = site.engine.submitted[-1].params
    for name, value in given.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == {12: -3.0, 13: 2.5}
    assert params.n == 1

    assert site.chat(**dict.fromkeys(given), logit_bias=None, stop=None).status_code == 200
    params = site.engine.submitted[-1].params
    room = site.engine.context - len(site.engine.submitted[-1].tokens)
    assert params == SamplingParams(max_tokens=room)


def test_max_tokens(site: Site) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = site.chat(**{name: 5}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 5
    assert (
        site.chat(max_tokens=4, max_completion_tokens=6).json()["usage"]["completion_tokens"] == 6
    )
    assert site.chat(max_tokens=10**9, ignore_eos=True).json()["usage"]["total_tokens"] == 2048


def test_a_cut_character_is_whole_or_replaced_once(open_site: Opener) -> None:
    site = open_site(says("aé🚀z", block=1))
    texts = [
        site.chat(max_tokens=n).json()["choices"][0]["message"]["content"] for n in range(1, 10)
    ]
    assert texts == ["a", "a�", "aé", "aé�", "aé�", "aé�", "aé🚀", "aé🚀z", "aé🚀z"]


@pytest.mark.parametrize("block", [1, 2, 3, 16])
def test_utf8_is_never_split(open_site: Opener, block: int) -> None:
    text = "日本語 🚀🇩🇪 früh — ok 👩‍👩‍👧 한국어"
    site = open_site(says(text, block=block))
    chunks = site.client().chat.completions.create(model="fake", messages=HELLO, stream=True)
    parts = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("block", [1, 2, 5, 64])
def test_stop_strings_never_leak(open_site: Opener, block: int, stream: bool) -> None:
    text = "one\n\ntwo END three\n\nfour"
    site = open_site(says(text, block=block))
    client = site.client()
    for stop, kept, tokens in [
        ("END", "one\n\ntwo ", 12),
        (["four", "\n\n"], "one", 5),
        (["END three", "ENDED"], "one\n\ntwo ", 18),
        ("absent", text, len(text) + 1),
        (" three\n\nfour", "one\n\ntwo END", len(text)),
        ("o", "", 1),
    ]:
        if stream:
            chunks = list(
                client.chat.completions.create(
                    model="fake",
                    messages=HELLO,
                    stop=stop,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            got = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
            finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            whole = client.chat.completions.create(model="fake", messages=HELLO, stop=stop)
            got = whole.choices[0].message.content
            finish, usage = whole.choices[0].finish_reason, whole.usage
        assert (got, finish) == (kept, "stop")
        assert usage.completion_tokens == tokens
    assert site.engine.wait_idle()


def test_a_stop_string_frees_the_engine(open_site: Opener) -> None:
    site = open_site(says("ab END " + "c" * 1500, block=2, pace=0.005))
    began = time.perf_counter()
    assert site.chat(stop="END").json()["choices"][0]["message"]["content"] == "ab "
    assert site.engine.wait_idle(1)
    assert time.perf_counter() - began < 2  # the whole text takes 3.7 s
    assert site.engine.aborted == [site.engine.submitted[0].id]


def test_an_end_token_has_no_text(open_site: Opener) -> None:
    site = open_site(says([*b"hi", END, *b"!"], block=8))
    answer = site.chat(ignore_eos=True, max_tokens=4).json()
    assert answer["choices"][0]["message"]["content"] == "hi!"
    assert answer["usage"]["completion_tokens"] == 4
    answer = site.chat(stop_token_ids=[ord("i")], logprobs=True).json()
    assert answer["choices"][0]["message"]["content"] == "h"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2
    assert [e["token"] for e in answer["choices"][0]["logprobs"]["content"]] == ["h", "i"]


# Log-probabilities


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(open_site: Opener, stream: bool) -> None:
    text = "naïve 🚀"
    site = open_site(says(text, block=3))
    asked = {"model": "fake", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    client = site.client()
    if stream:
        entries = []
        for chunk in client.chat.completions.create(**asked, stream=True):
            logprobs = chunk.choices[0].logprobs
            entries += logprobs.content if logprobs else []
    else:
        answer = client.chat.completions.create(**asked)
        entries = answer.choices[0].logprobs.content
        assert answer.usage.completion_tokens == len(entries)
    tokens = [*text.encode(), END]
    assert len(entries) == len(tokens)
    assert b"".join(bytes(e.bytes) for e in entries) == text.encode() + b"</s>"
    assert [e.logprob for e in entries] == [-(t % 7) / 8 - 0.125 for t in tokens]
    assert all(len(e.top_logprobs) == 2 for e in entries)
    assert entries[0].token == "n"
    assert entries[2].token == "bytes:\\xc3"
    assert entries[-1].token == "</s>"


def test_logprobs_end_with_the_stop_string(open_site: Opener) -> None:
    site = open_site(says("ab END secret", block=64))
    answer = site.chat(logprobs=True, stop="END").json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == "ab END"
    assert answer["usage"]["completion_tokens"] == len(entries)
    assert entries[0]["top_logprobs"] == []


def test_logprobs_have_no_infinity(open_site: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    import fake

    def lowest(tokens: Any, count: Any) -> list[Any]:
        values = (float("-inf"), float("nan"), -1.5)
        return [
            fake.TokenLogprob(t, v, ((t, v),)) for t, v in zip(tokens, values * 99, strict=False)
        ]

    monkeypatch.setattr(fake, "_entries", lowest)
    site = open_site(says("abc", block=3))
    answer = site.chat(logprobs=True, top_logprobs=1, max_tokens=3)
    assert "NaN" not in answer.text and "Infinity" not in answer.text
    entries = answer.json()["choices"][0]["logprobs"]["content"]
    assert [e["logprob"] for e in entries] == [-9999.0, -9999.0, -1.5]


def test_completion_logprobs_and_echo(open_site: Opener) -> None:
    site = open_site(says("ün", block=2))
    answer = site.client().completions.create(model="fake", prompt="häl", logprobs=1, echo=True)
    [choice] = answer.choices
    assert choice.text == "hälün"
    assert choice.finish_reason == "stop"
    logprobs = choice.logprobs
    prompt, new = [START, *"häl".encode()], [*"ün".encode(), END]
    assert len(logprobs.tokens) == len(prompt) + len(new)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == [-(t % 7) / 8 - 0.125 for t in [*prompt[1:], *new]]
    assert logprobs.text_offset == [0, 0, 1, 1, 2, 3, 3, 4, 5]
    assert all(
        name in top
        for name, top in zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True)
    )
    assert answer.usage.completion_tokens == 4

    nothing = site.complete(prompt="häl", logprobs=1, echo=True, max_tokens=0).json()
    assert nothing["choices"][0]["text"] == "häl"
    assert len(nothing["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    assert nothing["usage"]["completion_tokens"] == 0

    streamed = [
        chunk.choices[0]
        for chunk in site.client().completions.create(
            model="fake", prompt="häl", logprobs=1, echo=True, stream=True
        )
    ]
    assert "".join(c.text for c in streamed) == "hälün"
    joined = [t for c in streamed if c.logprobs for t in c.logprobs.tokens]
    assert joined == logprobs.tokens


# Completions


def test_prompts_of_all_shapes(site: Site) -> None:
    client = site.client()
    seen = len(site.engine.submitted)
    for prompt, tokens in [
        ("hi", [[START, *b"hi"]]),
        (["hi", "du"], [[START, *b"hi"], [START, *b"du"]]),
        ([104, 105], [[104, 105]]),
        ([[104], [105, 106]], [[104], [105, 106]]),
    ]:
        answer = client.completions.create(model="fake", prompt=prompt, n=2, seed=5)
        assert answer.object == "text_completion"
        got = {c.index: c.text for c in answer.choices}
        want = [
            answer_of(Request("", tuple(t), SamplingParams(seed=seed)))
            for t in tokens
            for seed in (5, 6)
        ]
        assert [got[i] for i in range(len(want))] == want
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
        assert answer.usage.prompt_tokens_details.cached_tokens == sum(
            min(4, len(t)) for t in tokens
        )
        sent = [list(r.tokens) for r in site.engine.submitted[seen:]]
        assert sent == [t for t in tokens for _ in range(2)]
        seen = len(site.engine.submitted)


def test_completion_stream(site: Site) -> None:
    chunks = list(
        site.client().completions.create(
            model="fake", prompt="hi", stream=True, stream_options={"include_usage": True}
        )
    )
    want = answer_of(Request("", (START, *b"hi"), SamplingParams()))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == want
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(want.encode()) + 1


# Models and health


def test_models_and_health(site: Site) -> None:
    client = site.client()
    assert [m.id for m in client.models.list()] == ["fake", "org/other"]
    assert client.models.retrieve("org/other").id == "org/other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")
    assert site.chat(model="org/other").json()["model"] == "org/other"
    health = site.http.get(f"{site.url}/health").json()
    assert health == {"status": "ok", "model": "fake", "running": 0, "waiting": 0}


def test_the_fake_tells_what_an_engine_tells() -> None:
    tree = ast.parse((Path(slipstream.__file__).parent / "engine/protocols.py").read_text())
    [facts] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServingFacts"]
    names = [n.target.id for n in facts.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    assert names == [entry.name for entry in dataclasses.fields(ServingFacts)]


def test_a_dead_engine_is_not_healthy(open_site: Opener) -> None:
    site = open_site()
    site.engine.dead = True
    answer = site.http.get(f"{site.url}/health")
    assert answer.status_code == 500
    assert "secret" not in answer.text and answer.json()["error"]["code"] == "engine_failure"
    assert site.chat().status_code == 500


# Messages


def test_messages_of_real_clients(site: Site) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"at": "sky", "n": 2}'},
    }
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": None},
        {"role": "user", "content": "why", "name": "Ann"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    site.client().chat.completions.create(
        model="fake",
        messages=messages,
        tools=tools,
        reasoning_effort="low",
        extra_body={"enable_thinking": False, "chat_template_kwargs": {"custom": [1]}},
    )
    seen, shown, arguments = site.text.rendered[-1]
    assert seen == [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
        {"role": "user", "content": "why", "name": "Ann"},
    ]
    assert shown == tools
    assert arguments == {"reasoning_effort": "low", "enable_thinking": False, "custom": [1]}

    site.chat(tools=tools, tool_choice="none")
    assert site.text.rendered[-1][1] is None


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_media_is_refused(site: Site, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
    with pytest.raises(openai.BadRequestError) as caught:
        site.client().chat.completions.create(model="fake", messages=messages)  # type: ignore[list-item]
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.code == "unsupported_content"
    assert "text only" in caught.value.message


# Errors


def check_error(answer: httpx.Response, status: int, word: str = "") -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert word in body["error"]["message"]
    assert "Traceback" not in answer.text and "secret" not in answer.text
    return body["error"]


CHAT_ERRORS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": "hello"}, "messages", "array"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "array"),
    ({"messages": ["hello"]}, "messages[0]", "object"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "None"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0]", "type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "string",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        "messages[0].tool_calls",
        "list",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        "name",
    ),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": True}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"max_tokens": "9"}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"n": 0}, "n", "1 to 128"),
    ({"n": 129}, "n", "129"),
    ({"seed": 2**70}, "seed", "64"),
    ({"seed": "x"}, "seed", "integer"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": ["a", 5]}, "stop", "string"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["s"] * 17}, "stop", "17"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"1": "y"}}, "logit_bias.1", "number"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", str(VOCAB)),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": 5}, "stream_options", "object"),
    ({"tools": {}}, "tools", "array"),
    ({"tool_choice": "required"}, "tool_choice", "required"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "no user message"),
]


@pytest.mark.parametrize(("fields", "param", "word"), CHAT_ERRORS)
def test_chat_errors(site: Site, fields: dict[str, Any], param: str | None, word: str) -> None:
    for stream in (False, True):
        error = check_error(site.chat(**{"stream": stream, **fields}), 400, word)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "missing"),
        ({"prompt": 5}, "prompt", "string"),
        ({"prompt": ["a", 5]}, "prompt", "string"),
        ({"prompt": [1.5]}, "prompt", "string"),
        ({"prompt": [True]}, "prompt", "string"),
        ({"prompt": [[1], []]}, "prompt", "string"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [5, VOCAB]}, "prompt", str(VOCAB)),
        ({"prompt": ["a"] * 100, "n": 3}, "prompt", "300"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"suffix": "x"}, "suffix", "suffix"),
        ({"best_of": 3}, "best_of", "3"),
        ({"max_tokens": 0}, "max_tokens", "0"),
    ],
)
def test_completion_errors(site: Site, fields: dict[str, Any], param: str, word: str) -> None:
    error = check_error(site.complete(**fields), 400, word)
    assert error["param"] == param


# A value of the wrong type or out of range for every field that both endpoints take.
FIELD_ERRORS: dict[str, list[Any]] = {
    "model": [5],
    "stream": ["x"],
    "stream_options": [5],
    "max_tokens": ["x", 0, -1],
    "min_tokens": ["x", -1],
    "temperature": ["x", -1, 101],
    "top_p": ["x", 0, 2],
    "top_k": ["x", -5],
    "min_p": ["x", 2],
    "repetition_penalty": ["x", 0],
    "presence_penalty": ["x", 101],
    "frequency_penalty": ["x", -101],
    "logit_bias": [5, {"1": 1e9}, {str(i): 1 for i in range(301)}, {"x": 1}],
    "seed": ["x", 2**70],
    "n": ["x", 0],
    "stop": [5, "", ["s"] * 17],
    "stop_token_ids": [5, [1] * 17],
    "ignore_eos": ["x"],
    "speculate": ["x"],
}
OF_CHAT = {
    "messages": [5, []],
    "max_completion_tokens": ["x", 0],
    "logprobs": ["x"],
    "tools": [5],
    "tool_choice": ["required"],
    "response_format": ["json"],
    "reasoning_effort": [5],
    "enable_thinking": ["x"],
    "chat_template_kwargs": [5],
}
OF_COMPLETIONS = {
    "prompt": [5, None],
    "echo": ["x"],
    "logprobs": ["x", 21, -1],
    "suffix": [5, "x"],
    "best_of": ["x", 3],
}


@pytest.mark.parametrize("chat", [True, False])
def test_every_error_of_a_field_names_it(open_site: Opener, chat: bool) -> None:
    site = open_site()
    ask = site.chat if chat else site.complete
    table = FIELD_ERRORS | (OF_CHAT if chat else OF_COMPLETIONS)
    shape = ChatBody if chat else CompletionBody
    # A field that nobody put into the table is not tested: only these have none.
    assert shape.model_fields.keys() - table.keys() <= {"top_logprobs", "share"}
    for field, values in table.items():
        for value in values:
            answer = ask(**{field: value})
            assert answer.status_code == 400, (field, value, answer.text)
            param = answer.json()["error"]["param"]
            assert param is not None and param.split(".")[0] == field, (field, value, answer.text)
    both = ask(min_tokens=9, max_tokens=3)
    assert check_error(both, 400)["param"] == "min_tokens"
    if chat:
        for count in (-1, 21, "x"):
            error = check_error(ask(logprobs=True, top_logprobs=count), 400, "top_logprobs")
            assert error["param"] == "top_logprobs"
        check_error(ask(max_completion_tokens=0), 400, "max_completion_tokens is 0")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"messages": [',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b"[" * 100_000,
        b"[]",
        b'"text"',
        b"null",
        b"\x00\x01\x02",
    ],
)
def test_malformed_bodies(site: Site, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        check_error(site.post(path, body), 400)
    assert alive(site)


def test_unknown_fields_are_ignored(site: Site) -> None:
    answer = site.chat(user="ann", store=True, metadata={"a": 1}, service_tier="x", unheard_of=[{}])
    assert answer.status_code == 200


def test_long_prompts(site: Site) -> None:
    messages = [{"role": "user", "content": "x" * 3000}]
    with pytest.raises(openai.BadRequestError) as caught:
        site.client().chat.completions.create(model="fake", messages=messages)  # type: ignore[arg-type]
    assert caught.value.code == "context_length_exceeded"
    total = 3000 + len("<user>\n<assistant>")
    assert str(total) in caught.value.message and "2048" in caught.value.message
    assert str(total - 2047) in caught.value.message
    overhead = len("<user>\n<assistant>")
    fits = [{"role": "user", "content": "x" * (2047 - overhead)}]
    answer = site.chat(messages=fits).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    check_error(site.complete(prompt=[1] * 2048), 400, "2048")
    assert alive(site)


def test_unknown_models(site: Site) -> None:
    for ask in (
        lambda c: c.chat.completions.create(model="gpt-9", messages=HELLO),
        lambda c: c.completions.create(model="gpt-9", prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(site.client())
        assert caught.value.code == "model_not_found"
        assert "fake" in caught.value.message
    check_error(site.chat(model=5), 400, "model")


def test_unknown_paths_and_methods(site: Site) -> None:
    check_error(site.http.get(f"{site.url}/"), 404, "/v1/chat/completions")
    check_error(site.http.get(f"{site.url}/v1/models/"), 404)
    check_error(site.post("/v1/embeddings", {}), 404, "/v1/embeddings")
    answer = site.http.get(f"{site.url}/v1/chat/completions")
    check_error(answer, 405, "GET")
    assert answer.headers["allow"] == "POST"
    check_error(site.http.delete(f"{site.url}/v1/models"), 405)
    preflight = site.http.options(
        f"{site.url}/v1/models", headers={"Origin": "http://evil.example"}
    )
    assert "access-control-allow-origin" not in preflight.headers


def test_large_bodies(open_site: Opener) -> None:
    site = open_site(max_body=10_000)
    error = check_error(site.chat(messages=[{"role": "user", "content": "x" * 20_000}]), 413)
    assert "10000" in error["message"]

    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    answer = site.http.post(f"{site.url}/v1/completions", content=pieces())  # no content-length
    check_error(answer, 413, "30000")
    assert site.engine.submitted == []
    assert alive(site)


def test_a_template_that_breaks_is_a_failure_without_internals(site: Site) -> None:
    error = check_error(site.chat(chat_template_kwargs={"explode": True}), 500)
    assert error["type"] == "server_error"
    assert alive(site)


def test_engine_refusals_and_failures(open_site: Opener) -> None:
    engine = FakeEngine(
        pace=0.15,
        refuse=lambda r: (
            "prompt needs 9 pages, 8 exist: shorten it" if b"R"[0] in r.tokens else None
        ),
        fail=lambda r, done: "secret: CUDA error" if b"F"[0] in r.tokens and done >= 3 else None,
    )
    site = open_site(engine)
    for stream in (False, True):
        error = check_error(site.complete(prompt="R", stream=stream), 400, "9 pages")
        assert error["param"] == "prompt"
    check_error(site.complete(prompt="F"), 500, "log")
    with pytest.raises(openai.APIError, match="the engine failed") as caught:
        list(site.client().completions.create(model="fake", prompt="F", stream=True))
    assert "secret" not in str(caught.value)
    # One failing choice takes its siblings along.
    check_error(site.complete(prompt=["a", "F", "b"]), 500)
    assert site.engine.wait_idle()
    assert len(site.engine.aborted) == 2


def test_an_engine_that_raises(open_site: Opener) -> None:
    def broken(request: Request) -> str:
        raise OSError("secret path")

    site = open_site(FakeEngine(answer=broken))
    check_error(site.chat(), 500, "log")
    check_error(site.chat(stream=True), 500, "log")


# Keys


def test_api_keys(open_site: Opener) -> None:
    site = open_site(keys={"ann": "sk-one", "bob": "sk-two"})
    assert site.client("sk-two").chat.completions.create(model="fake", messages=HELLO)
    assert site.engine.submitted[-1].scope == "bob"
    for key in ("sk-three", "sk-on", "sk-onee"):
        with pytest.raises(openai.AuthenticationError) as caught:
            site.client(key).chat.completions.create(model="fake", messages=HELLO)
        assert caught.value.code == "invalid_api_key"
    check_error(site.chat(), 401)
    check_error(site.http.get(f"{site.url}/v1/models"), 401)
    check_error(site.http.get(f"{site.url}/absent"), 401)
    assert site.http.get(f"{site.url}/health").status_code == 200


def test_key_files(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("# who may use this\nsk-one\n\nbob sk-two\n")
    assert read_keys(path) == {"key-2": "sk-one", "bob": "sk-two"}
    for text, word in [("# none\n", "no API key"), ("a b c\n", "3 words"), ("a x\na y\n", "again")]:
        path.write_text(text)
        with pytest.raises(KeyFileError, match=word):
            read_keys(path)
    with pytest.raises(KeyFileError, match="No such file"):
        read_keys(tmp_path / "absent")


# Clients that leave


def ask_raw(site: Site, body: dict[str, Any]) -> socket.socket:
    """Send a chat request over a bare socket."""
    content = json.dumps({"messages": HELLO, **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", site.port), timeout=10)
    connection.sendall(head.encode() + content)
    return connection


def wait_for(ready: Callable[[], bool], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "nothing happened in time"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["running", "queued"])
def test_leaving_aborts(open_site: Opener, stream: bool, place: str) -> None:
    site = open_site(says("x" * 1000, slots=1, block=1, pace=0.01))
    engine = site.engine
    first = ask_raw(site, {"stream": True})
    wait_for(lambda: engine.about().running == 1)
    if place == "running":
        first.close()
        wait_for(lambda: len(engine.aborted) == 1)
        first = ask_raw(site, {"stream": stream, "n": 1})
        wait_for(lambda: engine.about().running == 1)
        leaving, gone = first, engine.submitted[1].id
        if stream:
            assert first.recv(4096).startswith(b"HTTP/1.1 200")
    else:
        leaving = ask_raw(site, {"stream": stream})
        wait_for(lambda: engine.about().waiting == 1)
        gone = engine.submitted[1].id
        if stream:
            assert leaving.recv(4096).startswith(b"HTTP/1.1 200")
    leaving.close()
    wait_for(lambda: gone in engine.aborted)
    if place == "queued":
        assert engine.about().running == 1  # the other one goes on
        first.close()
    assert engine.wait_idle()
    assert len(site.app.state.open) == 0
    assert sorted(engine.aborted) == sorted(r.id for r in engine.submitted)


def test_leaving_aborts_every_choice(open_site: Opener) -> None:
    site = open_site(says("x" * 1000, slots=2, block=1, pace=0.01))
    connection = ask_raw(site, {"stream": True, "n": 5})
    wait_for(lambda: site.engine.about().waiting == 3)
    connection.close()
    assert site.engine.wait_idle()
    assert len(site.engine.aborted) == 5


def test_a_client_that_reads_nothing_can_still_leave(open_site: Opener) -> None:
    site = open_site(says("x" * 1900, slots=1, block=100, pace=0.02))
    site.engine.context = 10**7
    connection = ask_raw(site, {"stream": True, "ignore_eos": True, "logprobs": True})
    wait_for(lambda: site.engine.about().running == 1)
    time.sleep(1.0)  # its buffers fill, and the server waits to write
    connection.close()
    wait_for(lambda: len(site.engine.aborted) == 1)
    assert site.engine.wait_idle()


def test_an_upload_cut_short_reaches_nobody(open_site: Opener) -> None:
    site = open_site()
    connection = socket.create_connection(("127.0.0.1", site.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    connection.close()
    assert alive(site)
    assert len(site.engine.submitted) == 1


def test_many_clients_some_leaving(open_site: Opener) -> None:
    engine = FakeEngine(slots=8, block=4, pace=0.002)
    site = open_site(engine)
    leavers = set(random.Random(0).sample(range(32), 10))

    async def ask(client: openai.AsyncOpenAI, i: int) -> str | None:
        messages: Any = [{"role": "user", "content": f"question {i}"}]
        stream = await client.chat.completions.create(
            model="fake",
            messages=messages,
            seed=i,
            stream=True,
            extra_body={"ignore_eos": True, "max_tokens": 1500} if i in leavers else {},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if i in leavers and len(text) > i:
                await stream.close()
                return None
        return text

    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(
            base_url=f"{site.url}/v1", api_key="x", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    texts = asyncio.run(all_of_them())
    for i, text in enumerate(texts):
        if i not in leavers:
            assert text == expected([{"role": "user", "content": f"question {i}"}], seed=i)
    assert engine.wait_idle()
    by_seed = {r.params.seed: r.id for r in engine.submitted}
    assert sorted(engine.aborted) == sorted(by_seed[i] for i in leavers)
    assert len(engine.finished) == 22
    assert len(site.app.state.open) == 0
    assert alive(site)


# Ending


def test_an_ending_server_says_so(open_site: Opener) -> None:
    site = open_site(says("x" * 1000, slots=1, block=1, pace=0.01))
    chunks = iter(site.client().chat.completions.create(model="fake", messages=HELLO, stream=True))
    next(chunks)
    [loop] = {s.get_loop() for s in site.server.servers}
    loop.call_soon_threadsafe(site.app.state.open.close)
    wait_for(lambda: site.app.state.open.closing)
    check_error(site.chat(), 503, "ending")
    assert site.http.get(f"{site.url}/health").status_code == 503
    assert next(chunks).choices[0].delta.content  # what is under way goes on
    loop.call_soon_threadsafe(site.app.state.open.abort)
    with pytest.raises(openai.APIError, match="ending"):
        list(chunks)
    assert site.engine.wait_idle()
    assert len(site.engine.aborted) == 1


# The log


def test_the_log_has_counts_and_no_text(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slipstream.server")
    answer = site.chat(messages=[{"role": "user", "content": "confidential"}], max_tokens=4)
    wait_for(lambda: bool(caplog.records))
    [record] = caplog.records
    line = record.getMessage()
    assert "POST /v1/chat/completions 200" in line
    assert "prompt=30 cached=4 completion=4" in line
    assert answer.headers["x-request-id"] in line
    assert "confidential" not in line


def test_seeded_text_is_the_same_on_a_prefix_hit(tmp_path: Path) -> None:
    import tiny

    from slipstream.llm import LLM

    path = tiny.write(tmp_path / "m", tiny.QWEN)
    llm = LLM(str(path), dtype="float64", cache__reuse="exact", limits__context=512)
    prompt = [random.Random(5).randrange(2, 97) for _ in range(300)]
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True)
    texts, cached = [], []
    for _ in range(3):
        [output] = llm.generate([prompt], params)
        texts.append(output.completions[0].token_ids)
        cached.append(output.usage.cached_tokens)
    assert cached[0] == 0 and max(cached) >= 192, cached
    assert texts[1] == texts[0] and texts[2] == texts[0]
    [other] = llm.generate([prompt], dataclasses.replace(params, seed=12))
    assert other.completions[0].token_ids != texts[0]
