"""The arithmetic of a draft head: its input, its chain, and what survives a rejection."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.spec_decode.heads import KeptStates, chain_places, head_inputs
from tests.tiny import worked_case

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
        says = "tokens 4 and 9 go with what was kept, x and y; 5 with a and 6 with b; a pair stands where its hidden state does"
        got = {"positions": positions, "hidden": hidden}
        worked_case("x3.6", got, {"positions": [3, 4, 5, 8], "hidden": [X, A, B, Y]}, says)

    def test_decodes_take_nothing_from_this_step(self) -> None:
        positions, hidden = head_inputs(
            torch.tensor([7, 3]), torch.tensor([A, B]), torch.tensor([0, 1]), torch.tensor([X, Y])
        )
        assert positions.tolist() == [6, 2], "the pair of token 7 has position 6, and that of token 3 position 2"
        assert hidden.tolist() == [X, Y], "one token each: what goes with it was kept from an earlier step"

    def test_a_first_token_has_position_minus_one(self) -> None:
        positions, _ = head_inputs(torch.tensor([0, 1]), torch.tensor([A, B]), torch.tensor([0, 0]), torch.tensor([X]))
        assert positions.tolist() == [-1, 0], "nothing is before a text's first token: its pair has position -1"
        assert positions.dtype == torch.int64, f"positions are int64, as they came, not {positions.dtype}"

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
        assert got[:, 0].tolist() == wanted, f"sequences {sequence}: state t is called t, sequence s's kept one -1 - s"
        assert got_positions.tolist() == [position - 1 for position in positions], "one less than the token's own"


class TestChain:
    """x3.7."""

    def test_example_by_hand(self) -> None:
        positions, slots = chain_places(torch.tensor([4]), torch.tensor([[7, 2]], dtype=torch.int32), 4, 3)
        says = "the first pair stands before the newest token, at 3; position 3 is the last of block 7, and 4 the first of block 2"
        got = {"positions": positions, "slots": slots}
        worked_case("x3.7", got, {"positions": [[3], [4], [5]], "slots": [[31], [8], [9]]}, says)

    def test_each_sequence_has_its_own_table(self) -> None:
        tables = torch.tensor([[5, 6], [3, 1]], dtype=torch.int32)
        positions, slots = chain_places(torch.tensor([2, 5]), tables, 4, 2)
        assert positions.tolist() == [[1, 4], [2, 5]], "a row for each draft, and in it a column for each sequence"
        assert slots.tolist() == [[21, 4], [22, 5]], "sequence 1 has its tokens 4 and 5 in block 1, by its own table"
        dtypes = positions.dtype, slots.dtype
        assert dtypes == (torch.int64, torch.int64), f"positions and slots are int64, though tables are int32: {dtypes}"

    def test_padding_is_skipped_and_the_table_ends(self) -> None:
        tables = torch.tensor([[0, 0], [4, 9]], dtype=torch.int32)
        positions, slots = chain_places(torch.tensor([-1, 7]), tables, 4, 3)
        assert slots[:, 0].tolist() == [-1, -1, -1], "padding has slot -1 at every step of the chain"
        assert positions[0].tolist() == [0, 6], "padding has position 0: RoPE knows none below it"
        assert positions[:, 1].tolist() == [6, 7, 7], "no position lies behind the table"
        assert slots[:, 1].tolist() == [38, 39, 39], "the slots of positions 6, 7 and 7"

    def test_slots_beyond_32_bits(self) -> None:
        positions, slots = chain_places(torch.tensor([4]), torch.tensor([[2**28]], dtype=torch.int32), 16, 2)
        assert (positions.dtype, slots.dtype) == (torch.int64, torch.int64), "positions and slots are int64"
        assert slots.tolist() == [[2**32 + 3], [2**32 + 4]], "block 2^28 of 16 begins at slot 2^32: multiply in int64"

    @given(st.integers(1, 14), st.integers(1, 4), st.integers(1, 5))
    def test_any_chain_as_a_loop(self, newest: int, block_size: int, k: int) -> None:
        table = [3, 11, 2, 7, 5, 1, 8, 9, 4, 6, 10, 12, 14, 15, 16, 17, 18, 19, 20]
        positions, slots = chain_places(torch.tensor([newest]), torch.tensor([table], dtype=torch.int32), block_size, k)
        for i in range(k):
            p = min(newest - 1 + i, len(table) * block_size - 1)
            wanted = p, table[p // block_size] * block_size + p % block_size
            got = int(positions[i, 0]), int(slots[i, 0])
            assert got == wanted, f"draft {i} behind token {newest}, blocks of {block_size}: {got}, not {wanted}"


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
        self.step(kept, 2, 7, [70, 80, 90, 100])
        says = "tokens 7 to 10 are in places 3, 0, 1 and 2; one draft was accepted, so token 9 comes next, and token 8 is before it"
        got = {"positions": kept.positions[2], "before token 9": self.before(kept, 2, 9)}
        worked_case("x3.8", got, {"positions": [8, 9, 10, 7], "before token 9": 80.0}, says)

    def test_a_prompt_longer_than_the_depth(self) -> None:
        kept = self.kept()
        self.step(kept, 2, 0, [10, 11, 12, 13, 14, 15])
        assert kept.positions[2].tolist() == [4, 5, 2, 3], "the last 4 tokens, each in the place position % 4"
        found = [self.before(kept, 2, start) for start in (2, 3, 4, 5, 6)]
        assert found == [None, 12, 13, 14, 15], f"tokens 2 to 5 are kept, and 1 is not: {found}"
        assert kept.positions[:2].eq(-1).all(), "the other rows keep nothing"
        assert kept.positions[3].eq(-1).all(), "what the padding row holds belongs to no position"

    def test_a_rejection(self) -> None:
        """Tokens 7 to 10 were verified, and only the first draft was accepted; or none; or all."""
        kept = self.kept()
        self.step(kept, 0, 7, [70, 80, 90, 100])
        found = [self.before(kept, 0, start) for start in (8, 9, 10, 11)]
        assert found == [70, 80, 90, 100], f"any of the four may be the last that was accepted: {found}"
        self.step(kept, 0, 9, [91])
        assert self.before(kept, 0, 10) == 91, "the rejected token's state was replaced by its successor's"

    def test_nothing_before_a_text_or_of_another_sequence(self) -> None:
        kept = self.kept()
        self.step(kept, 1, 0, [1, 2, 3])
        assert self.before(kept, 1, 0) is None, "no token is before the first; the -1 of an empty place is no position"
        assert self.before(kept, 0, 3) is None, "another row keeps its own"
        kept.forget(torch.tensor([1]))
        assert self.before(kept, 1, 3) is None, "the row has another sequence"

    def test_several_sequences_in_one_step(self) -> None:
        """Row 2 has a prompt of six tokens, row 0 a decode at 4, and a padding token has the row behind the last."""
        kept = self.kept()
        rows, positions = torch.tensor([2] * 6 + [0, 3]), torch.tensor([*range(6), 4, 0])
        kept.keep(rows, positions, torch.tensor([6] * 6 + [5, 1]), column([*range(10, 16), 40, 99]))
        hidden, found = kept.before(torch.tensor([0, 1, 2, 2, 2, 0]), torch.tensor([5, 1, 6, 3, 2, 0]))
        assert found.dtype == torch.bool and found.shape == (6,), f"whether it is there: [S] bool, not {found.dtype}"
        assert found.tolist() == [True, False, True, True, False, False], (
            f"kept: token 4 of row 0, tokens 2 to 5 of row 2. Asked for in rows 0, 1, 2, 2, 2, 0: tokens 4, 0, 5, 2, 1, -1. {found}"
        )
        states = hidden[found, 0].tolist()
        assert states == [40, 15, 12], f"of tokens 4 of row 0, 5 and 2 of row 2: {states}"
        assert kept.positions[3].eq(-1).all(), "padding brings the padding row: it belongs to no position, -1, either"

    @given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 3)), max_size=12))
    def test_any_text_with_rejections(self, steps: list[tuple[int, int, int]]) -> None:
        """Of each step's tokens some at the end are rejected: the state asked for is always the last accepted token's."""
        kept = self.kept()
        texts: dict[int, list[int]] = {row: [] for row in range(3)}
        for number, (row, count, rejected) in enumerate(steps):
            text = texts[row]
            wanted = text[-1] if text else None
            assert self.before(kept, row, len(text)) == wanted, f"row {row} before token {len(text)}, step {number}"
            new = [100 * number + i for i in range(count)]
            self.step(kept, row, len(text), new)
            text += new[: max(1, count - rejected)]
