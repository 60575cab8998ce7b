"""Stage 0: one request after the other; the tokens are those of transformers."""

from tests.mini.conftest import STORIES, Mini, asks_for, random_asks, running_example


def test_worked_case(mini: Mini) -> None:
    """A alone: step 0 computes the 9 tokens of the prompt, each step after it one token. 10 steps, 10 tokens."""
    trace = mini.play(running_example()[:1], folder=STORIES)
    assert [n for step in trace.steps for _, _, n in step.work] == [9] + [1] * 9, "tokens computed, step by step"


def test_each_request_has_a_cache_of_its_own(mini: Mini) -> None:
    """The second request begins with an empty cache, and a prompt may have one token."""
    mini.play(random_asks([(7, 9), (1, 8), (12, 8)]))


def test_first_come_first_served(mini: Mini) -> None:
    trace = mini.play(random_asks([(4, 3), (5, 2), (6, 2)], arrives=[0, 0, 1]))
    began = list(dict.fromkeys(id for step in trace.steps for id, _, _ in step.work))
    assert began == ["a", "b", "c"], f"they were served in the order {', '.join(began)}, and came in the order a, b, c"


def test_one_token(mini: Mini) -> None:
    """An answer of one token takes one step: the prompt's."""
    trace = mini.play(random_asks([(5, 1)]))
    assert trace.computed == 5, (
        f"{trace.computed} tokens were computed, and the prompt has 5: the newest token of an answer is never needed again"
    )


def test_the_same_prompt_twice(mini: Mini) -> None:
    prompt = [104, 101, 108, 108, 111]
    mini.play(asks_for([prompt, prompt], [6, 9]))


def test_it_arrives_while_another_runs(mini: Mini) -> None:
    mini.play(random_asks([(5, 8), (6, 8)], arrives=[0, 3]))


def test_the_course_s_own_model(mini: Mini) -> None:
    """A, B and C, whose answers are those of every preset of the real engine."""
    mini.play(running_example(), folder=STORIES)
