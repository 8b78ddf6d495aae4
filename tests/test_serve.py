"""The serve command in a process of its own, with a fake engine: start, signals, wrong addresses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.__main__ import main
from slipstream.cli.serve import name_of
from slipstream.server import local

KEY = "sk-1"
ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys
sys.path.insert(0, "tests")
from fake import ByteText, FakeEngine
from slipstream.__main__ import main
from slipstream.server import local, text

def load(config, announce):
    announce("the plan")
    print("loading", config.model, config.limits.seqs, flush=True)
    engine = FakeEngine(answer=lambda request: "x" * 1000, block=5, pace=0.02)
    def close():
        engine.close()
        print("closed", engine.about().running, len(engine.aborted), flush=True)
    return local.Loaded(engine, ByteText(), None, close)

local.load = load
text.CheckpointText = lambda tokenizer, *_: tokenizer
main(["serve", *sys.argv[1:]])
"""


class Served:
    """A running serve command."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if " at http" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.lines[-1])
        assert found, self.process.communicate()
        self.url = found.group()

    def stream(self, text: list[str], begun: threading.Event, tokens: int) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with (
            httpx.Client(trust_env=False, verify=False, timeout=20) as client,
            client.stream(
                "POST",
                f"{self.url}/chat/completions",
                json={**body, "max_tokens": tokens},
                headers={"Authorization": f"Bearer {KEY}"},
            ) as answer,
        ):
            for line in answer.iter_lines():
                text.append(line)
                begun.set()

    def begin(self, tokens: int) -> tuple[threading.Thread, list[str]]:
        """A client that streams in a thread, once its first line is there."""
        text: list[str] = []
        begun = threading.Event()
        thread = threading.Thread(target=self.stream, args=(text, begun, tokens))
        thread.start()
        assert begun.wait(10)
        return thread, text

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def served() -> Iterator[Any]:
    made: list[Served] = []

    def start(*args: str) -> Served:
        made.append(Served(*args))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        for pipe in (one.process.stdout, one.process.stderr):
            assert pipe is not None
            pipe.close()


def test_start_and_graceful_end(served: Any) -> None:
    one = served("--model", "smollm2", "--limits-seqs", "3", "--log-level", "info")
    assert one.lines[:2] == ["the plan", "loading smollm2 3"]
    assert one.lines[2] == f"serving smollm2 at {one.url}"
    thread, text = one.begin(tokens=200)  # takes 0.8 s more
    one.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out, err = one.end()
    thread.join()
    assert time.monotonic() - began < 5
    assert code == 0
    assert out == "closed 0 0\n"
    assert text[-2] == "data: [DONE]"
    said = [json.loads(line[6:]) for line in text if line.startswith("data: {")]
    assert sum(len(c["choices"][0]["delta"].get("content", "")) for c in said) == 200
    assert said[-1]["choices"][0]["finish_reason"] == "length"
    assert "POST /v1/chat/completions 200" in err and "completion=200" in err
    assert err.count("\n") == 1


def test_after_the_grace_answers_are_aborted(served: Any) -> None:
    one = served("--grace", "0.3", "--served-model-name", "a", "--served-model-name", "b/c")
    assert one.lines[-1].startswith("serving a, b/c at ")
    thread, text = one.begin(tokens=1000)  # takes 4 s
    one.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out, err = one.end()
    thread.join()
    assert 0.25 < time.monotonic() - began < 3
    assert (code, out, err) == (0, "closed 0 1\n", "")
    [error] = [line for line in text if '"error"' in line]
    assert "ending" in error


def test_a_second_signal_hurries(served: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    one = served("--grace", "60", "--api-key-file", str(tmp_path / "keys"))
    assert httpx.get(f"{one.url}/models").status_code == 401
    thread, text = one.begin(tokens=1000)
    one.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert one.process.poll() is None
    one.process.send_signal(signal.SIGINT)
    code, out, err = one.end()
    thread.join()
    assert (code, out, err) == (0, "closed 0 1\n", "")
    assert any("ending" in line for line in text)


def test_addresses_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(config: Any, announce: Any) -> None:
        raise AssertionError("a wrong address is known before minutes of loading")

    monkeypatch.setattr(local, "load", load)

    def refused(*args: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["serve", *args])
        assert left.value.code == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith("error: ")
        return err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = refused("--port", str(port))
    assert f"127.0.0.1 port {port}" in err and "Address already in use" in err and "--port" in err
    assert "'no.such.host.invalid'" in refused("--host", "no.such.host.invalid")
    assert "--host" in refused("--host", "192.0.2.1")  # an address reserved for documentation
    assert "No such file" in refused("--api-key-file", str(tmp_path / "none"))


def test_names(tmp_path: Path) -> None:
    (tmp_path / "Some-Model").mkdir()
    (tmp_path / "small.gguf").write_bytes(b"")
    assert name_of(str(tmp_path / "Some-Model")) == "Some-Model"
    assert name_of(str(tmp_path / "small.gguf")) == "small"
    assert name_of("Qwen/Qwen3.5-0.8B") == "Qwen/Qwen3.5-0.8B"
    assert name_of("smollm2") == "smollm2"
