"""The ladder: every milestone over one workload, its answers checked, the learner's beside the reference's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from folovllm.bench.ladder import Plan, bench_ladder, bench_reference, beside, check_answers, rungs, show_ladder
from folovllm.bench.ladder_chart import draw_ladder
from folovllm.bench.report import Metric, Result, Run, load
from folovllm.bench.throughput import AGREEMENT
from folovllm.cli import build_app
from tests.helpers import tiny_checkpoint

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


class TestRungs:
    def test_all_presets_up_to_the_one_named(self) -> None:
        assert [name for name, _ in rungs("m3", common())] == ["m1", "m2", "m3"]
        assert [fields["milestone"] for _, fields in rungs("m6", common())] == ["m1", "m2", "m3", "m4", "m5", "m6"]

    def test_an_unknown_milestone(self) -> None:
        with pytest.raises(ValueError, match="unknown milestone 'm7'"):
            rungs("m7", common())


@pytest.mark.parametrize("upto", ["m2", pytest.param("m6", marks=pytest.mark.m6)])
def test_every_rung_gives_the_same_tokens(workload: str, upto: str) -> None:
    result = bench_ladder(Plan(rungs(upto, common()), workload))
    assert [run.name for run in result.runs] == [f"m{i}" for i in range(1, int(upto[1]) + 1)]
    assert all(run.metrics[AGREEMENT].median == 100 for run in result.runs[1:])
    assert all(run.metrics["output tokens"].median > 0 and not run.partial for run in result.runs)


def test_other_tokens_are_refused() -> None:
    result = made_up(1.0, 2.0)
    result.runs[1].metrics[AGREEMENT] = Metric.of([99.5], "%")
    with pytest.raises(ValueError, match=r"m2 gave only 99.5% of m1's tokens"):
        check_answers(result)


def test_a_limit_leaves_a_partial_rung(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt_len": 3, "output_len": 60}\n' * 200)
    result = bench_ladder(Plan(rungs("m1", common()), str(tmp_path / "w.jsonl"), limit=0.1))
    assert result.runs[0].partial and "of the roofline" not in result.runs[0].metrics


def test_the_reference_runs_without_the_learners_code(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it import what lies in the working directory."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOLOVLLM_MINE", "/absent")  # would stop a process that inherited it
    plan = Plan(rungs("m1", common()), workload)
    reference = bench_reference(plan)
    assert os.environ["FOLOVLLM_MINE"] == "/absent" and [run.name for run in reference.runs] == ["m1"]
    both = beside(made_up(1.0), reference)
    assert [run.name for run in both.runs] == ["m1 reference", "m1 mine"]


def test_a_failure_of_the_reference_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="unknown workload"):
        bench_reference(Plan(rungs("m1", common()), str(tmp_path / "absent.jsonl")))


def test_the_table_has_a_row_a_rung() -> None:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show_ladder(made_up(10.0, 25.0), console)
    text = console.export_text()
    assert "2.50x" in text and "tok/s" in text and "TTFT" not in text


def test_the_chart_is_drawn_from_the_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = draw_ladder(beside(made_up(1.0, 2.0), made_up(1.5, 2.5)), tmp_path / "x.png")
    assert [file.name for file in files] == ["x.png", "x.svg"] and all(file.stat().st_size > 1000 for file in files)


def test_without_matplotlib(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw_ladder(made_up(1.0), Path("x.png"))


def test_as_a_command(workload: str, tmp_path: Path) -> None:
    words = ["bench", "ladder", "--upto", "m1", "--workload", workload, "--model", str(tiny_checkpoint())]
    words += ["--max-model-len", "64", "--device", "cpu", "--save", str(tmp_path / "r.json")]
    result = CliRunner().invoke(build_app(), words, env={"FOLOVLLM_MINE": ""})
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "r.json").benchmark == "ladder" and "m1" in result.output
