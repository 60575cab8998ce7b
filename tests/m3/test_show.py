"""The picture of the pool says what the engine says."""

from typing import Any

import pytest

from folovllm.apps.cli import main
from folovllm.apps.cli.show import StepPrinter, draw_pool
from folovllm.apps.inspector.watcher import Watcher
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import make_engine


def watched(engine: LLMEngine) -> Watcher:
    engine.subscribe(watcher := Watcher())
    return watcher


def started(*lengths: int, **overrides: Any) -> LLMEngine:
    options = {"milestone": "m3", "block_size": 4, "num_kv_blocks": 70}
    engine = make_engine(tiny_checkpoint(), **options | overrides)
    for i, ids in enumerate(prompts(lengths)):
        engine.add_request(f"r{i}", ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    engine.step()
    return engine


def test_a_character_a_block() -> None:
    engine = started(9, 4)
    a, b = (chr(ord("a") + seq.seq_id % 26) for seq in engine.scheduler.running)
    cells, watcher = f"{a.upper()}{a.upper()}{a}{b.upper()}", watched(engine)
    assert draw_pool(watcher).plain == f"     0 {cells}{'·' * 60}"  # the second line is free, and left out
    engine.step()
    assert draw_pool(watcher).plain == f"     0 {cells}{b}{'·' * 59}"


def test_shared_blocks() -> None:
    engine = started(8, 9)
    first, second = engine.scheduler.running
    second.block_table[0] = first.block_table[0]
    assert draw_pool(watched(engine)).plain.startswith("     0 #")


def test_a_large_pool_is_cut_off() -> None:
    engine = started(60, 60, 60, 60, block_size=1, num_kv_blocks=2000)
    for seq in engine.scheduler.running:
        seq.block_table = [i * 32 + seq.block_table[0] // 60 for i in range(60)]
    lines = draw_pool(watched(engine)).plain.splitlines()
    assert len(lines) == 17 and lines[-1].strip() == "and 14 lines more"


def test_slots_and_no_pool_at_all() -> None:
    slots = started(9, 4, milestone="m2", num_kv_blocks=3, block_size=None)
    assert len(draw_pool(watched(slots)).plain.split()[1]) == 3
    assert draw_pool(watched(started(9, milestone="m1", num_kv_blocks=None, block_size=None))).plain == ""


def test_show_steps_draws_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--milestone", "m3", "--block-size", "2", "--num-kv-blocks", "16", "--max-model-len", "32", "--raw"]
    with pytest.raises(SystemExit):
        main(["generate", "abcde", "--model", str(tiny_checkpoint()), "--max-tokens", "3", "--show-steps", *flags])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("step ", "     0 "))]
    assert [line.split()[0] for line in lines] == ["step", "0", "step", "0", "step"]  # all is free after the last one
    pools = [line.split()[1] for line in lines[1::2]]
    letter = pools[0][0]
    assert pools == [letter * 2 + letter.lower() + "·" * 13, letter * 3 + "·" * 13]


@pytest.mark.m6
def test_each_step_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """With overlap, a turn of the loop may take in no step, or two."""
    flags = ["--milestone", "m6", "--max-num-seqs", "1", "--max-model-len", "32", "--raw"]
    with pytest.raises(SystemExit):
        main(["generate", "abc", "de", "--model", str(tiny_checkpoint()), "--max-tokens", "3", "--show-steps", *flags])
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("step ", "     0 "))]
    steps = [line.split()[1] for line in shown if line.startswith("step ")]
    assert shown[0].startswith("step 0 "), "a pool stands under the step that left it so"
    assert steps == [str(i) for i in range(len(steps))] and len(steps) >= 6


def test_a_line_of_the_pool_is_printed_when_it_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """A token that fills no new block and ends none changes no line."""
    engine = started(9)
    engine.subscribe(StepPrinter())
    pictures = []
    for _ in range(4):
        engine.step()
        pictures.append([line for line in capsys.readouterr().err.splitlines() if not line.startswith("step")])
    assert [len(lines) for lines in pictures] == [1, 0, 1, 1]
