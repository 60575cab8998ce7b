"""A multi-step decode samples what its steps would sample one after the other."""

from collections.abc import Sequence

import numpy as np
import pytest

from folovllm.config import EngineConfig
from folovllm.electives.spec_decode.extension import make_multi_step_executor
from folovllm.electives.spec_decode.multi_step import DraftTokens, MultiStepExecutor, parts
from folovllm.engine.setup import set_up
from folovllm.step.schedule import NO_TOKENS, SamplingSpec, ScheduledSequence, SchedulerOutput, StepResult
from tests.helpers import tiny_checkpoint

BLOCK, BLOCKS, LONGEST = 4, 12, 13
SPECS = {
    "greedy": SamplingSpec(temperature=0),
    "noise": SamplingSpec(seed=7, temperature=0.9),
    "filter": SamplingSpec(seed=5, temperature=0.8, top_k=5),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def executor(device: str = "cpu", **more: object) -> MultiStepExecutor:
    fields = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 3, "num_kv_blocks": 3 * BLOCKS, **more}
    config = EngineConfig(model=str(tiny_checkpoint()), device=device, block_size=BLOCK, use_tqdm=False, **fields)
    setup = set_up(config)
    return make_multi_step_executor(setup, DraftTokens.for_multi_step(LONGEST, setup))


class Writers:
    """Rows with a prompt each, all but its newest token computed, and their next steps."""

    def __init__(self, device: MultiStepExecutor, specs: Sequence[SamplingSpec]) -> None:
        self._ends = [3 + 2 * row for row in range(len(specs))]
        prompts = [np.arange(1, 1 + end, dtype=np.int32) * (row + 1) for row, end in enumerate(self._ends)]
        scheduled_seqs = []
        for row, (end, tokens, spec) in enumerate(zip(self._ends, prompts, specs, strict=True)):
            scheduled_seqs.append(ScheduledSequence(row, row, 0, end, tokens, self._blocks(row, 0, end), 0, 0, spec))
        device.execute_model(SchedulerOutput(tuple(scheduled_seqs)))

    @staticmethod
    def _blocks(row: int, start: int, end: int) -> tuple[int, ...]:
        """Blocks that begin with a token from `start` to `end`; a row's are not in order."""
        return tuple(row * BLOCKS + (5 * i) % BLOCKS for i in range(-(-start // BLOCK), -(-end // BLOCK)))

    def steps(self, lengths: Sequence[int], num_given: int) -> list[SchedulerOutput]:
        """Row i decodes `lengths[i]` tokens; the first ones are given."""
        found = []
        for i in range(max(lengths)):
            scheduled_seqs = []
            for row, length in enumerate(lengths):
                start = self._ends[row] + i
                tokens = np.array([9 + row + i], np.int32) if i < num_given else NO_TOKENS
                if i < length:
                    blocks, at = self._blocks(row, start, start + 1), -(-start // BLOCK)
                    scheduled_seqs.append(ScheduledSequence(row, row, start, start + 1, tokens, blocks, at, 1, None))
            found.append(SchedulerOutput(tuple(scheduled_seqs)))
        self._ends = [end + length for end, length in zip(self._ends, lengths, strict=True)]
        return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("specs", [["greedy"], ["noise", "greedy", "noise"], ["noise", "filter", "greedy"]])
def test_a_run_is_its_steps(specs: list[str], device: str) -> None:
    """Rows that go on for longer than others, second tokens that are given, new blocks, run behind run."""
    one, other = executor(device), executor(device)
    kinds = [SPECS[name] for name in specs]
    in_a_run, in_turn = Writers(one, kinds), Writers(other, kinds)
    sampled = set()
    for lengths, given in ([5, 2, 7], 1), ([13, 13, 1], 2), ([1, 1, 1], 1), ([3, 8, 8], 2):
        found = one.submit_steps(in_a_run.steps(lengths[: len(specs)], given)).wait()
        expected = [other.execute_model(step) for step in in_turn.steps(lengths[: len(specs)], given)]
        assert found == expected, f"lengths {lengths}, {given} tokens given"
        sampled |= {token for step in found for (token,) in step.token_ids}
    assert len(sampled) > 5, "texts vary"


def test_without_captures_it_runs_one_after_the_other() -> None:
    eager, captured = executor(enforce_eager=True), executor()
    found: list[list[StepResult]] = []
    for device in eager, captured:
        found.append(device.submit_steps(Writers(device, [SPECS["noise"]] * 2).steps([6, 3], 1)).wait())
    assert found[0] == found[1] and not eager.graph_widths and captured.graph_widths


def test_only_plain_decodes() -> None:
    device = executor()
    writers = Writers(device, [SPECS["greedy"], SamplingSpec(logprobs=1)])
    (step,) = writers.steps([1, 1], 1)
    first, second = step.scheduled_seqs
    for scheduled in (
        first._replace(end=first.end + 1), first._replace(num_samples=0), first._replace(sampling=SPECS["greedy"]),
        first._replace(new_blocks=(1, 2)), second,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="a multi-step decode has decodes of one token"):
            device.submit_steps([SchedulerOutput((scheduled,))])


def test_parts() -> None:
    assert [[*parts(n)] for n in (1, 4, 7, 18)] == [[1], [4], [4, 2, 1], [16, 2]]
