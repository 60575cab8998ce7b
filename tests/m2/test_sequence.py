"""Exercise m2.1: WAITING -> RUNNING -> FINISHED_*, and nothing else."""

from collections.abc import Callable

import pytest

from folovllm.request import Sequence, SequenceStatus
from tests.sequences import make_seq
from tests.tiny import worked_case

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
ENDS = [status for status in SequenceStatus if status.is_finished]


def ended_with(call: Callable[..., None], *arguments: object) -> str:
    """Whether a call refused what it was asked: "ValueError" or "no error"."""
    try:
        call(*arguments)
    except ValueError:
        return "ValueError"
    return "no error"


class TestTransitions:
    def test_a_worked_case_of_start(self) -> None:
        waiting, ended = make_seq(), make_seq()
        ended.status = SequenceStatus.FINISHED_LENGTH
        got = {
            "one that waits": [ended_with(waiting.start), waiting.status.value],
            "one that has ended": [ended_with(ended.start), ended.status.value],
        }
        says = "who waits runs afterwards; from any other status it is an error, and nothing changes"
        worked_case(
            "m2.1 start", got, dict(zip(got, [["no error", "running"], ["ValueError", "length"]], strict=True)), says
        )

    def test_a_worked_case_of_requeue(self) -> None:
        """A prompt of 3 tokens, all computed, and one token of the answer."""
        seq = make_seq(3)
        seq.status, seq.num_computed_tokens = RUNNING, 3
        seq.append_token(7)
        seq.requeue()
        got = {"status": seq.status.value, "tokens": seq.token_ids, "computed tokens": seq.num_computed_tokens}
        expected = {"status": "waiting", "tokens": [10, 11, 12, 7], "computed tokens": 0}
        worked_case("m2.1 requeue", got, expected, "its K/V is gone, its tokens stay: all are to be computed again")

    def test_a_worked_case_of_finish(self) -> None:
        seq, got = make_seq(), []
        for end in (RUNNING, SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_ABORTED):
            got.append([ended_with(seq.finish, end), seq.status.value])
        says = "RUNNING is no end; then it stops; an abort comes too late to change how it ended"
        worked_case("m2.1 finish", got, [["ValueError", "waiting"], ["no error", "stop"], ["no error", "stop"]], says)

    def test_requeue_keeps_the_tokens(self) -> None:
        seq = make_seq(3)
        seq.start()
        seq.num_computed_tokens = 3
        seq.append_token(7)
        seq.block_table.append(4)
        seq.requeue()
        assert seq.status is WAITING, "it waits again"
        assert seq.block_table == [4], "the cache takes its blocks back by this list: emptied here, they are nobody's"
        assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (0, 4), "all four tokens are to be computed"
        assert seq.token_ids.tolist() == [10, 11, 12, 7], "prompt and answer stay as they are"
        assert (seq.num_output_tokens, seq.output_token_ids.tolist()) == (1, [7]), "its answer's token is still there"

    @pytest.mark.parametrize("status", SequenceStatus)
    @pytest.mark.parametrize("to", SequenceStatus)
    def test_finish(self, status: SequenceStatus, to: SequenceStatus) -> None:
        seq = make_seq()
        seq.status = status
        ended = ended_with(seq.finish, to)
        if to in ENDS:
            first = status if status in ENDS else to
            assert (ended, seq.status) == ("no error", first), "who waits or runs ends so, and the first end stays"
        else:
            says = f"{to.name} is no end: ValueError, also for a sequence that is {status.name}"
            assert (ended, seq.status) == ("ValueError", status), f"{says}, and nothing changes"

    @pytest.mark.parametrize(("call", "own"), [("start", WAITING), ("requeue", RUNNING)])
    @pytest.mark.parametrize("status", SequenceStatus)
    def test_only_from_one_status(self, call: str, own: SequenceStatus, status: SequenceStatus) -> None:
        seq = make_seq(name="r7")
        seq.status, seq.num_computed_tokens = status, 2
        if status is not own:
            with pytest.raises(ValueError) as error:
                getattr(seq, call)()
            assert "r7" in str(error.value), "the error names the request: `_expect` raises it so"
            assert (seq.status, seq.num_computed_tokens) == (status, 2), "what was refused changes nothing"


def test_an_answer_grows_in_place() -> None:
    seq = make_seq(2, max_tokens=3)
    assert seq.num_uncomputed_tokens == seq.num_tokens == 2
    before = seq.token_ids
    for token in (5, 6, 7):
        seq.append_token(token)
    assert seq.token_ids.tolist() == [10, 11, 5, 6, 7] and before.tolist() == [10, 11]
    assert before.base is seq.token_ids.base  # a view of the same array, no copy
    assert seq.output_token_ids.tolist() == [5, 6, 7]


def test_a_token_in_flight_is_the_next_to_compute() -> None:
    """With overlap a step is scheduled before the token that it begins with is known: there is always one to compute."""
    seq = make_seq(3)
    seq.num_computed_tokens = 2
    assert seq.num_uncomputed_tokens == 1, "the last token of the prompt"
    for computed in (3, 4):
        seq.num_computed_tokens = computed
        assert seq.num_uncomputed_tokens == 1, "a drawn token that the host does not know yet"
    seq.append_token(7)
    assert seq.num_uncomputed_tokens == 1, "of 4 known tokens 4 are computed: the next one is in flight"


def test_answers_share_their_request() -> None:
    """What all have in common is one record; each has a seed of its own, and the first alone scores the prompt."""
    first = make_seq(4, n=2, prompt_logprobs=0)
    second = Sequence(first.request, first.detokenizer, index=1)
    assert first.seed == first.request.seed != second.seed and first.params is second.params
    assert (first.num_unscored_tokens, second.num_unscored_tokens) == (3, 0), "nothing comes before the first token"
    first.prompt_logprobs += [{}, {}]
    assert first.num_unscored_tokens == 1
    assert make_seq(4).num_unscored_tokens == 0, "nobody asked for any"
    with pytest.raises(AttributeError):
        first.request.seed = 1
