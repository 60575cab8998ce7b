"""Benchmarks: the workloads are the ones they claim to be, and the figures follow from what was served."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from folovllm.apps.bench import ladder, reuse, throughput
from folovllm.apps.bench.cli import finish
from folovllm.apps.bench.contenders import parse_contenders, random_model
from folovllm.apps.bench.report import Metric, Result, Run, load, show
from folovllm.apps.bench.roofline import Rates, roofline_seconds
from folovllm.apps.bench.serve import run_workload
from folovllm.apps.bench.throughput import bench_throughput, metrics_of
from folovllm.apps.bench.workload import BenchRequest, Workload, load_workload
from folovllm.apps.cli import main
from folovllm.config import EngineConfig
from folovllm.engine.setup import set_up
from tests.helpers import no_file_beyond, tiny_checkpoint
from tests.workloads import assert_nothing_left, make_engine

SMALL = Workload("small", [BenchRequest([1, 2, 3], 5), BenchRequest([4] * 10, 3), BenchRequest([5, 6], 8)])


class TestWorkloads:
    def test_built_in_ones(self) -> None:
        """Of a mix most requests begin alike; a few are long, own, and late enough to meet others that run."""
        default, mixed, nano = map(load_workload, ("default", "mixed", "nano-vllm"))
        assert len(default.requests) == 64 and {len(r.prompt) for r in default.requests} <= set(range(32, 257))
        assert {r.output_len for r in default.requests} <= set(range(32, 129)) and default.temperature == 0
        assert load_workload("default", count=5).requests == default.requests[:5]
        assert (len(nano.requests), nano.prompt_tokens, nano.output_tokens) == (256, 142_827, 133_966)
        assert nano.temperature == 0.6
        assert all(0 <= token < 259 for r in nano.for_vocabulary(259).requests for token in r.prompt)
        long = [i for i, r in enumerate(mixed.requests) if len(r.prompt) == 1000]
        short = [r.prompt for i, r in enumerate(mixed.requests) if i not in long]
        assert len(mixed.requests) == 24 and long == [8, 20] and len({tuple(prompt[:256]) for prompt in short}) == 1
        assert {len(prompt) for prompt in short} <= set(range(264, 289))
        assert {r.output_len for r in mixed.requests} <= set(range(48, 113))

    def test_a_file(self, tmp_path: Path) -> None:
        file, good = tmp_path / "requests.jsonl", '{"prompt_len": 7, "output_len": 3}\n'
        file.write_text(good + '\n{"prompt_token_ids": [5, 6], "output_len": 2}\n')
        first, second = load_workload(str(file)).requests
        assert (len(first.prompt), first.output_len) == (7, 3) and second == BenchRequest([5, 6], 2)
        for line in (
            "{}",
            "words",
            '{"prompt_len": 3}',
            '{"output_len": 3}',
            '{"prompt_len": 0, "output_len": 1}',
            "[1]",
        ):
            file.write_text(good + line)
            with pytest.raises(ValueError, match="line 2"):
                load_workload(str(file))
        with pytest.raises(ValueError, match="unknown workload"):
            load_workload(str(tmp_path / "absent.jsonl"))


def test_the_roofline_of_nano_vllms_workload(tmp_path: Path) -> None:
    """Worked out by hand: 13.85 TB of K/V, 1.19 GB of weights 1,023 times, 137 TFLOP; 4.26 TB/s and 750 TFLOP/s."""
    config = EngineConfig(**random_model("qwen3-0.6b", tmp_path, {"dtype": "bfloat16", "device": "cpu"}))
    setup = set_up(config)
    seconds = roofline_seconds(load_workload("nano-vllm"), setup, Rates(4.26e12, 750e12))
    assert seconds == pytest.approx((13.85e12 + 1.19e9 * 1023) / 4.26e12 + 137e12 / 750e12, rel=5e-3)
    assert 133_966 / seconds == pytest.approx(35_900, rel=0.01)


class TestRuns:
    def test_every_token_is_counted(self) -> None:
        engine = make_engine(tiny_checkpoint(), max_num_seqs=2)
        seen = run_workload(engine, SMALL)
        assert (seen.prompt_tokens, seen.output_tokens, len(seen.outputs), seen.partial) == (15, 16, 3, False)
        metrics = metrics_of([seen, seen], bound=seen.seconds / 2)
        assert metrics["output tokens"].median == pytest.approx(16 / seen.seconds)
        assert metrics["of the roofline"].median == pytest.approx(50)
        assert metrics["longest wait between tokens"].median == 1e3 * seen.longest_gap > 0
        assert metrics["TTFT median"].median > 0 and metrics["sequences a step"].median <= 2
        assert_nothing_left(engine)

    def test_a_limit_leaves_a_part(self) -> None:
        engine = make_engine(tiny_checkpoint(), max_num_seqs=1)
        long = Workload("long", [BenchRequest([1, 2, 3], 100)] * 50)
        seen = run_workload(engine, long, limit=0.3)
        assert seen.partial and 0 < seen.output_tokens < 5000 and seen.seconds < 3
        assert "of the roofline" not in metrics_of([seen], bound=1.0)
        assert_nothing_left(engine)

    def test_too_long_for_the_context(self) -> None:
        with pytest.raises(ValueError, match="longest request has 140 tokens"):
            run_workload(make_engine(tiny_checkpoint()), Workload("w", [BenchRequest([1] * 100, 40)]))

    def test_two_presets_in_one_run(self, tmp_path: Path) -> None:
        (tmp_path / "w.jsonl").write_text('{"prompt_len": 9, "output_len": 6}\n' * 3)
        common = {"model": str(tiny_checkpoint()), "max_model_len": 64, "device": "cpu", "use_tqdm": False}
        contenders = parse_contenders("m1,m2:max_num_seqs=2", common)
        result = bench_throughput(contenders, str(tmp_path / "w.jsonl"), repeats=2)
        assert [run.name for run in result.runs] == ["m1", "m2:max_num_seqs=2"]
        assert result.runs[1].config["max_num_seqs"] == 2
        assert result.runs[1].metrics["tokens as the first's"].median == 100
        assert result.runs[0].metrics["steps"].median == 18 and result.runs[1].metrics["steps"].median == 12
        result.describe_here().save(tmp_path / "r.json")
        again = load(tmp_path / "r.json")
        assert again == result and json.loads((tmp_path / "r.json").read_text())["format"] == 1


@pytest.mark.parametrize("wrong", ["m9", "m2:max_num_seqs", "m2:colour=3", "m2:max_num_seqs=0"])
def test_contenders_that_are_none(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"m9|setting|max_num_seqs"):
        parse_contenders(wrong, {})


def test_the_table_shows_ratios() -> None:
    runs = [
        Run("m1", {}, {"rate": Metric.of([10.0, 12.0, 11.0], "tok/s"), "time": Metric.of([4.0], "s", False)}),
        Run("m2", {}, {"rate": Metric.of([22.0], "tok/s"), "time": Metric.of([2.0], "s", False)}, partial=True),
    ]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(Result("throughput", SMALL.describe(), runs), console)
    text = console.export_text()
    assert "11 (10..12)" in text and text.count("2.00x") == 2 and "m2 (partial)" in text and "rate [tok/s]" in text


def test_what_goes_wrong_with_a_result(tmp_path: Path) -> None:
    """A full disk leaves the older file; what cannot be printed is still saved; other files are refused."""
    older, newer, file = Result("older", {}), Result("newer", {}, command="x" * 10_000), tmp_path / "x.json"
    older.save(file)
    with no_file_beyond(5000), pytest.raises(ValueError, match=r"cannot write .*x\.json"):
        newer.save(file)
    assert load(file).benchmark == "older" and len(list(tmp_path.iterdir())) == 1

    def full(result: Result) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        finish(Result("b", {}), file, full)
    assert load(file).benchmark == "b"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a result"):
        load(file)


@pytest.mark.parametrize("command", [
    "throughput --requests 0", "ladder --limit -1", "reuse --chunks abc", "reuse --prefix 0",
    "throughput --save {}/none/x.json", "ladder --save {}/none/x.json", "reuse --save {}",
])  # fmt: skip
def test_what_is_refused_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option."""
    for module, name in ((throughput, "bench_throughput"), (ladder, "bench_ladder"), (reuse, "bench_ttft")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it had begun"))
    with pytest.raises(SystemExit) as exit:
        main(["bench", *command.format(tmp_path).split(), "--model", str(tiny_checkpoint())])
    assert exit.value.code and command.split()[1] in capsys.readouterr().err


@pytest.mark.gpu
def test_throughput_on_a_gpu() -> None:
    common = {"model": str(tiny_checkpoint()), "dtype": "float32", "use_tqdm": False}
    result = bench_throughput(parse_contenders("m1,m2", common), count=8)
    assert torch.cuda.is_available() and not any(run.partial for run in result.runs)
