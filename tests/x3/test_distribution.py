"""Drafts do not make what was drafted likelier."""

from __future__ import annotations

from itertools import product

import torch

from folovllm.sampling_params import SamplingParams
from folovllm.spec_decode.proposer import Proposer, RowState
from tests.helpers import hf_logits, prompts, tiny_checkpoint, tiny_tokenizer
from tests.x3.engines import make_engine, speculation_of, speculative

LETTERS = [int(id_) for id_ in tiny_tokenizer().encode("abcd")]
ANSWERS = 128  # of one request
REQUESTS = 4


class Stubborn(Proposer):
    """Always drafts the same."""

    def propose(self, state: RowState, k: int) -> list[int]:
        return [LETTERS[0]] * k


def test_sampled_tokens_are_those_of_plain_sampling() -> None:
    """Pearson's test over the second and third token together: of four letters each, against exact chances."""
    prompt = prompts([6], seed=2)[0]
    engine = make_engine(milestone="m6", max_num_seqs=80, num_kv_blocks=800, **speculative(Stubborn(), k=2))
    for i in range(REQUESTS):
        params = SamplingParams(n=ANSWERS, seed=i, temperature=4.0, max_tokens=3, allowed_token_ids=LETTERS)
        engine.add_request(f"{i}", prompt, params, stream=False)
    counts = dict.fromkeys(product(LETTERS, LETTERS), 0)
    while engine.has_unfinished_requests():
        for output in engine.step():
            for answer in output.outputs:
                counts[answer.token_ids[1], answer.token_ids[2]] += 1

    chances = dict.fromkeys(counts, 0.0)
    for first, second in product(LETTERS, LETTERS):
        logits = hf_logits(tiny_checkpoint(), [*prompt, first, second])[len(prompt) - 1 :, LETTERS]
        one, two, three = torch.softmax(logits / 4.0, -1).tolist()
        for i, third in enumerate(LETTERS):
            chances[second, third] += one[LETTERS.index(first)] * two[LETTERS.index(second)] * three[i]
    total = ANSWERS * REQUESTS
    assert min(chances.values()) * total > 5, "too few answers for the test"
    distance = sum((counts[c] - total * p) ** 2 / (total * p) for c, p in chances.items())
    assert distance < 37.7, "such a distance comes once in a thousand times, for 15 degrees of freedom"
    made = speculation_of(engine)
    assert 0.1 < made.num_accepted / made.num_draft_tokens < 0.9
