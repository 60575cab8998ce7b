"""How many tokens of a sequence a step computes, when prompts come in chunks."""

from folovllm.engine.scheduler import chunk
from folovllm.request import Sequence
from tests.sequences import make_seq
from tests.tiny import worked_case


def sequence(num_tokens: int, computed: int = 0) -> Sequence:
    seq = make_seq(num_tokens)
    seq.num_computed_tokens = computed
    return seq


class TestChunk:
    def test_a_worked_case(self) -> None:
        got = {
            "10 tokens left, a budget of 4": chunk(sequence(10), 4),
            "2 tokens left, a budget of 4": chunk(sequence(10, 8), 4),
            "10 tokens left, a budget of 0": chunk(sequence(10), 0),
            "10 tokens left, a budget of 4, a threshold of 3": chunk(sequence(10), 4, threshold=3),
            "10 tokens left, a budget of 2, a threshold of 3": chunk(sequence(10), 2, threshold=3),
        }
        says = "what is left, what the budget has, and the threshold if there is one: the smallest of them"
        worked_case("m5.5", got, dict(zip(got, [4, 2, 0, 3, 2], strict=True)), says)

    def test_a_token_in_flight_is_to_be_computed_too(self) -> None:
        """From M6 on: all 10 known tokens are computed, and the one drawn after them has not arrived yet."""
        says = "`num_uncomputed_tokens` is 1: the next step computes the token that is in flight"
        assert chunk(sequence(10, 10), 4) == 1, says

    def test_after_a_preemption_the_answer_is_computed_again_too(self) -> None:
        seq = sequence(3)
        seq.append_token(7)
        seq.append_token(8)
        assert chunk(seq, 64) == 5, "three tokens of the prompt and two of the answer: none of them is in the cache"

    def test_the_threshold_bounds_a_share(self) -> None:
        assert chunk(sequence(100), 64, threshold=16) == 16, "no more than the threshold"
        assert chunk(sequence(100, 92), 64, threshold=16) == 8, "8 are left: neither budget nor threshold is less"
        assert chunk(sequence(100), 8, threshold=16) == 8, "the budget is shorter than the threshold"
        assert chunk(sequence(100), 200, threshold=16) == 16, "also where the budget has room for the whole prompt"
