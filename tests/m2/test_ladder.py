"""The ladder: every milestone over one workload, its answers checked, the learner's beside the reference's."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from folovllm.apps.bench import ladder
from folovllm.apps.bench.ladder import (
    bench_ladder,
    beside_reference,
    check_answers,
    for_cpu,
    milestones_up_to,
    show_ladder,
)
from folovllm.apps.bench.report import Metric, Result, Run, load
from folovllm.apps.bench.throughput import AGREEMENT, LONGEST_GAP, PER_CPU_SECOND, REUSED, WASTE, bench_throughput
from folovllm.apps.cli import build_app
from tests.helpers import tiny_checkpoint
from tools.chart import draw

torch.set_num_threads(1)


def common() -> dict[str, Any]:
    return {"model": str(tiny_checkpoint()), "max_model_len": 64, "device": "cpu", "use_tqdm": False}


@pytest.fixture
def workload(tmp_path: Path) -> str:
    file = tmp_path / "w.jsonl"
    file.write_text('{"prompt_len": 9, "output_len": 6}\n' * 3)
    return str(file)


def made_up(*rates: float) -> Result:
    runs = [Run(f"m{i}", {}, {"output tokens": Metric.of([rate], "tok/s")}) for i, rate in enumerate(rates, 1)]
    return Result("ladder", {"name": "w", "requests": 1, "prompt_tokens": 2, "output_tokens": 3}, runs)


def test_all_presets_up_to_the_one_named() -> None:
    found = milestones_up_to("m6", common())
    assert [name for name, _ in found] == [fields["milestone"] for _, fields in found] == [f"m{i}" for i in range(1, 7)]
    assert milestones_up_to("m3", common()) == found[:3]
    with pytest.raises(ValueError, match="unknown milestone 'm7'"):
        milestones_up_to("m7", common())


def test_on_a_cpu_memory_is_short_and_prompts_come_in_chunks(workload: str) -> None:
    """Room for four of the longest request. What was asked for stays."""
    fields = {**common(), "model": str(tiny_checkpoint(max_position_embeddings=2048))}
    del fields["max_model_len"]
    found = dict(for_cpu(milestones_up_to("m6", fields), "mixed", 9))
    longest, a_token = found["m1"]["max_model_len"], 3 * 2 * 2 * 32 * 4
    assert 1048 <= longest <= 1112
    assert all(f["kv_cache_memory"] == 4 * longest * a_token for f in found.values())
    assert {name for name, f in found.items() if f.get("max_num_batched_tokens") == 128} == {"m5", "m6"}
    asked = {**common(), "kv_cache_memory": 1 << 20, "max_num_batched_tokens": 99}
    assert all(fields.items() >= asked.items() for _, fields in for_cpu(milestones_up_to("m6", asked), workload, None))


@pytest.mark.m5
def test_every_milestone_has_something_to_gain(tmp_path: Path) -> None:
    """Counted, not timed: more at once, less that is empty, prompts that are found. 24 begin alike, and one is long."""
    short = [{"prompt_token_ids": [7] * 96 + [i] * 9, "output_len": 20 + i % 10} for i in range(24)]
    lines = [*short[:8], {"prompt_len": 250, "output_len": 20}, *short[8:]]
    (tmp_path / "alike.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    fields, name = common(), str(tmp_path / "alike.jsonl")
    del fields["max_model_len"]
    chosen = [rung for rung in for_cpu(milestones_up_to("m5", fields), name, None) if rung[0] in ("m2", "m3", "m5")]
    slots, blocks, reuse = (run.metrics for run in bench_throughput(chosen, name).runs)
    assert slots["sequences a step"].median <= 4 < blocks["sequences a step"].median
    assert blocks[WASTE].median < 10 < slots[WASTE].median
    assert reuse[REUSED].median > 50 and REUSED not in blocks
    assert reuse["sequences a step"].median > blocks["sequences a step"].median  # they share blocks
    assert all(metrics[LONGEST_GAP].median > 0 for metrics in (slots, blocks, reuse))


@pytest.mark.m6
def test_every_milestone_gives_the_same_tokens(workload: str) -> None:
    result = bench_ladder("m6", common(), workload, None, None, 1)
    assert [run.name for run in result.runs] == ["m1", "m2", "m3", "m4", "m5", "m6"]
    assert all(run.metrics[AGREEMENT].median == 100 for run in result.runs[1:])
    assert all(run.metrics["output tokens"].median > 0 and not run.partial for run in result.runs)


def test_other_tokens_are_refused() -> None:
    result = made_up(1.0, 2.0)
    result.runs[1].metrics[AGREEMENT] = Metric.of([99.5], "%")
    with pytest.raises(ValueError, match=r"m2 gave only 99.5% of m1's tokens"):
        check_answers(result)


@pytest.mark.slow
def test_the_reference_runs_without_the_learners_code(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it import what lies in the working directory."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLOVLLM_MINE", "/absent")  # would stop a process that inherited it
    monkeypatch.setattr(ladder, "bench_ladder", lambda *_: made_up(1.0))
    both = beside_reference("m1", common(), workload, None, None, 1)
    assert os.environ["FOLOVLLM_MINE"] == "/absent" and [run.name for run in both.runs] == ["m1 reference", "m1 mine"]
    with pytest.raises(RuntimeError, match="unknown workload"):
        beside_reference("m1", common(), str(tmp_path / "absent.jsonl"), None, None, 1)


def shown(result: Result, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show_ladder(result, console)
    return console.export_text()


def full(agreement: float = 100.0) -> Result:
    """Every figure that a CPU's ladder has, large ones, for a learner's ladder beside the reference's."""
    figures = {name: Metric.of([12_345.6], "tok/s") for name in ("output tokens", PER_CPU_SECOND)}
    figures |= {name: Metric.of([54_321.0], "ms") for name in ("TTFT median", "TPOT median", LONGEST_GAP)}
    figures |= {name: Metric.of([98.76], "%") for name in (WASTE, REUSED)}
    figures |= {"sequences a step": Metric.of([123.4]), AGREEMENT: Metric.of([agreement], "%")}
    runs = [Run(f"m{i} {whose}", {}, figures) for i in range(1, 7) for whose in ("reference", "mine")]
    return Result("ladder", {"name": "mixed", "requests": 24, "prompt_tokens": 7325, "output_tokens": 1963}, runs)


class TestTheTable:
    def test_a_row_a_milestone_in_80_columns(self) -> None:
        text = shown(made_up(10.0, 25.0))
        assert "2.50x" in text and "tok/s" in text and "first" not in text.partition("At once")[0]
        table = shown(full()).partition("At once")[0]
        assert max(map(len, table.splitlines())) <= 80 and "…" not in table
        assert "m6 reference 12,346 1.00x 12,346" in table and table.count("54,321 54,321  54,321") == 12

    def test_equal_tokens_are_a_note_and_others_a_column(self) -> None:
        equal, other = shown(full(), 120), shown(full(97.5), 120)
        assert "All milestones gave the same tokens" in equal and "97.5" not in equal
        assert "All milestones" not in other and other.count("97.5") == 12


def servers() -> Result:
    figures = {name: Metric.of([10.0]) for name in ("output tokens", "TTFT median", "TTFT p99", "ITL p99")}
    runs = [Run(f"{name} at {rate}/s", {}, figures) for name in ("m2", "m6") for rate in (1, 2)]
    return replace(made_up(), benchmark="serve", runs=runs)


@pytest.mark.parametrize("result", [made_up(1.0, 2.0), servers()], ids=["ladder", "serve"])
def test_a_chart_is_drawn_from_the_data(tmp_path: Path, result: Result) -> None:
    """The same data gives the same file."""
    pytest.importorskip("matplotlib")
    first, again = (draw(result, tmp_path / f"{i}.png") for i in range(2))
    assert [file.name for file in first] == ["0.png", "0.svg"] and first[0].stat().st_size > 1000
    assert first[1].read_text() == again[1].read_text()
    with pytest.raises(ValueError, match="no result of"):
        draw(Result("latency", {}), tmp_path / "x.png")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw(made_up(1.0), Path("x.png"))


def test_as_a_command(workload: str, tmp_path: Path) -> None:
    words = ["bench", "ladder", "--upto", "m1", "--workload", workload, "--model", str(tiny_checkpoint())]
    words += ["--max-model-len", "64", "--device", "cpu", "--save", str(tmp_path / "r.json")]
    result = CliRunner().invoke(build_app(), words, env={"FOLOVLLM_MINE": ""})
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "r.json").benchmark == "ladder" and "m1" in result.output
