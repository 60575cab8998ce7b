"""The last layer computes what is read of it: K and V of all tokens, and each sequence's last hidden state.

In the engine: `test_fused_layer.py`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.models import fused_layer
from folovllm.sampling_params import SamplingParams
from tests.helpers import assert_logits_equal, prompts
from tests.m6.test_fused_layer import late_driver, served_by_kernels, small_checkpoint

# Prompts, chunks and decodes, together and alone: new tokens by sequence.
STEPS = [{0: 5, 1: 3}, {1: 1, 0: 2, 2: 6}, {0: 1, 2: 1}, {3: 1, 1: 2}]


def steps_of(driver, many, monkeypatch):
    """Hidden states of each step's last tokens, [S, H], and the cache at the end."""
    monkeypatch.setattr(fused_layer, "MANY", many)
    hidden = []
    with torch.inference_mode():
        for step, lengths in enumerate(STEPS):
            pieces = dict(zip(lengths, prompts(list(lengths.values()), seed=step), strict=True))
            batch = driver.batch(dict(sorted(pieces.items(), key=lambda item: len(item[1]) > 1)))
            batch.only_last = True
            driver.backend.plan(batch)
            states = driver.model(batch)
            hidden.append(states if len(states) == batch.num_seqs else states[batch.logits_indices])
            assert (len(states) == batch.num_seqs) == (many <= 1 or sum(lengths.values()) == len(lengths))
            for seq, end in zip(sorted(pieces, key=lambda s: len(pieces[s]) > 1), batch.seq_lens_host, strict=True):
                driver.cached[seq] = end
    return hidden, driver.kv_cache


def test_the_same_last_states_and_the_same_cache(monkeypatch):
    """Whatever stands in a step. All that later steps read is in the cache, of every token."""
    checkpoint = small_checkpoint()
    every, cache = steps_of(late_driver(checkpoint), 10**9, monkeypatch)
    last, other_cache = steps_of(late_driver(checkpoint), 1, monkeypatch)
    for a, b in zip(every, last, strict=True):
        assert_logits_equal(b, a)
    stored = "K and V of all tokens must be stored, not only of the last"
    assert torch.equal(cache.nan_to_num(1e9), other_cache.nan_to_num(1e9)), stored


@pytest.mark.parametrize(("only_last", "many"), [(True, fused_layer.MANY), (False, 1)])
def test_other_steps_run_whole(only_last, many, monkeypatch):
    """What it leaves out must be worth the launches that it takes; and whoever scores a prompt reads every state."""
    monkeypatch.setattr(fused_layer, "MANY", many)
    driver = late_driver(small_checkpoint(num_hidden_layers=1))
    with torch.inference_mode():
        batch = driver.batch({0: [1, 2, 3]})
        batch.only_last = only_last
        driver.backend.plan(batch)
        assert len(driver.model(batch)) == 3


def test_a_prompt_that_is_scored(monkeypatch):
    """Its log-probabilities take every hidden state: they are the same with a last layer that may leave some out."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    checkpoint, (prompt,) = small_checkpoint(num_hidden_layers=1), prompts([7])
    scores = []
    for many in (10**9, 1):
        monkeypatch.setattr(fused_layer, "MANY", many)
        (output,) = served_by_kernels(checkpoint).generate([prompt], params)
        scores.append([[entry.logprob for entry in row.values()] for row in output.prompt_logprobs[1:]])
    assert scores[0] == scores[1] and len(scores[0]) == 6
