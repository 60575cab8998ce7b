"""Who may queue: two budgets, and the difference between "later" and "never"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from folovllm.electives.server.admission import RETRY_AFTER, Admission
from folovllm.electives.server.errors import ApiError
from tests.tiny import worked_case


@dataclass
class Queue:
    """What admission asks of an engine."""

    num_queued: int = 0
    num_queued_tokens: int = 0
    num_open: int = 0  # with those that have begun


def refusal(engine: Queue, num_seqs: int, num_tokens: int = 0) -> ApiError | None:
    """How `check` refuses, with room for 4 sequences and 1,000 tokens."""
    try:
        Admission(engine, max_requests=4, max_tokens=1000).check(num_seqs, num_tokens)  # type: ignore[arg-type]
    except ApiError as error:
        return error
    return None


def status(*asked: Any) -> int:
    error = refusal(*asked)
    return error.status if error else 200


class TestAdmission:
    def test_a_worked_case(self) -> None:
        """2 of 4 sequences and 700 of 1,000 tokens are queued; 9 requests are open, with those that have begun."""
        asked = {
            "1 sequence, 300 tokens": (1, 300),
            "1 sequence, 301 tokens": (1, 301),
            "3 sequences, 10 tokens": (3, 10),
            "1 sequence, tokens not counted yet": (1,),
            "5 sequences, 10 tokens": (5, 10),
            "1 sequence, 1001 tokens": (1, 1001),
        }
        got = {name: status(Queue(2, 700, num_open=9), *each) for name, each in asked.items()}
        says = "2 + 1 of 4 and 700 + 300 of 1,000 fit; what does not fit now is 429; 5 of 4 and 1,001 of 1,000 never do: 400"
        worked_case("x1.5", got, dict(zip(got, [200, 429, 429, 200, 400, 400], strict=True)), says)

    def test_an_empty_queue_takes_all_that_it_holds(self) -> None:
        assert status(Queue(), 4, 1000) == 200, "4 of 4 and 1,000 of 1,000 fit"

    def test_what_runs_is_not_counted(self) -> None:
        assert status(Queue(num_open=50), 4, 1000) == 200, "50 requests run, and nobody waits: the queue is empty"

    def test_each_budget_alone_refuses(self) -> None:
        assert status(Queue(4, 4), 1, 1) == 429, "there is room for tokens, but not for another sequence"
        assert status(Queue(1, 1000), 1, 1) == 429, "there is room for sequences, but not for another token"

    def test_each_budget_alone_refuses_what_asks_for_nothing_of_the_other(self) -> None:
        """A request may have no sequence, or no token that is counted yet."""
        assert status(Queue(), 0, 1001) == 400, "0 sequences, 1,001 tokens: they never fit into a queue of 1,000"
        assert status(Queue(2, 700), 0, 301) == 429, "0 sequences, 301 tokens: 700 are queued"
        assert status(Queue(), 5, 0) == 400, "5 sequences without tokens never fit into a queue of 4"
        assert status(Queue(2, 700), 3, 0) == 429, "3 sequences without tokens: 2 of 4 are queued"
        assert status(Queue(4, 1000), 0, 0) == 200, "nothing at all fits into a full queue"

    def test_what_can_never_be_is_400_also_when_the_queue_is_full(self) -> None:
        """Who is told to come again would come for ever."""
        assert status(Queue(4, 1000), 5, 5) == 400, "5 sequences never fit into a queue of 4"
        assert status(Queue(4, 1000), 1, 1001) == 400, "1,001 tokens never fit into a queue of 1,000"

    @pytest.mark.parametrize("queue", [Queue(4, 10), Queue(1, 1000)])
    def test_a_full_queue_says_when_to_come_again(self, queue: Queue) -> None:
        error = refusal(queue, 1, 1)
        assert error is not None and error.code == "queue_full", "programs read the code"
        assert error.headers == {"Retry-After": RETRY_AFTER}, (
            "clients that can wait heed this header. Its value is text, as in every header: a number ends the response in a 500"
        )

    def test_who_can_never_be_served_is_not_asked_back(self) -> None:
        error = refusal(Queue(), 5)
        assert error is not None and error.headers == {}, "no Retry-After: it would not help"
        assert error.code != "queue_full", "the queue is empty: a program that reads this code would come again"

    @pytest.mark.parametrize(
        ("queue", "asked", "word", "other"),
        [
            (Queue(), (5, 1), "sequences", "tokens"),
            (Queue(), (1, 1001), "prompt tokens", "sequences"),
            (Queue(4, 10), (1, 1), "sequences", "tokens"),
            (Queue(1, 1000), (1, 1), "prompt tokens", "sequences"),
        ],
    )
    def test_the_message_names_the_budget(self, queue: Queue, asked: tuple[int, int], word: str, other: str) -> None:
        error = refusal(queue, *asked)
        assert error is not None and word in error.message, f"which of the two is too many? Here it is the {word}"
        assert other not in error.message, f"of {other} there are not too many"
