"""The measurements of reuse measure what they say."""

import time
from typing import Any

import pytest
from typer.testing import CliRunner

from folovllm.apps.bench.reuse import bench_gaps, bench_sharing, bench_ttft
from folovllm.apps.cli import build_app
from tests.helpers import tiny_checkpoint


def contender() -> tuple[str, dict[str, Any]]:
    small = {"max_num_seqs": 8, "num_kv_blocks": 200}
    return "m5", {"model": str(tiny_checkpoint()), "milestone": "m5", "device": "cpu", "use_tqdm": False} | small


def test_the_second_request_is_faster() -> None:
    [run] = bench_ttft(contender(), prefix=400, repeats=2, clock=time.process_time).runs
    assert run.metrics["first / second"].median > 1.5
    assert run.config["enable_prefix_caching"] is True


def test_sharing_with_the_cache_off_and_on() -> None:
    off, on = bench_sharing(contender(), prefix=64, count=4, output_len=3, repeats=2).runs
    assert on.metrics["tokens found, prefix shared"].median == pytest.approx(100 * 3 * 64 / (4 * 96))
    assert off.metrics["prefix shared"].median > 0 and "tokens found, prefix shared" not in off.metrics


def test_gaps_are_counted_while_the_long_prompt_comes() -> None:
    whole, *chunks = bench_gaps(contender(), prompt=300, chunks=(1000, 128, 33), repeats=1).runs
    assert [run.name for run in chunks] == ["128", "33"]
    assert whole.metrics["tokens meanwhile"].median == 1
    assert [run.metrics["tokens meanwhile"].median for run in chunks] == [3, 10]  # 127 and 32 tokens a step beside it
    assert all(run.metrics["longest gap"].median > 0 for run in (whole, *chunks))


def test_as_a_command(tmp_path: Any) -> None:
    words = ["bench", "reuse", "ttft", "--prefix", "64", "--repeats", "1", "--model", str(tiny_checkpoint())]
    words += ["--milestone", "m5", "--device", "cpu", "--save", str(tmp_path / "r.json")]
    result = CliRunner().invoke(build_app(), words)
    assert result.exit_code == 0, result.output
    assert "first / second" in result.output and (tmp_path / "r-ttft.json").is_file()
    words[2] = "nonsense"
    assert "choose of ttft, sharing, gaps" in str(CliRunner().invoke(build_app(), words).exception)
