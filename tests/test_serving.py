"""The HTTP server in front of a real engine with a tiny model: nothing is lost, nothing leaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import checkpoints
import openai
import pytest
import tiny
from served import Site

from slipstream.cli.chat import Voice
from slipstream.engine.serving import InferenceThread
from slipstream.llm import LLM
from slipstream.request import SamplingParams
from slipstream.server.text import CheckpointText


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = checkpoints.write(tmp_path_factory.mktemp("m") / "qwen", tiny.QWEN)
    return LLM(str(path), dtype="float64", limits__seqs=4, limits__context=512, limits__tokens=128)


@pytest.fixture(scope="module")
def thread(llm: LLM) -> Iterator[InferenceThread]:
    thread = InferenceThread(llm.engine)
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def site(llm: LLM, thread: InferenceThread) -> Iterator[Site]:
    site = Site(thread, CheckpointText(llm.tokenizer, llm.template))  # type: ignore[arg-type]
    yield site
    site.stop()


def idle(llm: LLM) -> bool:
    """Whether all requests end soon, with every page and slot accounted for."""
    until = time.monotonic() + 10
    while llm.engine.busy:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    llm.engine.cache.check()
    return not llm.engine.scheduler.running and not llm.engine.scheduler.waiting


async def ask(client: openai.AsyncOpenAI, i: int, leave_after: int | None = None) -> str | None:
    stream = await client.completions.create(
        model="fake",
        prompt=f"{'tell me more ' * (i % 3)}about {i}",
        max_tokens=100 if leave_after else 24,
        temperature=0.7,
        seed=i,
        stream=True,
    )
    text, seen = "", 0
    async for chunk in stream:
        text += chunk.choices[0].text
        seen += 1
        if leave_after and seen >= leave_after:
            await stream.close()
            return None
    return text


def test_a_crowd_some_leaving(llm: LLM, site: Site) -> None:
    leavers = {i: 1 + i % 4 for i in range(0, 30, 3)}

    async def crowd() -> tuple[list[str | None], list[str | None]]:
        async with openai.AsyncOpenAI(
            base_url=f"{site.url}/v1", api_key="x", max_retries=0, timeout=60
        ) as client:
            together = await asyncio.gather(*(ask(client, i, leavers.get(i)) for i in range(32)))
            alone = [await ask(client, i) for i in range(1, 32, 3)]
            return together, alone

    together, alone = asyncio.run(crowd())
    assert [i for i, text in enumerate(together) if text is None] == sorted(leavers)
    assert [together[i] for i in range(1, 32, 3)] == alone
    assert len({*alone}) == len(alone)
    assert idle(llm)
    assert len(site.app.state.open) == 0


def test_the_server_says_what_python_says(llm: LLM, thread: InferenceThread, site: Site) -> None:
    asked: dict[str, Any] = {"temperature": 0.8, "max_tokens": 40, "seed": 3, "n": 2}
    answer = site.complete(prompt="hello", logprobs=2, echo=True, stop="\x07", **asked).json()
    assert idle(llm)
    params = SamplingParams(**asked, logprobs=2, prompt_logprobs=2, stop=("\x07",))
    [expected] = _offline(llm).generate(["hello"], params)
    for choice, completion in zip(answer["choices"], expected.completions, strict=True):
        assert choice["text"] == "hello" + completion.text
        assert choice["finish_reason"] == completion.finish_reason
        entries = [*(expected.prompt_logprobs or []), *completion.logprobs]
        told = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(entries) and told[0] is None
        assert told[1:] == pytest.approx([e.logprob for e in entries[1:] if e], abs=1e-9)
    assert answer["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def _offline(llm: LLM) -> LLM:
    """The same model in an engine of its own: an engine belongs to one thread."""
    return LLM(config=llm.config)


def test_what_the_engine_refuses(site: Site, llm: LLM) -> None:
    answer = site.complete(prompt="x" * 600)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = site.complete(stop_token_ids=[299], stream=True)  # a row that no token has
    assert answer.status_code == 400
    assert "299" in answer.json()["error"]["message"]
    assert idle(llm)


def test_a_chat_that_is_stopped(llm: LLM, thread: InferenceThread) -> None:
    assert llm.tokenizer is not None
    voice = Voice(thread, CheckpointText(llm.tokenizer, llm.template))
    stream = voice.stream(llm.encode("hello"), SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert idle(llm)
    deltas = list(voice.stream(llm.encode("hello"), SamplingParams(max_tokens=4, temperature=0)))
    assert deltas[-1].output is not None and deltas[-1].output.usage.completion_tokens == 4
    voice.close()
    assert idle(llm)
