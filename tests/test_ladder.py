"""The ladder of drafters: its prompts, its arithmetic, its picture, and one climb on a tiny model."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import asdict, replace
from pathlib import Path

import drafters
import pytest
import tokenizers
from checkpoints import TEMPLATE
from tokenizers import decoders, models, pre_tokenizers

from slipstream.__main__ import main
from slipstream.bench import ladder
from slipstream.bench.ladder import LENGTHS, STEPS, TASKS, Ladder, LengthRow, Row, measure
from slipstream.config import Config, ConfigError, override


def made(**changes: object) -> Ladder:
    """A ladder without a measurement: step i is i + 1 times as fast as plain."""
    rows = tuple(
        Row(step, task, 40, 1.0 + i, 10.0 * (i + 1), 50.0 / (i + 1), 1.0 + i, True)
        for i, step in enumerate(STEPS)
        for task in ("chat", "code")
    )
    totals = tuple(replace(row, task="all") for row in rows[::2])
    return replace(Ladder("m", "cpu", 2, "float32", 5, rows, totals), **changes)


def test_every_task_has_prompts() -> None:
    assert {path.name for path in ladder.PROMPTS.iterdir()} == set(TASKS)
    for task in TASKS:
        texts = ladder.prompts(task)
        assert len(texts) >= (1 if task == "reproduce" else 2), task  # one long text is enough
        assert len(set(texts)) == len(texts), task
        assert all(text.isascii() and text for text in texts), task


def test_prompts_to_reproduce_are_long() -> None:
    assert all(len(text) > 2000 for text in ladder.prompts("reproduce"))


def test_a_typo_is_there_to_be_fixed() -> None:
    for text, wrong in zip(ladder.prompts("edit"), ("agian", "fuond"), strict=True):
        assert wrong in text


def test_steps_begin_with_plain_and_end_with_everything() -> None:
    assert list(STEPS) == ["plain", "mtp", "dflash2", "lookup", "long", "prefix"]
    known = {}
    for _, settings in STEPS.values():
        known |= settings
    plain = STEPS["plain"][1]
    assert set(known) == set(plain), "every switch has its place in the plain step"
    assert all(known[name] != value for name, value in plain.items()), "and is thrown once"


def test_the_table_has_a_line_for_each_cell() -> None:
    text = str(made())
    assert text.startswith("m, float32, cpu, 2 threads, median of 5 interleaved rounds\n")
    assert "| chat | mtp | 2.00 | 20.0 | 2.00x | 25 | equal |" in text
    assert "| all | prefix | 6.00 | 60.0 | 6.00x | 8 | equal |" in text
    assert sum(line.startswith("| c") for line in text.splitlines()) == 2 * len(STEPS)
    assert "differ" not in text


def test_a_text_that_differs_is_said() -> None:
    good = made()
    bad = replace(good, rows=(*good.rows[:-1], replace(good.rows[-1], text=False)))
    assert good.equal
    assert not bad.equal
    assert "| differs |" in str(bad)
    assert "texts differ from plain decoding" in str(bad)


def test_lengths_are_compared_with_the_best() -> None:
    rows = tuple(
        LengthRow(n, task, 2.0, speed, True)
        for task in ("chat", "all")
        for n, speed in ((0, 98.0), (1, 60.0), (4, 100.0), (7, 90.0))
    )
    text = str(made(lengths=rows))
    assert "| chat | 98.0 | 60.0 | 100.0 | 90.0 | 0.98 |" in text
    assert not made(lengths=(replace(rows[0], text=False),)).equal


def test_the_picture_is_xml_with_a_bar_for_each_cell() -> None:
    root = xml.etree.ElementTree.fromstring(ladder.picture(made(model="a <b> & c")))
    rects = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(rects) == 1 + len(STEPS) + 3 * len(STEPS)  # ground, legend, bars with the totals
    tall = [float(r.get("height", "0")) for r in rects[1 + len(STEPS) :][: len(STEPS)]]
    assert tall == sorted(tall)
    words = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"chat", "code", "all", "plain", "prefix"} <= set(words)
    assert "a <b> & c" in words[0]


@pytest.mark.parametrize("most", [0.7, 3.0, 9.9, 10.0, 47.0, 260.0, 1999.0])
def test_grid_lines_are_few(most: float) -> None:
    assert 1 < most / ladder._unit(most) <= 6.0 or most < 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with both drafters, whose tokens are bytes."""
    path = drafters.write(tmp_path_factory.mktemp("ladder"), vocab=260)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_a_climb(checkpoint: Path) -> None:
    # A given cost, so that none is measured for each engine; it decides no text.
    values = {"model": str(checkpoint), "threads": 1, "speculation.row_cost": 0.1}
    config = override(Config(), values)
    found = measure(config, ["chat", "edit"], rounds=2, max_tokens=24, lengths=True)
    assert [(row.step, row.task) for row in found.rows] == [
        (step, task) for step in STEPS for task in ("chat", "edit")
    ]
    assert [row.step for row in found.totals] == list(STEPS)
    assert found.equal
    for row in found.rows:
        assert row.tokens > 0 and row.tokens_per_s > 0 and row.ttft_ms > 0
    plain = [row for row in found.rows if row.step == "plain"]
    assert all(row.tokens_per_step == row.speedup == 1.0 for row in plain)
    by = {(row.length, row.task): row for row in found.lengths}
    assert set(by) == {(n, t) for n in (0, *LENGTHS) for t in ("chat", "edit", "all")}
    assert json.loads(json.dumps(asdict(found)))["rows"][0]["step"] == "plain"


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, drawn = tmp_path / "ladder.json", tmp_path / "ladder.svg"
    line = ["bench", "ladder", "--model", str(checkpoint), "--tasks", "chat", "--rounds", "1"]
    line += ["--threads", "1", "--max-tokens", "8", "--speculation-row-cost", "0.1"]
    with pytest.raises(SystemExit) as left:
        main([*line, "--json", str(figures), "--picture", str(drawn)])
    assert not left.value.code
    record = json.loads(figures.read_text())
    assert record["machine"] and record["rows"][0]["step"] == "plain"
    assert {"step", "task", "tokens_per_step", "tokens_per_s", "ttft_ms"} <= set(record["rows"][0])
    assert drawn.read_text().startswith("<svg")
    assert "| chat | prefix |" in capsys.readouterr().out


def test_a_text_that_differs_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = made()
    bad = replace(good, rows=(replace(good.rows[0], text=False), *good.rows[1:]))
    monkeypatch.setattr(ladder, "measure", lambda *args, **more: bad)
    with pytest.raises(SystemExit) as left:
        main(["bench", "ladder"])
    assert left.value.code == 1


def test_an_unknown_task_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task 'sing'.*chat, code"):
        measure(Config(model=str(checkpoint)), ["chat", "sing"])
    with pytest.raises(ConfigError, match="no task"):
        measure(Config(model=str(checkpoint)), [])
