"""What /metrics says: exact counts of scripted outputs, of a fake engine and of a real tiny one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write
from fake import FakeEngine, ServingFacts
from prometheus_client.parser import text_string_to_metric_families
from served import HELLO, Site

from slipstream.engine.serving import InferenceThread
from slipstream.llm import LLM
from slipstream.request import (
    Output,
    Request,
    RequestError,
    SamplingParams,
    Speculation,
    Timing,
    Usage,
)
from slipstream.server.metrics import Metrics
from slipstream.server.text import CheckpointText

Samples = dict[tuple[str, ...], float]


def samples(page: str) -> Samples:
    """Values by name and label values, without the prefix."""
    return {
        (sample.name.removeprefix("slipstream_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def read(site: Site) -> Samples:
    answer = site.http.get(f"{site.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return samples(answer.text)


class Script:
    """A Serving that answers every request with the same outputs; an exception is raised."""

    def __init__(self, *outputs: Output | BaseException) -> None:
        self.outputs = outputs
        self.aborted: list[str] = []

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        for output in self.outputs:
            if isinstance(output, BaseException):
                raise output
            yield output

    def abort(self, id: str) -> None:
        self.aborted.append(id)

    def about(self) -> ServingFacts:
        return ServingFacts("script", 100, 10, 3, 2)


REQUEST = Request("r", (1, 2, 3), SamplingParams())
SPEC = Speculation(
    steps=3,
    tokens=6,
    drafted=5,
    accepted=3,
    accepted_by_source={"lookup": 2, "mtp": 1},
    drafted_by_source={"lookup": 3, "mtp": 2},
    drafted_by_position=(2, 2, 1),
    accepted_by_position=(2, 1, 0),
    lengths=(1, 0, 1, 1),
)
FIRST = Output("r", (5,), ("target",), usage=Usage(3, 1, 2), timing=Timing(0.25, 0.5, 0.5))
LAST = Output(
    "r",
    (6, 7, 8, 9, 4),
    ("lookup", "lookup", "mtp", "mtp", "target"),
    finish="stop",
    usage=Usage(3, 6, 2),
    timing=Timing(0.25, 0.5, 1.5),
    speculation=SPEC,
)


def follow(serving: Any, leave: int | None = None) -> Metrics:
    """Metrics after one request; its reader leaves after so many outputs."""
    metrics = Metrics(serving)

    async def run() -> None:
        outputs: Any = metrics.submit(REQUEST)
        seen = 0
        try:
            async for _ in outputs:
                seen += 1
                if seen == leave:
                    break
        finally:
            await outputs.aclose()

    asyncio.run(run())
    return metrics


def page(metrics: Metrics) -> Samples:
    return samples(bytes(asyncio.run(metrics.page()).body).decode())


def test_every_count_of_an_answer() -> None:
    found = page(follow(Script(FIRST, LAST)))
    wanted: Samples = {
        ("requests_total", "stop"): 1,
        ("num_requests_running",): 3,
        ("num_requests_waiting",): 2,
        ("prompt_tokens_total",): 3,
        ("prefix_cache_queries_total",): 3,
        ("prefix_cache_hits_total",): 2,
        ("generation_tokens_total", "target"): 2,
        ("generation_tokens_total", "lookup"): 2,
        ("generation_tokens_total", "mtp"): 2,
        ("spec_decode_num_draft_tokens_total", "lookup"): 3,
        ("spec_decode_num_draft_tokens_total", "mtp"): 2,
        ("spec_decode_num_accepted_tokens_total", "lookup"): 2,
        ("spec_decode_num_accepted_tokens_total", "mtp"): 1,
        ("spec_decode_num_draft_tokens_per_pos_total", "2"): 1,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 2,
        ("spec_decode_num_accepted_tokens_per_pos_total", "1"): 1,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 0,
        ("spec_decode_draft_length_count",): 3,
        ("spec_decode_draft_length_sum",): 5,
        ("spec_decode_draft_length_bucket", "0.0"): 1,
        ("spec_decode_draft_length_bucket", "2.0"): 2,
        ("tokens_per_step_count",): 2,
        ("tokens_per_step_sum",): 6,
        ("time_to_first_token_seconds_sum",): 0.5,
        ("request_queue_time_seconds_sum",): 0.25,
        ("time_per_output_token_seconds_sum",): 0.2,
        ("e2e_request_latency_seconds_sum",): 1.5,
    }
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("outputs", "leave", "reason"),
    [
        ((FIRST, LAST), 1, "stop"),  # a stop string, found in the text
        ((FIRST, Output("r", finish="length")), None, "length"),
        ((FIRST, Output("r", finish="abort")), None, "abort"),
        ((Output("r", finish="abort"),), None, "abort"),
        ((Output("r", finish="abort", error="why"),), None, "error"),
        ((FIRST, asyncio.CancelledError()), None, "abort"),
        ((FIRST, RuntimeError("broken")), None, "error"),
    ],
)
def test_how_requests_end(
    outputs: tuple[Output | BaseException, ...], leave: int | None, reason: str
) -> None:
    serving = Script(*outputs)
    metrics = Metrics(serving)

    async def run() -> None:
        followed: Any = metrics.submit(REQUEST)
        seen = 0
        try:
            async for _ in followed:
                seen += 1
                if seen == leave:
                    break
        except (asyncio.CancelledError, RuntimeError):
            pass
        await followed.aclose()

    asyncio.run(run())
    found = page(metrics)
    ends = {name[1]: value for name, value in found.items() if name[0] == "requests_total"}
    assert ends == {reason: 1}
    assert found["generation_tokens_total", "target"] == 1 if FIRST in outputs else True


def test_what_is_refused_is_not_counted() -> None:
    with pytest.raises(RequestError):
        follow(Script(RequestError("too long")))
    metrics = Metrics(Script(RequestError("too long")))
    assert not [name for name in page(metrics) if name[0] == "requests_total"]


def test_an_abort_goes_through() -> None:
    serving = Script()
    Metrics(serving).abort("r")
    assert serving.aborted == ["r"]


@pytest.fixture
def open_site() -> Any:
    made: list[Site] = []

    def open_one(engine: Any, text: Any = None, **options: Any) -> Site:
        made.append(Site(engine, text, **options))
        return made[-1]

    yield open_one
    for site in made:
        site.close()


def test_a_server_counts(open_site: Callable[..., Site]) -> None:
    site, other = open_site(FakeEngine()), open_site(FakeEngine())
    assert ("requests_total", "stop") not in read(site)
    whole = site.chat().json()["usage"]
    with site.http.stream("POST", f"{site.url}/v1/completions", json={"prompt": "x"}) as answer:
        assert answer.read()
    site.chat(max_tokens=2, n=3)
    site.chat(messages=[])
    found = read(site)
    assert found["requests_total", "stop"] == 2
    assert found["requests_total", "length"] == 3
    assert found["generation_tokens_total", "target"] > whole["completion_tokens"] + 6
    assert found["spec_decode_num_accepted_tokens_total", "lookup"] == 5
    assert found["num_requests_running",] == found["num_requests_waiting",] == 0
    assert not [n for n in read(other) if n[0] == "requests_total"], "each has its own registry"


def test_a_stop_string_is_a_stop(open_site: Callable[..., Site]) -> None:
    site = open_site(FakeEngine(answer=lambda request: "one two three four five six"))
    answer = site.chat(stop=["three"])
    assert answer.json()["choices"][0]["message"]["content"] == "one two "
    found = read(site)
    assert {n[1]: v for n, v in found.items() if n[0] == "requests_total"} == {"stop": 1}


def test_a_client_that_leaves_is_an_abort(open_site: Callable[..., Site]) -> None:
    site = open_site(FakeEngine(pace=0.02, block=1))
    body = {"messages": HELLO, "stream": True, "max_tokens": 1000, "ignore_eos": True}
    with site.http.stream("POST", f"{site.url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    assert site.engine.wait_idle()
    until = time.monotonic() + 5
    while ("requests_total", "abort") not in read(site) and time.monotonic() < until:
        time.sleep(0.01)
    assert read(site)["requests_total", "abort"] == 1


def test_keys_guard_it(open_site: Callable[..., Site]) -> None:
    site = open_site(FakeEngine(), keys={"ada": "secret"})
    assert site.http.get(f"{site.url}/metrics").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert site.http.get(f"{site.url}/metrics", headers=headers).status_code == 200


def test_a_real_engine(open_site: Callable[..., Site], tmp_path: Path) -> None:
    llm = LLM(str(write(tmp_path)), threads=1, limits__context=512, speculation__row_cost=0.01)
    assert llm.tokenizer is not None and llm.template is not None
    text = CheckpointText(llm.tokenizer, llm.template)
    site = open_site(InferenceThread(llm.engine), text)
    prompt = "tick tock " * 20
    usages = [
        site.complete(prompt=prompt, max_tokens=60, temperature=0, ignore_eos=True).json()["usage"]
        for _ in range(2)
    ]
    found = read(site)
    assert found["requests_total", "length"] == 2
    assert found["prompt_tokens_total",] == sum(u["prompt_tokens"] for u in usages)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert found["prefix_cache_hits_total",] == cached > 0
    tokens = {n[1]: v for n, v in found.items() if n[0] == "generation_tokens_total"}
    assert sum(tokens.values()) == 120 == found["tokens_per_step_sum",]
    drafted = found.get(("spec_decode_num_draft_tokens_total", "lookup"), 0)
    assert drafted == found["spec_decode_draft_length_sum",] > 0
    assert found["tokens_per_step_count",] == found["spec_decode_draft_length_count",]
    assert found["time_to_first_token_seconds_count",] == 2
    assert found["e2e_request_latency_seconds_count",] == 2
    named = [n for n in found if n[0] == "spec_decode_num_draft_tokens_per_pos_total"]
    assert sum(found[n] for n in named) == drafted
    parts = {n[1]: v for n, v in found.items() if n[0] == "step_seconds_total"}
    assert parts.keys() == {"plan", "target", "verify", "draft", "apply"}
    assert all(v > 0 for v in parts.values())
    assert read(site)["step_seconds_total", "target"] == parts["target"]  # nothing ran since
    assert found["num_preemptions_total",] == 0
