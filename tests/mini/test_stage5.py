"""Stage 5: prefixes that are found again, and chunks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from milestones.mini.given.contract import Limits
from milestones.mini.ledger import Ask
from tests.helpers import prompts
from tests.mini.conftest import Mini, asks_for, interfered, overwritten_asks, random_asks

BEGINNING, OTHER, *TAILS = prompts([16, 16, 3, 5, 4, 2, 6, 7], seed=3)

ALIKE = [
    ([1, 12, 3, 4], [11, 2, 3, 4]), ([1, 23, 4, 5], [12, 3, 4, 5]), ([1, 2, 3, 4], [4, 3, 2, 1]),
    ([1, 2, 3, 4], [1, 3, 2, 4]), ([1, 5, 3, 4], [2, 4, 3, 4]), ([2, 6, 7, 8], [3, 4, 7, 8]),
    ([1, 2, 9, 9], [5, 6, 9, 9]), ([0, 7, 7, 7], [256, 7, 7, 7]), ([0, 1, 7, 7], [1, 0, 7, 7]),
    ([0, 0, 0, 5], [0, 0, 5, 0]), ([0, 256, 5, 5], [1, 0, 5, 5]), ([7, 7, 8, 9], [7, 8, 8, 9]),
    ([1, 2, 3, 4], [1, 2, 3, 5]), ([6, 2, 3, 4], [5, 2, 3, 4]),
]  # fmt: skip


def test_worked_case(mini: Mini) -> None:
    """10 tokens, blocks of 4, and the same prompt again later: it begins with the two full blocks and computes two tokens."""
    prompt = prompts([10])[0]
    trace = mini.play(asks_for([prompt, prompt], [4, 4], [0, 6]), Limits(16, 4, 2, 64))
    start = next(start for step in trace.steps for id, start, _ in step.work if id == "b")
    assert start == 8, f"b begins with token {start}: tokens 0 to 8 are in two full blocks that a has left"


def test_a_token_is_left_to_compute(mini: Mini) -> None:
    """The prompt is two full blocks, and all of it is there. The logits of its last token are not: it is computed."""
    prompt = prompts([8])[0]
    trace = mini.play(asks_for([prompt, prompt], [4, 4], [0, 6]), Limits(16, 4, 2, 64))
    start = next(start for step in trace.steps for id, start, _ in step.work if id == "b")
    assert start == 4, f"b begins with token {start}: whole blocks are found, and one token has to be left"


def test_an_answer_is_found_too(mini: Mini) -> None:
    """The second turn of a conversation: 10 tokens of a prompt, the 10 of its answer, of which 9 were computed, and two more."""
    prompt = prompts([10])[0]
    first = asks_for([prompt], [10])[0]
    asks = asks_for([prompt, [*prompt, *first.answer, 1, 2]], [10, 3], [0, 14])
    trace = mini.play(asks, Limits(16, 4, 2, 64))
    start = next(start for step in trace.steps for id, start, _ in step.work if id == "b")
    assert start == 16, f"b begins with token {start}: of the 19 tokens that a has computed, 16 are in full blocks"


def test_running_sequences_share(mini: Mini) -> None:
    """a still runs when b comes: the full blocks of the prompt are in both tables."""
    trace = mini.play(asks_for([BEGINNING + TAILS[0], BEGINNING + TAILS[1]], [12, 5], [0, 3]), Limits(16, 4, 2, 64))
    tables = next(step.tables for step in trace.steps if len(step.tables) == 2)
    assert tables["a"][:4] == tables["b"][:4], f"the first four blocks are the same, and the tables are {tables}"


def test_equal_blocks_behind_different_beginnings(mini: Mini) -> None:
    """The second blocks of a and c have equal tokens and different K/V: before them is something else."""
    tail = TAILS[4] + TAILS[5]
    asks = asks_for([BEGINNING[:4] + tail, OTHER[:8], OTHER[:4] + tail], [6, 6, 6], [0, 8, 16])
    mini.play(asks, Limits(16, 4, 2, 64))


def test_equal_blocks_behind_equal_blocks(mini: Mini) -> None:
    """[X][B][C] finds [X][B]. The C that is there stands behind [A][B], so a name needs all that is before its block."""
    a, b, c, x = (prompts([16], 9)[0][i : i + 4] for i in range(0, 16, 4))
    asks = asks_for([[*a, *b, *c, 1], [*x, *b, 2], [*x, *b, *c, 3]], [3, 3, 3], [0, 6, 12])
    trace = mini.play(asks, Limits(16, 4, 2, 64))
    start = next(start for step in trace.steps for id, start, _ in step.work if id == "c")
    assert start == 8, f"c begins with token {start}: its first two blocks are there, and its third is not"


def test_other_tokens_have_another_name(mini: Mini) -> None:
    """Blocks that are alike: as digits without a gap, sorted, summed, multiplied, as bytes. First as the first block, then behind one."""
    for one, other in ALIKE:
        texts = [[*one, 9], [*other, 9], [*BEGINNING[:4], *one, 9], [*BEGINNING[:4], *other, 9]]
        trace = mini.play(asks_for(texts, [2] * 4, [0, 3, 6, 9]), Limits(16, 4, 1, 64))
        start = {id: start for step in reversed(trace.steps) for id, start, _ in step.work}
        assert start["b"] == 0 and start["d"] == 4, f"the block {other} is found where {one} was computed"


def test_a_thousand_names(mini: Mini) -> None:
    """1,000 requests of a block each, and no two blocks alike. Names of two bytes confuse some of them."""
    texts = prompts([5] * 1000, seed=11)
    asks = [Ask(f"r{i}", text, (0,), i // 25, num_certain=0) for i, text in enumerate(texts)]
    mini.play(asks, Limits(2100, 4, 25, 200))


def test_what_is_found_is_not_computed_again(mini: Mini) -> None:
    """V of token 2 is overwritten while a runs. b begins with a's blocks: its tokens come from what they hold now."""
    prompt = prompts([10], 2)[0]
    a, b = asks_for([prompt, prompt], [14, 12], [0, 6])
    mini.play([interfered(a, ((12, 2),)), interfered(b, ((8, 2),))], Limits(16, 4, 2, 64))


def test_chunks_read_the_cache(mini: Mini) -> None:
    """V of one token is overwritten between two steps, and what `attend` returns gets something added: all of it counts."""
    sizes, limits = [(9, 12), (30, 12), (6, 12)], Limits(40, 4, 3, 16)
    mini.play(overwritten_asks(sizes), limits)
    mini.play([interfered(ask, shifted=True) for ask in random_asks(sizes, seed=1)], limits, shifts=True)


def test_only_what_is_computed_is_found(mini: Mini) -> None:
    """b gives way in the middle of its prompt. When it comes back, it may find the blocks of the chunks that were computed."""
    trace = mini.play(random_asks([(8, 20), (40, 6)], [0, 2]), Limits(13, 4, 2, 8))
    assert any("b" in step.preempted for step in trace.steps), "b was not preempted"


def test_a_long_prompt_lets_the_others_go_on(mini: Mini) -> None:
    """Four sequences decode while a prompt of 60 tokens comes, 16 tokens a step: they have a token in every step."""
    sizes = [(4, 20), (5, 20), (6, 20), (7, 20), (60, 8)]
    trace = mini.play(random_asks(sizes, [0, 0, 0, 0, 5]), Limits(80, 4, 5, 16))
    for number, step in enumerate(trace.steps[5:14], 5):
        missing = {*"abcd"} - {id for id, _, _ in step.work}
        assert not missing, (
            f"step {number} computes nothing of {', '.join(sorted(missing))}: the prompt of e took the budget"
        )
    first = next(i for i, step in enumerate(trace.steps) if "e" in step.tokens)
    assert first <= 11, f"e has its first token in step {first}: 12 of its tokens fit into each step from step 5 on"


def test_no_more_tokens_than_the_reference(mini: Mini) -> None:
    """Turns of two conversations with one beginning, in memory that is too small to keep all."""
    prompts_ = (
        [BEGINNING + tail for tail in TAILS] + [OTHER + tail for tail in TAILS[:3]] + [BEGINNING + TAILS[5] + TAILS[1]]
    )
    asks = asks_for(prompts_, [6] * len(prompts_), [3 * i for i in range(len(prompts_))])
    own, ours = mini.beside(asks, Limits(22, 4, 3, 32))
    assert own.computed <= ours.computed, (
        f"{own.computed} tokens were computed, and the reference computes {ours.computed}"
    )


def test_the_longest_unused_goes_first(mini: Mini) -> None:
    """Two prefixes are cached, and one is used again. Then something else needs room: the other one goes."""
    asks = asks_for(
        [BEGINNING + TAILS[0], OTHER + TAILS[0], BEGINNING + TAILS[1], prompts([22], 7)[0], BEGINNING + TAILS[2]],
        [2] * 5, [0, 4, 8, 12, 16],
    )  # fmt: skip
    trace = mini.play(asks, Limits(12, 4, 1, 64))
    start = next(start for step in trace.steps for id, start, _ in step.work if id == "e")
    assert start == 16, f"e begins with token {start}: its first 16 were used later than those of b"


def test_it_comes_back_to_its_own_blocks(mini: Mini) -> None:
    """A sequence that gave way finds what is left of its blocks: fewer tokens are computed than without reuse."""
    sizes = [(8, 16), (8, 16), (8, 16)]
    trace = mini.play(random_asks(sizes), Limits(13, 4, 3, 64))
    without = sum(n + m - 1 for n, m in sizes)
    lost = trace.computed - without
    assert any(step.preempted for step in trace.steps), "nobody was preempted"
    assert lost < 16, f"{lost} tokens were computed again, though the blocks of those that gave way were not all taken"


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 16), st.integers(0, 7), st.integers(1, 9)), min_size=2, max_size=7),
    st.integers(1, 5), st.integers(0, 12), st.integers(4, 40), st.integers(0, 3),
)  # fmt: skip
def test_any_prefixes(
    mini: Mini, texts: list[tuple[int, int, int, int]], size: int, more: int, budget: int, gap: int
) -> None:
    tails = [*TAILS, [1, 2], [1]]
    asks = asks_for(
        [(BEGINNING, OTHER)[which][:cut] + tails[tail] for which, cut, tail, _ in texts],
        [length for *_, length in texts], [gap * i for i in range(len(texts))],
    )  # fmt: skip
    longest = max(len(ask.prompt) + len(ask.answer) for ask in asks)
    mini.play(asks, Limits(-(-longest // size) + more, size, 4, budget))
