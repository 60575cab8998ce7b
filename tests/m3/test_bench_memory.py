"""The comparison of blocks and slots counts what it says."""

from pathlib import Path
from typing import Any

import pytest

from folovllm.apps.bench.memory import bench_memory, measure
from folovllm.apps.bench.report import load
from folovllm.apps.bench.workload import mixed_workload
from folovllm.apps.cli import main
from tests.helpers import tiny_checkpoint


def options() -> dict[str, Any]:
    return {"model": str(tiny_checkpoint()), "slots": 2, "max_model_len": 64, "device": "cpu", "max_num_seqs": 16}


def test_lengths_lie_between_the_bounds_and_most_are_short() -> None:
    workload = mixed_workload(400, 0, (4, 64), (2, 128))
    assert {4, 64} <= {len(r.prompt) for r in workload.requests} <= set(range(4, 65))
    assert sum(r.output_len <= 16 for r in workload.requests) == pytest.approx(200, abs=30)
    assert workload == mixed_workload(400, 0, (4, 64), (2, 128))


def test_blocks_hold_more_sequences_in_the_same_bytes() -> None:
    workload = mixed_workload(16, 0, (2, 16), (2, 32))
    m2, m3 = (measure(milestone, workload, block_size=4, **options()) for milestone in ("m2", "m3"))
    assert m2.kv_bytes == m3.kv_bytes
    assert m2.output_tokens == m3.output_tokens == workload.output_tokens
    assert (m2.block_size, max(stats.running for stats in m2.looks)) == (64, 2)
    assert max(stats.running for stats in m3.looks) > 2
    assert m3.mean_running > 1.5 * m2.mean_running
    assert m3.mean_waste < m2.mean_waste < 1
    assert m3.steps < m2.steps


@pytest.mark.parametrize(("flag", "names"), [("", ["m2", "m3"]), (" --milestone m3", ["m3"])])
def test_a_column_a_preset(flag: str, names: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = f"--model {tiny_checkpoint()} --requests 4 --slots 2 --max-model-len 64 --save {tmp_path}/r.json{flag}"
    with pytest.raises(SystemExit) as exit:
        main(["bench", "memory", *flags.split()])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*names, "KV memory wasted", "of the cache filled"])
    assert [run.name for run in load(tmp_path / "r.json").runs] == names


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="m1 has no pool"):
        bench_memory([("m1", {"milestone": "m1"})])
    with pytest.raises(ValueError, match="give --slots"):
        bench_memory([("m3", {"milestone": "m3", "num_kv_blocks": 7})])
