"""Exercise m2.1: WAITING -> RUNNING -> FINISHED_*, and nothing else."""

import pytest

from folovllm.request import SequenceStatus
from tests.sequences import make_seq

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING
ENDS = [status for status in SequenceStatus if status.is_finished]


class TestTransitions:
    def test_start(self) -> None:
        seq = make_seq()
        seq.start()
        assert seq.status is RUNNING

    def test_requeue_keeps_the_tokens(self) -> None:
        seq = make_seq(3)
        seq.start()
        seq.num_computed_tokens = 3
        seq.append_token(7)
        seq.requeue()
        assert seq.status is WAITING
        assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (0, 4)
        assert seq.token_ids.tolist() == [10, 11, 12, 7]
        assert (seq.num_output_tokens, seq.output_token_ids.tolist()) == (1, [7])

    @pytest.mark.parametrize("end", ENDS)
    def test_finish(self, end: SequenceStatus) -> None:
        for status in (WAITING, RUNNING):
            seq = make_seq()
            seq.status = status
            seq.finish(end)
            assert seq.status is end

    @pytest.mark.parametrize("end", ENDS)
    def test_the_first_end_stays(self, end: SequenceStatus) -> None:
        seq = make_seq()
        seq.status = end
        for other in ENDS:
            seq.finish(other)
            assert seq.status is end

    def test_only_an_end_ends(self) -> None:
        for status in (WAITING, RUNNING, *ENDS):
            for no_end in (WAITING, RUNNING):
                seq = make_seq()
                seq.status = status
                with pytest.raises(ValueError, match="end"):
                    seq.finish(no_end)
                assert seq.status is status

    @pytest.mark.parametrize("status", [RUNNING, *ENDS])
    def test_only_who_waits_starts(self, status: SequenceStatus) -> None:
        seq = make_seq(name="r7")
        seq.status = status
        with pytest.raises(ValueError, match="r7"):
            seq.start()
        assert seq.status is status

    @pytest.mark.parametrize("status", [WAITING, *ENDS])
    def test_only_who_runs_goes_back(self, status: SequenceStatus) -> None:
        seq = make_seq(name="r7")
        seq.status, seq.num_computed_tokens = status, 2
        with pytest.raises(ValueError, match="r7"):
            seq.requeue()
        assert (seq.status, seq.num_computed_tokens) == (status, 2)


def test_an_answer_grows_in_place() -> None:
    seq = make_seq(2, max_tokens=3)
    assert seq.num_uncomputed_tokens == seq.num_tokens == 2
    before = seq.token_ids
    for token in (5, 6, 7):
        seq.append_token(token)
    assert seq.token_ids.tolist() == [10, 11, 5, 6, 7] and before.tolist() == [10, 11]
    assert before.base is seq.token_ids.base  # a view of the same array, no copy
    assert seq.output_token_ids.tolist() == [5, 6, 7]
