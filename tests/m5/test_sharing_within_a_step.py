"""What one request of a step computes, the next one of the same step begins with."""

import pytest

from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.engine.scheduler import OnFull, Scheduler, chunk, preempt, wait
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.sequences import make_seq
from tests.workloads import Request as Asked
from tests.workloads import make_engine, serve

B = 4


def make_scheduler(num_blocks: int = 50, budget: int = 100, on_full: OnFull = wait) -> Scheduler:
    return Scheduler(PrefixCachingBlockManager(num_blocks, B), 8, budget, chunk, on_full)


def names_of(scheduler: Scheduler) -> int:
    """How many blocks can be found."""
    kv = scheduler.kv
    assert isinstance(kv, PrefixCachingBlockManager)
    return len(kv.prefix_cache)


@pytest.mark.parametrize("milestone", ["m5", pytest.param("m6", marks=pytest.mark.m6)])
def test_n_answers_compute_their_prompt_once(milestone: str) -> None:
    """8 answers to 200 tokens: 200, and for each of the other 7 the last block, of which a token must be computed."""
    asked = [Asked(prompts([200], seed=3)[0], SamplingParams(n=8, seed=5, max_tokens=6, ignore_eos=True))]
    fields = {"milestone": milestone, "block_size": B, "max_model_len": 256, "max_num_seqs": 8}
    shared = make_engine(tiny_checkpoint(), **fields)
    alone = make_engine(tiny_checkpoint(), **fields, enable_prefix_caching=False)
    for engine in (shared, alone):
        engine.history = []
    (one,), (other,) = serve(shared, asked), serve(alone, asked)
    assert [answer.token_ids for answer in one.outputs] == [answer.token_ids for answer in other.outputs]
    assert len({tuple(answer.token_ids) for answer in one.outputs}) == 8
    assert (shared.history[0].num_tokens, alone.history[0].num_tokens) == (200 + 7 * B, 8 * 200)


def test_a_share_of_one_that_runs_is_found_too() -> None:
    """A prompt in pieces: the piece of this step counts."""
    scheduler = make_scheduler(budget=8)
    first, second = make_seq(11, name="first"), make_seq(14, name="second")
    scheduler.add(first)
    scheduler.schedule()
    scheduler.add(second)
    scheduler.postprocess([(first, [])])
    output = scheduler.schedule()
    assert [(scheduled.start, scheduled.num_new_tokens) for scheduled in output.scheduled_seqs] == [(8, 3), (8, 5)]


def test_a_share_that_was_taken_back_is_never_found() -> None:
    """The young one's share fills three blocks; then the old one takes its cache, and they are never written."""
    scheduler = make_scheduler(num_blocks=7, budget=14, on_full=preempt)
    old, young = make_seq(8, name="old"), other_tokens(make_seq(20, name="young"))
    for seq, computed in ((young, 8), (old, 7)):
        seq.start()
        scheduler.running.append(seq)
        assert scheduler.kv.allocate_slots(seq, computed)
        seq.num_computed_tokens = computed
        scheduler.kv.cache_blocks(seq)
    old.append_token(60)  # two tokens to compute, in a third block
    scheduler.add(other_tokens(make_seq(20, name="late")))
    output = scheduler.schedule()
    assert scheduler.sequences(output) == [old] and output.preempted == (young.seq_id,)
    assert names_of(scheduler) == 2 + 1, "of young the blocks that were written before, and one of old"
    scheduler.abort(old)
    output = scheduler.schedule()
    starts = [scheduled.start for scheduled in output.scheduled_seqs]
    assert starts == [8, 16], "young resumes behind what was written, late begins with what young computes now"


def other_tokens(seq: Sequence) -> Sequence:
    """The same, with another first token: no block is in common."""
    seq.request.prompt_token_ids[0] = seq.token_ids[0] = 9
    return seq
