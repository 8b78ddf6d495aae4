"""The command line, with a stand-in for the engine: options, output, errors, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.__main__ import main
from slipstream.cli import COMMANDS
from slipstream.cli.settings import read_toml, settings
from slipstream.config import Config, ConfigError
from slipstream.request import SamplingParams, Speculation, Timing, TokenLogprob, Usage

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Completion:
    text: str
    token_ids: list[int]
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Output:
    completions: list[Completion]
    usage: Usage
    timing: Timing
    speculation: Speculation


@dataclass
class Delta:
    text: str
    output: Output | None = None


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class Marks:
    """A chat template that shows its messages."""

    def render(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@dataclass
class Calls:
    """What the command did with the engine."""

    config: Config | None = None
    prompt: str | list[int] = ""
    params: SamplingParams | None = None
    fail: Callable[[], None] = lambda: None
    template: Marks | None = field(default_factory=Marks)
    tokenizer: Bytes | None = field(default_factory=Bytes)

    def answer(self, prompt: str | list[int], params: SamplingParams) -> Output:
        self.prompt, self.params = prompt, params
        logprobs = [TokenLogprob(104, -0.5, ((104, -0.5), (105, -1.0)))]
        completion = Completion("hé\nlo", [104], logprobs=logprobs if params.logprobs else None)
        spec = Speculation(
            steps=2, tokens=5, drafted=4, accepted=3, accepted_by_source={"lookup": 3}
        )
        return Output([completion], Usage(9, 5, 2), Timing(0.0, 0.5, 2.5), spec)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()

    class LLM:
        def __init__(self, *, config: Config, announce: Callable[[Any], None]) -> None:
            made.config = config
            announce(types.SimpleNamespace(line="1 GiB planned"))
            made.fail()
            self.tokenizer, self.template = made.tokenizer, made.template
            self.context = 100

        def generate(self, prompts: list[str | list[int]], params: SamplingParams) -> list[Output]:
            return [made.answer(prompt, params) for prompt in prompts]

        def stream(self, prompt: str | list[int], params: SamplingParams) -> Iterator[Delta]:
            output = made.answer(prompt, params)
            for piece in ("h", "é\n", "", "lo"):
                yield Delta(piece)
            yield Delta("", output)

    module = types.ModuleType("slipstream.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.llm", module)
    return made


def call(*args: str) -> int:
    """The exit code of one command line."""
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return int(left.value.code or 0)


def test_help_is_light_and_names_every_command() -> None:
    code = "import sys; from slipstream.__main__ import main\ntry: main(['--help'])\n" + (
        "finally: print(sorted({'torch', 'transformers', 'fastapi'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.rstrip().endswith("[]"), out
    for name in COMMANDS:
        assert f"\n  {name} " in out.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("version") == 0
    assert capsys.readouterr().out.startswith("slipstream 0.")


def test_text_streams_and_statistics_go_aside(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("run", "hi") == 0
    out, err = capsys.readouterr()
    assert out == "hé\nlo\n"
    assert err.startswith("1 GiB planned\n5 tokens at")
    assert err.count("\n") == 2
    assert "5 tokens at 2.0 tokens/s (2.50 a step)" in err
    assert calls.prompt == list(b"<user>hi<assistant>")


def test_json_is_one_object(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "hi", "--json", "--logprobs", "2", "--model", "m") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert (record["model"], record["text"], record["token_ids"]) == ("m", "hé\nlo", [104])
    assert record["finish_reason"] == "stop"
    assert record["usage"] == {"prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 2}
    assert record["timing"]["ttft_ms"] == 500
    assert record["timing"]["tokens_per_s"] == 2.0
    assert record["timing"]["prompt_tokens_per_s"] == 14.0
    assert record["timing"]["load_s"] >= 0
    assert record["speculation"] == {
        "tokens_per_step": 2.5,
        "steps": 2,
        "drafted": 4,
        "accepted": 3,
        "accepted_by_source": {"lookup": 3},
    }
    assert record["logprobs"][0]["text"] == "h"
    assert record["logprobs"][0]["top"][1] == {"token": 105, "logprob": -1.0}
    assert err == "1 GiB planned\n"


def test_sampling_options_reach_the_engine(calls: Calls) -> None:
    line = "run hi --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --seed 11"
    assert call(*line.split(), "--stop", "a", "--stop", "b c", "--ignore-eos") == 0
    assert calls.params == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=11,
        stop=("a", "b c"),
        ignore_eos=True,
    )


def test_prompt_from_standard_input(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("früh\n".encode())))
    assert call("run", "-", "--raw") == 0
    assert calls.prompt == "früh\n"


def test_standard_input_that_is_not_text(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert call("run", "-") == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_system_message_goes_first(calls: Calls) -> None:
    assert call("run", "hi", "--system", "be brief") == 0
    assert calls.prompt == list(b"<system>be brief<user>hi<assistant>")


def test_without_a_template_the_prompt_stays_as_it_is(calls: Calls) -> None:
    calls.template = None
    assert call("run", "hi") == 0
    assert calls.prompt == "hi"


@pytest.mark.parametrize("leaf", list(settings()), ids=lambda leaf: leaf.path)
def test_every_setting_is_an_option(calls: Calls, leaf: Any) -> None:
    values = {int: 3, float: 0.5, str: "x"}
    choices = getattr(leaf.hint, "__args__", ())
    wanted = (
        not leaf.default
        if leaf.hint is bool
        else choices[-1]
        if choices and choices[-1] != leaf.default
        else choices[0]
        if choices
        else values[leaf.hint]
    )
    given = [f"--{'' if wanted else 'no-'}{leaf.option}"]
    if leaf.hint is not bool:
        given = [f"--{leaf.option}", str(wanted)]
    assert call("run", "hi", *given) == 0
    node: Any = calls.config
    for part in leaf.path.split("."):
        node = getattr(node, part)
    assert node == wanted
    changed = sum(a != b for a, b in zip(_values(calls.config), _values(Config()), strict=True))
    assert changed == 1


def _values(config: Config | None) -> list[Any]:
    return [leaf.default for leaf in settings(config)]


def test_options_win_over_the_file(calls: Calls, tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('model = "m"\n[limits]\nseqs = 2\nspan = 4\n[cache]\nmemory = 1\n')
    assert call("run", "hi", "--config", str(file), "--limits-seqs", "5") == 0
    assert calls.config is not None
    assert (calls.config.model, calls.config.limits.seqs, calls.config.limits.span) == ("m", 5, 4)
    assert calls.config.cache.memory == 1.0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("seqs = ", "not a TOML file"),
        ("[limits]\nsequences = 3", "limits.sequences"),
        ('[limits]\nseqs = "many"', "limits.seqs"),
        ('dtype = "int3"', "dtype"),
        ("limits = 3", "limits"),
    ],
)
def test_a_bad_file_is_one_line(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, word: str
) -> None:
    file = tmp_path / "s.toml"
    file.write_text(text)
    assert call("run", "hi", "--config", str(file)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "walk",
        "run",
        "run hi --no-such-option",
        "run hi --max-tokens many",
        "run hi --max-tokens 0",
        "run hi --temperature -1",
        "run hi --raw --system x",
        "run hi --logprobs 1",
        "run hi --dtype int3",
        "plan --limits-seqs few",
    ],
)
def test_wrong_usage_exits_2(calls: Calls, capsys: pytest.CaptureFixture[str], line: str) -> None:
    assert call(*line.split()) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert calls.prompt == ""


@pytest.mark.parametrize(
    "model", ["", " ", "nowhere", "/nowhere/at/all", "./nowhere", "no where/x"]
)
def test_a_model_that_is_not_there_is_wrong_usage(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (("run", "hello"), ("plan",), ("chat",), ("serve",), ("bench", "steps")):
        assert call(*command, "--model", model) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        assert "give a" in err


def test_an_empty_prompt_is_refused(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "") == 2
    assert "prompt is empty" in capsys.readouterr().err


def test_no_tokenizer_no_text(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.tokenizer = None
    assert call("run", "hi") == 2
    assert "tokenizer.json" in capsys.readouterr().err


class CheckpointError(ValueError):
    """As raised by a reader of checkpoints."""


CheckpointError.__module__ = "slipstream.weights.reader"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            CheckpointError("shard 2 of 3 is\n  missing: fetch it"),
            "shard 2 of 3 is missing: fetch it",
        ),
        (FileNotFoundError(2, "No such file or directory", "/x"), "/x: No such file or directory"),
        (KeyError("w"), "KeyError: 'w' (run again with --debug for the traceback)"),
        (ValueError("odd"), "ValueError: odd (run again with --debug for the traceback)"),
    ],
)
def test_a_failure_is_one_line(
    calls: Calls, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    calls.fail = raising(error)
    assert call("run", "hi") == 1
    assert capsys.readouterr().err == f"1 GiB planned\nerror: {told}\n"


def test_debug_shows_the_traceback(calls: Calls) -> None:
    calls.fail = raising(KeyError("w"))
    with pytest.raises(KeyError):
        main(["run", "hi", "--debug"])


def test_interrupt_is_quiet(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.fail = raising(KeyboardInterrupt())
    assert call("run", "hi") == 130
    assert capsys.readouterr().err.strip() == "1 GiB planned"


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_reader_that_leaves_is_no_error() -> None:
    code = textwrap.dedent("""
        import sys, types
        from slipstream.__main__ import main

        class LLM:
            tokenizer, template = object(), None
            def __init__(self, config, announce): pass
            def stream(self, prompt, params):
                while True:
                    yield types.SimpleNamespace(text="x" * 4096, output=None)

        sys.modules["slipstream.llm"] = types.SimpleNamespace(LLM=LLM)
        main(["run", "hi"])
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10) == b"x" * 10
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) in (0, 1)
    process.stderr.close()


def test_plan_prints_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass
    class Plan:
        rows: tuple[tuple[str, int], ...] = (("weights", 3), ("pages", 4))
        total: int = 7

        def __str__(self) -> str:
            return "weights 3\npages 4\ntotal 7"

    module = types.ModuleType("slipstream.engine.memory")
    module.plan_for = lambda model, config: Plan()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slipstream.engine.memory", module)
    assert call("plan", "--model", "m") == 0
    assert capsys.readouterr().out == "weights 3\npages 4\ntotal 7\n"
    assert call("plan", "--model", "m", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total"] == 7
