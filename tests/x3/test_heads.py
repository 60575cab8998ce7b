"""The arithmetic of a draft head: its input, its chain, and what survives a rejection."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.spec_decode.heads import KeptStates, chain_places, head_inputs

A, B, C, D = ([float(i), i + 0.5] for i in range(4))
X, Y = [9.0, 9.0], [8.0, 8.0]


def column(numbers: list[int]) -> torch.Tensor:
    """States that are told apart by their first number."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None].repeat(1, 2)


class TestInputs:
    """x3.6."""

    def test_example_by_hand(self) -> None:
        positions, hidden = head_inputs(
            torch.tensor([4, 5, 6, 9]), torch.tensor([A, B, C, D]), torch.tensor([0, 0, 0, 1]), torch.tensor([X, Y])
        )
        assert positions.tolist() == [3, 4, 5, 8], "a pair has the position of its hidden state's token"
        assert hidden.tolist() == [X, A, B, Y], "each token goes with the hidden state of the token before it"

    def test_decodes_take_nothing_from_this_step(self) -> None:
        positions, hidden = head_inputs(
            torch.tensor([7, 3]), torch.tensor([A, B]), torch.tensor([0, 1]), torch.tensor([X, Y])
        )
        assert positions.tolist() == [6, 2]
        assert hidden.tolist() == [X, Y], "one token each: what goes with it was kept from an earlier step"

    def test_a_first_token_has_position_minus_one(self) -> None:
        positions, _ = head_inputs(torch.tensor([0, 1]), torch.tensor([A, B]), torch.tensor([0, 0]), torch.tensor([X]))
        assert positions.tolist() == [-1, 0]

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6))
    def test_any_step_as_a_loop(self, seqs: list[tuple[int, int]]) -> None:
        """Sequences that bring nothing, as padding does, are skipped."""
        positions = [start + i for start, n in seqs for i in range(n)]
        sequence = [s for s, (_, n) in enumerate(seqs) for _ in range(n)]
        if not positions:
            return
        hidden, before = column([*range(len(positions))]), column([-1 - s for s in range(len(seqs))])
        got_positions, got = head_inputs(torch.tensor(positions), hidden, torch.tensor(sequence), before)
        wanted = [t - 1 if t and sequence[t - 1] == s else -1 - s for t, s in enumerate(sequence)]
        assert got[:, 0].tolist() == wanted
        assert got_positions.tolist() == [position - 1 for position in positions]


class TestChain:
    """x3.7."""

    def test_example_by_hand(self) -> None:
        positions, slots = chain_places(torch.tensor([4]), torch.tensor([[7, 2]], dtype=torch.int32), 4, 3)
        assert positions.tolist() == [[3], [4], [5]], "the first pair is at the position before the newest token"
        assert slots.tolist() == [[31], [8], [9]], "a slot is block * block_size + place in the block"

    def test_each_sequence_has_its_own_table(self) -> None:
        tables = torch.tensor([[5, 6], [3, 1]], dtype=torch.int32)
        positions, slots = chain_places(torch.tensor([2, 5]), tables, 4, 2)
        assert positions.tolist() == [[1, 4], [2, 5]]
        assert slots.tolist() == [[21, 4], [22, 5]]

    def test_padding_is_skipped_and_the_table_ends(self) -> None:
        tables = torch.tensor([[0, 0], [4, 9]], dtype=torch.int32)
        positions, slots = chain_places(torch.tensor([-1, 7]), tables, 4, 3)
        assert slots[:, 0].tolist() == [-1, -1, -1], "padding has slot -1"
        assert positions.min() >= 0, "RoPE knows no position below 0"
        assert positions[:, 1].tolist() == [6, 7, 7], "no position lies behind the table"
        assert slots[:, 1].tolist() == [38, 39, 39]

    @given(st.integers(1, 14), st.integers(1, 4), st.integers(1, 5))
    def test_any_chain_as_a_loop(self, newest: int, block_size: int, k: int) -> None:
        table = [3, 11, 2, 7, 5, 1, 8, 9, 4, 6, 10, 12, 14, 15, 16, 17, 18, 19, 20]
        positions, slots = chain_places(torch.tensor([newest]), torch.tensor([table], dtype=torch.int32), block_size, k)
        for i in range(k):
            p = min(newest - 1 + i, len(table) * block_size - 1)
            assert (int(positions[i, 0]), int(slots[i, 0])) == (p, table[p // block_size] * block_size + p % block_size)


class TestKept:
    """x3.8."""

    @staticmethod
    def kept(rows: int = 3, depth: int = 4) -> KeptStates:
        return KeptStates(rows, depth, 2, torch.float32, torch.device("cpu"))

    @staticmethod
    def step(kept: KeptStates, row: int, start: int, numbers: list[int]) -> None:
        """A step over one sequence, whose states are told apart by `numbers`."""
        n = len(numbers)
        positions = torch.arange(start, start + n)
        kept.keep(torch.full((n,), row), positions, torch.full((n,), start + n), column(numbers))

    @staticmethod
    def before(kept: KeptStates, row: int, start: int) -> float | None:
        hidden, found = kept.before(torch.tensor([row]), torch.tensor([start]))
        return float(hidden[0, 0]) if found[0] else None

    def test_example_by_hand(self) -> None:
        kept = self.kept()
        self.step(kept, 2, 0, [10, 11, 12, 13, 14, 15])
        assert kept.positions[2].tolist() == [4, 5, 2, 3], "the last 4 tokens, each in the place position % 4"
        assert self.before(kept, 2, 6) == 15
        assert kept.positions[:2].eq(-1).all(), "the other rows keep nothing"

    def test_a_rejection(self) -> None:
        """Tokens 7 to 10 were verified, and only the first draft was accepted."""
        kept = self.kept()
        self.step(kept, 0, 7, [70, 80, 90, 100])
        assert self.before(kept, 0, 9) == 80, "the next step starts at 9: the state of token 8 survives"
        self.step(kept, 0, 9, [91])
        assert self.before(kept, 0, 10) == 91, (
            "the rejected token's state was replaced by that of the token in its place"
        )

    def test_nothing_before_a_text_or_of_another_sequence(self) -> None:
        kept = self.kept()
        self.step(kept, 1, 0, [1, 2, 3])
        assert self.before(kept, 1, 0) is None, "a text's first token has none before it"
        assert self.before(kept, 0, 3) is None, "another row keeps its own"
        kept.forget(torch.tensor([1]))
        assert self.before(kept, 1, 3) is None, "the row has another sequence"

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 3)), max_size=12))
    def test_any_text_with_rejections(self, steps: list[tuple[int, int, int]]) -> None:
        """Of each step's tokens some at the end are rejected: the state asked for is always the last accepted token's."""
        kept = self.kept()
        texts: dict[int, list[int]] = {row: [] for row in range(3)}
        for number, (row, count, rejected) in enumerate(steps):
            text = texts[row]
            wanted = text[-1] if text else None
            assert self.before(kept, row, len(text)) == wanted
            new = [100 * number + i for i in range(count)]
            self.step(kept, row, len(text), new)
            text += new[: max(1, count - rejected)]
