"""What requests may ask for, on a tiny model: ends, log-probabilities, limits, memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, models
from slipstream.config import Config, ConfigError, override
from slipstream.draft.lookup import Lookup
from slipstream.engine import memory
from slipstream.engine.build import generation_defaults
from slipstream.engine.cache import Cache
from slipstream.engine.engine import Engine, resolve
from slipstream.engine.serving import InferenceThread
from slipstream.kernels.types import PAGE
from slipstream.models.stores import Paged
from slipstream.request import Output, Request, RequestError
from slipstream.weights.reader import open_directory
from tests import tiny
from tests.toys import Oracle

CPU = torch.device("cpu")
PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> tuple[Any, Path]:
    path = tiny.write(tmp_path_factory.mktemp("tiny"), tiny.QWEN, seed=7)
    return models.build(open_directory(path), torch.float64, CPU), path


def run(engine: Engine, prompt: tuple[int, ...] = PROMPT, **wanted: Any) -> list[Output]:
    """One request's outputs."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **wanted})
    engine.add(Request("a", prompt, params))
    outputs = []
    while engine.busy:
        outputs += engine.step()
        engine.cache.check()
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [t for o in outputs for t in o.tokens]


def drafted(model: tuple[Any, Path], text: list[int], **more: Any) -> Engine:
    """An engine whose drafts are nearly always right."""
    return tiny.engine(
        *model,
        drafter=lambda i, lim, _: Oracle(
            i.history, i.length, lim.drafts, [text], right=0.97, seed=2
        ),
        row_cost=0.0,
        **more,
    )


@pytest.fixture(scope="module")
def plain(model: tuple[Any, Path]) -> list[int]:
    return tokens(run(tiny.engine(*model), ignore_eos=True))


def test_a_stop_id_inside_a_block_ends_the_text(model: Any, plain: list[int]) -> None:
    at = next(i for i in range(5, 24) if plain[i] not in plain[:i])
    engine = drafted(model, [*PROMPT, *plain])
    outputs = run(engine, stop_token_ids=(plain[at],), ignore_eos=True)
    assert tokens(outputs) == plain[: at + 1]
    assert (outputs[-1].finish, outputs[-1].stop_reason) == ("stop", plain[at])
    assert outputs[-1].usage.completion_tokens == at + 1
    assert len(outputs) < at, "the drafts did not stand, so this test shows nothing"
    assert engine.cache.available == len(engine.cache.refs) - 1


def test_the_end_token_counts_unless_ignored(model: Any, plain: list[int]) -> None:
    end = next(t for i, t in enumerate(plain) if i >= 3 and t not in plain[:i])
    engine = tiny.engine(*model, ends=(end,))
    assert tokens(run(engine)) == plain[: plain.index(end) + 1]
    assert tokens(run(engine, ignore_eos=True)) == plain


def test_min_tokens_keeps_end_ids_out(model: Any, plain: list[int]) -> None:
    end = plain[2]
    for engine in (
        tiny.engine(*model, ends=(end,)),
        drafted(model, [*PROMPT, *plain], ends=(end,)),
    ):
        text = tokens(run(engine, min_tokens=10))
        assert end not in text[:10]
        assert len(text) >= 10


def test_max_tokens_and_context_end_with_length(model: Any) -> None:
    for engine in (tiny.engine(*model, context=128), drafted(model, [], context=128)):
        outputs = run(engine, max_tokens=7, ignore_eos=True)
        assert (len(tokens(outputs)), outputs[-1].finish) == (7, "length")
        outputs = run(engine, max_tokens=None, ignore_eos=True)
        assert (len(tokens(outputs)), outputs[-1].finish) == (108, "length")


def test_logprobs_under_speculation_are_those_of_plain_decoding(
    model: Any, plain: list[int]
) -> None:
    """One entry per token, end token included; the model's own, whatever temperature and masks."""
    wanted = {"logprobs": 5, "logit_bias": {plain[3]: -3.0}, "repetition_penalty": 1.1}
    want = run(tiny.engine(*model), **wanted)
    text = tokens(want)
    got = run(drafted(model, [*PROMPT, *text]), **wanted)
    assert len(got) < len(want) - 4
    flat = [[p for o in outputs for p in o.logprobs] for outputs in (want, got)]
    assert [p.token for p in flat[0]] == [p.token for p in flat[1]] == text
    for a, b in zip(*flat, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
        assert a.rank == b.rank
        assert [t for t, _ in a.top] == [t for t, _ in b.top]
        assert a.logprob < 0
        assert len(a.top) == 5
        if a.rank < 5:
            assert a.top[a.rank] == (a.token, a.logprob)


def test_logprobs_equal_a_forward_pass(model: Any, plain: list[int]) -> None:
    """Against prompt log-probabilities of the whole text, computed in chunks."""
    text = (*PROMPT, *plain)
    [entry] = run(tiny.engine(*model), prompt=text, max_tokens=1, prompt_logprobs=3)[-1:]
    assert entry.prompt_logprobs is not None
    assert entry.prompt_logprobs[0] is None
    assert len(entry.prompt_logprobs) == len(text)
    decoded = [p for o in run(tiny.engine(*model), logprobs=3, ignore_eos=True) for p in o.logprobs]
    for p, d in zip(entry.prompt_logprobs[len(PROMPT) :], decoded, strict=True):
        assert p is not None
        assert p.token == d.token
        assert p.logprob == pytest.approx(d.logprob, abs=1e-8)


def test_prompt_logprobs_of_a_long_prompt_ignore_the_prefix_cache(model: Any) -> None:
    prompt = tuple((7 * i) % 90 + 2 for i in range(300))
    engine = tiny.engine(*model, tokens=100)
    first = run(engine, prompt, max_tokens=1)[-1]
    again = run(engine, prompt, max_tokens=1, prompt_logprobs=0)[-1]
    assert first.usage.cached_tokens == again.usage.cached_tokens == 0
    assert again.prompt_logprobs is not None
    assert len(again.prompt_logprobs) == 300
    assert run(engine, prompt, max_tokens=1)[-1].usage.cached_tokens == 256


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (5, 97)}, "97"),
        ({"prompt": tuple([3] * 1024)}, "1024 tokens"),
        ({"stop_token_ids": (200,)}, "200"),
        ({"logit_bias": {99: 1.0}}, "99"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(model: Any, change: Any, match: str) -> None:
    engine = tiny.engine(*model)
    with pytest.raises(RequestError, match=match):
        run(engine, **change)
    assert not engine.busy


def test_nothing_is_allocated_after_the_start(model: Any) -> None:
    engine = drafted(model, [])
    before = [(t.data_ptr(), t.numel()) for t in (*engine.cache.tensors(), *engine.draft)]
    before.append((engine.inputs.history.data_ptr(), engine.inputs.history.numel()))
    for n in (3, 64, 200, 65):
        run(engine, tuple((i * n) % 90 + 2 for i in range(n)), temperature=1.0)
    after = [(t.data_ptr(), t.numel()) for t in (*engine.cache.tensors(), *engine.draft)]
    after.append((engine.inputs.history.data_ptr(), engine.inputs.history.numel()))
    assert after == before


def test_the_plan_is_what_is_allocated(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.QWEN)
    llm = LLM(str(path), limits__seqs=3, limits__context=512, device="cpu")
    rows = {r.name: r.bytes for r in llm.plan.rows}
    cache: Cache = llm.engine.cache
    # Two layers have pages: the attention layer and the MTP head's.
    assert rows["pages"] == cache.nbytes("pages") == 2 * 2 * 4 * 64 * 2 * 16 * llm.plan.pages
    assert rows["drafters"] > 0
    assert rows["slots"] == cache.nbytes("slots")
    assert rows["weights"] > 4 * 97 * 48 * 2
    assert memory.plan_for(str(path), llm.config) == llm.plan
    wrong = {"weights": rows["weights"] * 2 + 2**22}
    with pytest.raises(ValueError, match="were planned"):
        memory.check(llm.plan, wrong)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"limits.context": 9999}, "4096"),
        ({"limits.tokens": 20}, "72 rows"),
        ({"limits.seqs": 0}, "seqs is 0"),
        ({"limits.span": 0}, "span is 0"),
        ({"cache.memory": 0.0001}, "lower limits.context"),
        ({"cache.snapshot_every": 100}, "multiple of 64"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda"}, "CPU only"),
        ({"threads": -1}, "threads is -1"),
        ({"cache.memory": float("inf")}, "cache.memory is inf"),
        ({"cache.snapshots": float("nan")}, "cache.snapshots is nan"),
        ({"cache.snapshots": 60000.0}, "this machine has"),
        ({"limits.context": 1}, "2 or more"),
        ({"limits.seqs": 10**7, "limits.tokens": 10**8}, "1024 or less"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path: Path, settings: Any, match: str) -> None:
    path = tiny.write(tmp_path, tiny.QWEN)
    config = override(Config(), {"model": str(path), "device": "cpu", **settings})
    with pytest.raises(ConfigError, match=match):
        memory.plan_for(str(path), config)


def test_eviction_never_strands_a_snapshot(model: Any) -> None:
    """Random texts through a small pool; every snapshot's pages stay, and every page is found."""
    engine = tiny.engine(*model, pages=12, context=512, snapshot_every=64)
    for i in range(25):
        run(
            engine,
            tuple((j * (i % 7 + 1)) % 90 + 2 for j in range(40 + 17 * i % 300)),
            max_tokens=9,
        )
        prefix = engine.cache.prefix
        assert prefix is not None
        resumable = [n for n in prefix.nodes.values() if n.snapshot]
        for node in resumable:
            assert [n.depth for n in node.path()] == list(range(1, node.depth + 1))
    assert engine.cache.available == 11


@pytest.mark.parametrize("again", [{"max_tokens": 200}, {"max_tokens": 200, "prompt_logprobs": 0}])
@pytest.mark.parametrize("snapshots", [0.0, 1.0])
def test_a_request_fits_beside_a_cached_copy_of_itself(
    model: Any, again: dict[str, Any], snapshots: float
) -> None:
    """In the smallest pool: pages that only the cache holds must all be there for the taking."""
    prompt = tuple((7 * i) % 90 + 2 for i in range(300))
    engine = tiny.engine(*model, seqs=1, context=512, pages=10, snapshots=snapshots)
    run(engine, prompt, max_tokens=2)
    engine.add(Request("b", prompt, SamplingParams(temperature=0.0, ignore_eos=True, **again)))
    for _ in range(400):
        if not engine.busy:
            break
        engine.step()
        engine.cache.check()
    assert not engine.busy, "it preempts itself for ever"


def test_equal_prompts_in_a_crowd_share_their_pages(model: Any) -> None:
    prompt = tuple((7 * i) % 90 + 2 for i in range(200))
    engine = tiny.engine(*model, pages=30)
    for i in range(4):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
    texts: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            texts.setdefault(output.id, []).extend(output.tokens)
        engine.cache.check()
        running = [engine.cache.held[s.slot] for s in engine.scheduler.running if s.generated > 1]
        assert all(pages[:3] == running[0][:3] for pages in running)
    assert len({tuple(t) for t in texts.values()}) == 1


def test_a_prompt_that_ends_inside_a_page_begins_no_longer_one(model: Any) -> None:
    """Resuming at 100 would compute position 100 in another chunk than a fresh start does."""
    prompt = tuple((7 * i) % 90 + 2 for i in range(150))
    for by_text, cached in ((False, 64), (True, 100)):
        engine = tiny.engine(*model, by_text=by_text)
        engine.scheduler.keep_generated = True  # a snapshot at 100, where the prompt ends
        run(engine, prompt[:100], max_tokens=1)
        assert run(engine, prompt, max_tokens=1)[-1].usage.cached_tokens == cached


def test_adopted_text_that_is_gone_is_not_claimed(model: Any) -> None:
    """Preempted after a second turn, its text evicted: computed afresh, under fresh keys."""
    engine = tiny.engine(*model, pages=14, context=512)
    prompt = tuple((7 * i) % 90 + 2 for i in range(100))
    answer = tokens(run(engine, prompt, max_tokens=90, ignore_eos=True))
    second = (*prompt, *answer, 5, 6, 7)
    engine.add(Request("b", second, SamplingParams(max_tokens=30, ignore_eos=True)))
    engine.step()
    [sequence] = engine.scheduler.running
    assert sequence.adopted > 100
    engine.scheduler._preempt(sequence)
    prefix = engine.cache.prefix
    assert prefix is not None
    while (leaf := prefix.next_out(engine.cache.refs)) is not None:
        engine.cache._leave_tree(prefix.remove(leaf))
    while engine.busy:
        engine.step()
        engine.cache.check()
        assert sequence.adopted == 0
        assert all(kind != "c" for _, kind in sequence.lineage.events)


def test_more_end_ids_than_fit_are_refused_and_others_go_on(model: Any) -> None:
    engine = tiny.engine(*model, ends=tuple(range(2, 18)))
    with pytest.raises(RequestError, match="26 together"):
        run(engine, stop_token_ids=tuple(range(20, 30)))
    assert len(tokens(run(engine, max_tokens=3, ignore_eos=True))) == 3


def test_end_ids_outside_the_vocabulary_ban_nothing(model: Any) -> None:
    engine = tiny.engine(*model, ends=(-1, 500, 3))
    assert engine.ends == (3,)


def test_tokens_per_step_counts_tokens(model: Any, plain: list[int]) -> None:
    end = next(t for i, t in enumerate(plain) if i >= 6 and t not in plain[:i])
    outputs = run(drafted(model, [*PROMPT, *plain]), stop_token_ids=(end,), ignore_eos=True)
    spec = outputs[-1].speculation
    assert spec.tokens == len(tokens(outputs))
    assert spec.tokens_per_step == len(tokens(outputs)) / len(outputs)


def test_an_abort_while_queued_has_no_prompt_logprobs(model: Any) -> None:
    engine = tiny.engine(*model)
    engine.add(Request("a", PROMPT, SamplingParams(prompt_logprobs=0)))
    output = engine.abort("a")
    assert output is not None
    assert output.prompt_logprobs is None


def test_scopes_do_not_share_text(model: Any) -> None:
    engine = tiny.engine(*model)
    prompt = tuple((3 * i) % 90 + 2 for i in range(200))
    cached = []
    for i, scope in enumerate(("a", "b", "a")):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=2), scope))
        while engine.busy:
            for output in engine.step():
                cached_now = output.usage.cached_tokens
        cached.append(cached_now)
    assert cached == [0, 0, 192]


def test_a_branching_point_is_remembered(model: Any) -> None:
    """The second text that leaves a known one leaves a snapshot there; the third resumes at it."""
    engine = tiny.engine(*model)
    common = [(5 * i) % 90 + 2 for i in range(PAGE * 2 + 10)]
    cached = []
    for i in range(3):
        prompt = (*common, *([i + 3] * 150))
        cached.append(run(engine, prompt, max_tokens=1)[-1].usage.cached_tokens)
    assert cached == [0, 0, PAGE * 2]


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "seed", "top_p", "n"])
def test_parameters_of_another_type_are_named(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: "x"})  # type: ignore[arg-type]


def test_defaults_come_from_generation_config() -> None:
    assert generation_defaults({}).temperature == 0
    assert generation_defaults({"do_sample": False, "temperature": 0.7}).temperature == 0
    made = generation_defaults({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    assert (made.temperature, made.top_k, made.top_p) == (0.6, 20, 0.95)
    assert generation_defaults({"top_k": "many", "top_p": -1}).top_p == 1.0
    mild = generation_defaults({"do_sample": True, "min_p": 0.1, "repetition_penalty": 1.1})
    params = resolve(SamplingParams(), mild)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.1)
    params = resolve(SamplingParams(min_p=0.0, repetition_penalty=1.0), mild)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)


def test_llm_takes_ids_batches_and_several_answers(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.QWEN, seed=7)
    llm = LLM(str(path), device="cpu")
    greedy = SamplingParams(max_tokens=6)
    [one] = llm.generate([5, 6, 7], greedy)
    two = llm.generate([[5, 6, 7], [9, 10]], [greedy, SamplingParams(max_tokens=3)])
    assert [len(o.completions[0].token_ids) for o in two] == [6, 3]
    assert two[0].completions[0].token_ids == one.completions[0].token_ids
    sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=4, n=3)
    [many] = llm.generate([5, 6, 7], sampled)
    assert len({tuple(c.token_ids) for c in many.completions}) == 3
    [second] = llm.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=1.0, seed=5))
    assert second.completions[0].token_ids == many.completions[1].token_ids
    with pytest.raises(RequestError, match="tokenizer"):
        llm.generate("text")
    for wrong in ([[5, 6], 7], [5, "a"], [None], []):
        with pytest.raises(RequestError):
            llm.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="one each"):
        llm.generate([[5], [6]], [greedy])


def test_llm_streams_what_it_generates(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.QWEN, seed=7)
    llm = LLM(str(path), device="cpu")
    params = SamplingParams(max_tokens=20, n=2, temperature=1.0, seed=1)
    [want] = llm.generate([5, 6, 7], params)
    got: dict[int, list[int]] = {0: [], 1: []}
    ends = 0
    for delta in llm.stream([5, 6, 7], params):
        got[delta.index] += delta.token_ids
        ends += delta.finish is not None
        last = delta
    assert [got[i] for i in (0, 1)] == [c.token_ids for c in want.completions]
    assert ends == 2
    assert last.output is not None
    assert last.output.usage.completion_tokens == 40
    for taken in (0, 1):
        stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=500))
        assert llm.engine.busy
        for _ in range(taken):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert not llm.engine.busy
    llm.engine.cache.check()


def test_an_interrupted_step_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tiny.write(tmp_path, tiny.QWEN, seed=7)
    llm = LLM(str(path), device="cpu")
    prompt = [int(t) for t in range(2, 90)]
    [want] = llm.generate(prompt, SamplingParams(max_tokens=9))
    llm = LLM(str(path), device="cpu")
    commit, calls = llm.engine.cache.commit, 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        commit(*args)

    llm.engine.cache.commit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, SamplingParams(max_tokens=9))
    assert not llm.engine.busy
    llm.engine.cache.check()
    [got] = llm.generate(prompt, SamplingParams(max_tokens=9))
    assert got.completions[0].token_ids == want.completions[0].token_ids


def test_the_inference_thread_serves_many_and_outlives_those_who_leave(model: Any) -> None:
    engine = tiny.engine(
        *model, seqs=4, drafter=lambda i, lim, _: Lookup(i.history, i.length, lim.drafts)
    )
    alone = {
        n: tokens(run(tiny.engine(*model), PROMPT[: n + 3], ignore_eos=True)) for n in range(9)
    }
    thread = InferenceThread(engine)

    async def ask(n: int, leave: bool) -> list[int]:
        request = Request(
            f"t{n}{leave}", PROMPT[: n + 3], SamplingParams(max_tokens=24, ignore_eos=True)
        )
        got: list[int] = []
        stream = thread.submit(request)
        async for output in stream:
            got += output.tokens
            if leave and len(got) > 3:
                await stream.aclose()  # type: ignore[attr-defined]
                break
        return got

    async def everyone() -> list[list[int]]:
        return await asyncio.gather(*(ask(n, leave) for n in range(9) for leave in (False, True)))

    results = asyncio.run(everyone())
    thread.close()
    for n in range(9):
        assert results[2 * n] == alone[n]
        assert results[2 * n + 1] == alone[n][: len(results[2 * n + 1])]
    assert not engine.scheduler.running
    assert engine.cache.available == len(engine.cache.refs) - 1
    engine.cache.check()
    with pytest.raises(RuntimeError, match="shut down"):
        asyncio.run(ask(1, False))


def test_a_failing_step_ends_its_requests_and_no_others(model: Any) -> None:
    engine = tiny.engine(*model)
    broken = engine.run_target
    engine.run_target = lambda batch: (_ for _ in ()).throw(ArithmeticError("no"))  # type: ignore
    thread = InferenceThread(engine)

    async def ask(id: str) -> list[Output]:
        stream = thread.submit(Request(id, PROMPT, SamplingParams(max_tokens=4)))
        return [output async for output in stream]

    [output] = asyncio.run(ask("x"))
    assert output.finish == "abort"
    assert output.error
    engine.run_target = broken  # type: ignore[method-assign]
    assert len(tokens(asyncio.run(ask("y")))) == 4
    thread.close()
    engine.cache.check()


def test_nobody_waits_for_an_answer_that_never_comes(model: Any) -> None:
    """Closing, doubled ids, a receiver that fails, an iterator that is never asked."""
    engine = tiny.engine(*model)
    thread = InferenceThread(engine)
    params = SamplingParams(max_tokens=300, ignore_eos=True)

    async def scene() -> None:
        unread = thread.submit(Request("unread", PROMPT, params))
        await unread.aclose()  # type: ignore[attr-defined]
        first = thread.submit(Request("same", PROMPT, params))
        with pytest.raises(RuntimeError, match="open already"):
            thread.submit(Request("same", PROMPT, params))
        broken = thread.submit(Request("broken", PROMPT, params))

        def fail(output: Output) -> None:
            raise RuntimeError("nobody is there")

        with thread._ready:
            thread._receivers["broken"] = fail
        del broken
        got = [o async for o in first]
        assert got[-1].finish == "length"
        late = thread.submit(Request("late", PROMPT, params))
        await asyncio.to_thread(thread.close)
        assert [o async for o in late][-1].finish == "abort"

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert not engine.busy
    engine.cache.check()


def test_pages_of_a_declared_layer_hold_what_the_table_says() -> None:
    """A cache by itself: two slots never share a page they may write."""
    from slipstream.engine.batch import Limits, Sequence
    from slipstream.engine.prefix import Lineage

    limits = Limits(2, 128, 4, 256)
    cache = Cache((Paged(1, 2),), limits, 12, torch.float32, CPU, prefix=1)
    made = []
    for i in range(2):
        s = Sequence(
            Request(str(i), (1,) * 70, SamplingParams()), SamplingParams(), [1] * 70, 70, 80,
            frozenset(), Lineage("", 70), 0,
        )  # fmt: skip
        assert cache.admit(s) is not None
        assert cache.reserve(s.slot, 71)
        made.append(s)
    pages = [set(cache.held[s.slot]) for s in made]
    assert not pages[0] & pages[1]
    assert 0 not in pages[0] | pages[1]
    cache.release(made[0].slot)
    cache.check()
