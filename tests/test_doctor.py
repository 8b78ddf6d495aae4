"""What doctor says of machines and checkpoints that lack something."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checkpoints import TEMPLATE, write
from safetensors.torch import load_file, save_file

from slipstream.__main__ import main
from slipstream.cli import doctor
from slipstream.cli.doctor import Finding, checkpoint, machine
from slipstream.llm import LLM


def of(findings: list[Finding], check: str) -> Finding:
    """The one finding of a check."""
    [found] = [finding for finding in findings if finding.check == check]
    return found


def failures(path: Path | str) -> dict[str, str]:
    return {f.check: f.detail for f in checkpoint(str(path)) if f.status == "fail"}


def change(path: Path, file: str, **changes: Any) -> None:
    there = path / file
    value = json.loads(there.read_text()) if there.exists() else {}
    there.write_text(json.dumps({**value, **changes}))


# Checkpoints


@pytest.mark.parametrize("config", [tiny.LLAMA, tiny.QWEN], ids=["llama", "qwen35"])
def test_a_whole_checkpoint_is_well(tmp_path: Path, config: dict[str, Any]) -> None:
    findings = list(checkpoint(str(write(tmp_path / "m", config))))
    assert {f.status for f in findings} == {"ok"}
    assert of(findings, "end tokens").detail == "256 <end>"
    assert "257 tokens, 300 rows" in of(findings, "tokenizer").detail
    assert "F32" in of(findings, "weights").detail
    assert "context 4096" in of(findings, "model").detail


def test_all_that_is_wrong_with_the_tensors_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    del stored["model.layers.2.input_layernorm.weight"]
    stored["model.norm.weight"] = torch.zeros(47)
    stored["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(48, 47)
    stored["model.layers.0.extra.weight"] = torch.zeros(3)
    save_file(stored, path / "model.safetensors")
    told = [f.detail for f in checkpoint(str(path)) if f.check == "tensors"]
    assert len(told) == 3
    assert told[0].startswith("2 missing: ")
    assert "layers.1.mlp.up_proj.weight" in told[0] and "layers.2.input_layernorm" in told[0]
    assert told[1].startswith("2 of a wrong shape: ")
    assert "model.norm.weight [47], not [48]" in told[1]
    assert "o_proj.weight [48, 47], not [48, 48]" in told[1]
    assert "extra.weight" in told[2]


def test_a_missing_shard(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    names = load_file(path / "model-00001-of-00002.safetensors")
    index = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    index["model.norm.weight"] = "model-00002-of-00002.safetensors"
    change(path, "model.safetensors.index.json", weight_map=index)
    assert "model-00002-of-00002.safetensors" in failures(path)["files"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "no model" in failures(tmp_path / "absent")["files"]
    assert failures(tmp_path)["files"]
    liar = tmp_path / "liar.gguf"
    liar.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    assert list(failures(liar)) == ["files"]


def test_an_unknown_family(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    change(path, "config.json", model_type="rwkv")
    told = failures(path)
    assert "'rwkv'" in told["model"] and "llama" in told["model"]
    assert set(told) == {"model", "room"}  # the rest is looked at all the same


def test_a_config_that_lacks_something(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    change(path, "config.json", hidden_size=None)
    assert "hidden_size" in failures(path)["tensors"]


def test_tokenizers(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    change(path, "config.json", eos_token_id=None)
    findings = list(checkpoint(str(path)))
    assert of(findings, "end tokens").status == "warn"
    (path / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in failures(path)["tokenizer"]
    (path / "tokenizer.json").unlink()
    assert "no tokenizer.json" in failures(path)["tokenizer"]


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m")
    tiny.write(path, tiny.LLAMA, vocab_size=200)
    told = failures(path)
    assert "257 tokens, 200 rows" in told["tokenizer"]


@pytest.mark.parametrize(
    ("template", "status", "word"),
    [
        ("{{ raise_exception('never') }}", "fail", "never"),
        ("{% for %}", "fail", "syntax"),
        ("hello", "fail", "without its text"),
        (None, "warn", "none"),
        (TEMPLATE + "{% if enable_thinking %}{% endif %}", "ok", "thinking"),
    ],
)
def test_templates(tmp_path: Path, template: str | None, status: str, word: str) -> None:
    path = write(tmp_path / "m")
    (path / "chat_template.jinja").unlink()
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    finding = of(list(checkpoint(str(path))), "template")
    assert finding.status == status
    assert word in finding.detail


def test_a_model_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m")
    monkeypatch.setattr(doctor, "free_memory", lambda: (1000, 2000))
    assert "limits.context" in failures(path)["room"]


# Machines


def test_this_machine() -> None:
    findings = list(machine())
    names = [f.check for f in findings]
    assert [n for n in names if not n.startswith(("gpu", "disk, "))] == [
        "python", "torch", "cpu", "memory", "triton", "c compiler", "disk",
    ]  # fmt: skip
    assert torch.__version__ in of(findings, "torch").detail
    free, total = doctor.free_memory()
    assert 0 < free <= total


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "_lines", lambda path: ['ID="fedora"', "ID_LIKE=rhel"])
    assert next(iter(doctor._compiler())).status == "warn"
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    [finding] = doctor._compiler()
    assert finding.status == "fail"
    assert "dnf install gcc" in finding.detail


@pytest.mark.parametrize(
    ("release", "command"),
    [
        (["ID=ubuntu", "ID_LIKE=debian"], "apt-get install gcc python3-dev"),
        (['ID="opensuse-tumbleweed"', 'ID_LIKE="opensuse suse"'], "zypper install"),
        (["ID=manjaro", "ID_LIKE=arch"], "pacman -S gcc"),
        (["ID=plan9"], "install gcc and"),
        ([], "install gcc and"),
    ],
)
def test_the_package_is_that_of_the_system(
    monkeypatch: pytest.MonkeyPatch, release: list[str], command: str
) -> None:
    monkeypatch.setattr(doctor, "_lines", lambda path: release)
    assert doctor._install().startswith(command)


def test_no_headers_and_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cc: error: no linker' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    [finding] = doctor._compiler()
    assert "no Python.h" in finding.detail
    (tmp_path / "Python.h").write_text("")
    [finding] = doctor._compiler()
    assert "no linker" in finding.detail and finding.status != "ok"


def test_a_gpu_without_a_cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    [finding] = doctor._gpus()
    assert finding.status == "fail" and "580.1" in finding.detail
    monkeypatch.setattr(doctor, "_driver", lambda: "")
    [finding] = doctor._gpus()
    assert finding.status == "ok"


@pytest.mark.parametrize(
    ("capability", "free", "status", "word"),
    [
        ((9, 0), 23, "ok", "capability 9.0"),
        ((7, 5), 23, "warn", "8.0"),
        ((8, 6), 9, "warn", "hold"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    free: int,
    status: str,
    word: str,
) -> None:
    about = types.SimpleNamespace(name="Card", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free * 2**30, 24 * 2**30))
    [finding] = doctor._gpus()
    assert finding.status == status
    assert word in finding.detail and f"{free}.0 GiB free of 24.0 GiB" in finding.detail


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    assert next(iter(doctor._triton())).status == "ok"
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    assert next(iter(doctor._triton())).status == "fail"
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="9.9"))
    assert next(iter(doctor._triton())).detail == "9.9"


def test_a_broken_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("libcudart.so.99: cannot open")

    monkeypatch.setattr(doctor, "_torch", broken)
    finding = of(list(machine()), "torch")
    assert finding.status == "fail" and "libcudart" in finding.detail


# The command


def call(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["doctor", *args])
    return int(left.value.code or 0)


def test_the_table_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "machine", lambda: iter([Finding("python", "ok", "fine")]))
    path = write(tmp_path / "m")
    assert call("--model", str(path)) == 0
    out = capsys.readouterr().out
    assert out.startswith("ok   python       fine\nok   files")
    assert call("--model", str(path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["findings"][0] == {"check": "python", "status": "ok", "detail": "fine"}
    (path / "tokenizer.json").unlink()
    assert call("--model", str(path)) == 1
    assert "\nfail tokenizer" in capsys.readouterr().out
    assert call("--model", str(path), "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert call() == 0


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", tiny.LLAMA)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    finding = of(list(checkpoint(str(path))), "numbers")
    assert finding.status == "fail"
    assert "model.norm.weight (1 of 48)" in finding.detail


JUNK = {
    "eos_token_id": ["x", 10**20, -1, 97, 1],
    "temperature": "hot",
    "top_k": -5,
    "top_p": 0.5,
}


def test_settings_that_make_no_sense_are_named(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m", tiny.LLAMA, quantization_config={"quant_method": "awq"})
    (path / "generation_config.json").write_text(json.dumps(JUNK))
    told = [f.detail for f in checkpoint(str(path)) if f.check == "settings"]
    for word in (
        "eos_token_id 'x'",
        f"eos_token_id {10**20}",
        "eos_token_id -1",
        "eos_token_id 97",
        "temperature 'hot'",
        "top_k -5",
        "'awq'",
    ):
        assert sum(f"{word} " in text or f"{word}," in text for text in told) == 1, (word, told)
    assert len(told) == 7
    warned: list[str] = []
    LLM(str(path), report=warned.append, dtype="float32", limits__context=256)
    assert [text for text in warned if text in told] == told
