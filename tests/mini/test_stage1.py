"""Stage 1: a decoder and a sampler of one's own."""

import sys
from itertools import islice

import pytest
import torch

from tests.helpers import prompts, tiny_checkpoint
from tests.mini.conftest import STORIES, Mini, asks_for, odd_checkpoint, random_asks, running_example


@pytest.fixture(autouse=True)
def no_transformers(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing transformers raises ImportError here. The right answers are known before."""
    for folder in (
        tiny_checkpoint(),
        tiny_checkpoint(tied=False),
        tiny_checkpoint(num_heads=6, num_kv_heads=2, head_dim=16),
        odd_checkpoint(),
        odd_checkpoint(old=True),
    ):
        asks_for(prompts([9, 4]), [8, 8], folder=folder)
    random_asks([(7, 9), (1, 8), (12, 8)])
    monkeypatch.setitem(sys.modules, "transformers", None)


def test_worked_case(mini: Mini) -> None:
    """The model of the course continues A as transformers does."""
    mini.play(running_example()[:1], folder=STORIES)


def test_each_request_has_a_cache_of_its_own(mini: Mini) -> None:
    mini.play(random_asks([(7, 9), (1, 8), (12, 8)]))


def test_a_head_of_its_own(mini: Mini) -> None:
    """`tie_word_embeddings` is false: the logits come from `lm_head`, not from the embedding."""
    folder = tiny_checkpoint(tied=False)
    mini.play(asks_for(prompts([9, 4]), [8, 8], folder=folder), folder=folder)


def test_three_query_heads_share_a_kv_head(mini: Mini) -> None:
    folder = tiny_checkpoint(num_heads=6, num_kv_heads=2, head_dim=16)
    mini.play(asks_for(prompts([9, 4]), [8, 8], folder=folder), folder=folder)


def test_the_numbers_of_the_config(mini: Mini) -> None:
    """The epsilon is 0.3 and theta is 300; older files have `rope_theta` beside the other fields."""
    for folder in odd_checkpoint(), odd_checkpoint(old=True):
        mini.play(asks_for(prompts([9, 4]), [8, 8], folder=folder), folder=folder)


def test_sample_by_hand(mini: Mini) -> None:
    """Logits 1, 3, 2. Greedy: token 1. At temperature 0.5 they are 2, 6, 4: with noise 0, 0, 3 token 2 wins by 7 to 6."""
    logits, noise = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0.0, 0.0, 3.0])
    with mini.sentence():
        sample = mini.adapters.sample
        assert sample(logits, 0, noise) == 1, "at temperature 0 the noise does not count"
        assert sample(logits, 0.5, noise) == 2, "2, 6, 4 and the noise 0, 0, 3 make 2, 6, 7: the noise is not divided"
        assert sample(logits, 1.0, torch.tensor([0.0, 0.0, 1.5])) == 2, "1, 3, 2 and the noise 0, 0, 1.5 make 1, 3, 3.5"
        assert sample(torch.tensor([2.0, 2.0, 0.0]), 0, noise) == 0, "ties take the lowest id"


def test_any_temperature_above_0_is_one(mini: Mini) -> None:
    """Logits 0, T and -T become 0, 1 and -1 at temperature T: noise 2, 0, 0 makes token 0 win, and noise 0, 0, 4.5 token 2."""
    noises = ([2.0, 0.0, 0.0], 0), ([0.0, 0.0, 0.0], 1), ([0.0, 0.0, 4.5], 2)
    with mini.sentence():
        for temperature in 1e-5, 0.01, 0.2, 5:
            logits = torch.tensor([0.0, temperature, -temperature])
            for noise, wanted in noises:
                found = mini.adapters.sample(logits, temperature, torch.tensor(noise))
                assert found == wanted, f"temperature {temperature}, noise {noise}: token {found}, not {wanted}"


def test_the_argmax_of_the_whole_vocabulary(mini: Mini) -> None:
    """500 tokens, none of them left out, at temperatures from 0.001 to 100: the argmax of logits / temperature + noise."""
    generator = torch.Generator().manual_seed(1)
    for temperature in 0.001, 0.05, 0.7, 3, 100:
        for row in range(40):
            logits = 4 * torch.randn(500, generator=generator) * min(1, temperature)
            noise = -torch.empty(500).exponential_(generator=generator).log()
            scores = logits.double() / temperature + noise
            top = scores.topk(2)
            with mini.sentence():
                found = mini.adapters.sample(logits, temperature, noise)
            says = f"row {row} at temperature {temperature}: token {found}, and {int(top.indices[0])} has the largest score"
            assert found == top.indices[0] or top.values[0] - top.values[1] < 1e-3, says


def test_samples_are_distributed_as_the_softmax(mini: Mini) -> None:
    logits, temperature = torch.tensor([0.0, 1.0, 2.0, -1.0]), 1.5
    noise = -torch.empty(20_000, 4).exponential_(generator=torch.Generator().manual_seed(0)).log()
    with mini.sentence():
        sample = mini.adapters.sample
        drawn = torch.tensor([sample(logits, temperature, row) for row in islice(noise, len(noise))])
    found, wanted = drawn.bincount(minlength=4) / len(drawn), (logits / temperature).softmax(0)
    assert (found - wanted).abs().max() < 0.02, f"the shares are {found.tolist()}, and the softmax is {wanted.tolist()}"
