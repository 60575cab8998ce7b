"""What a rank holds, a function at a time: no process is started here, the ranks are computed one after the other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from folovllm.distributed.sharding import shard_column, shard_qkv, shard_row, shard_vocab
from folovllm.layers.sharded import ShardedEmbedding
from folovllm.worker.step_sampler import best_of_ranks
from tests.tiny import worked_case

SIZES = st.integers(1, 6)


def numbered(rows: int, columns: int) -> torch.Tensor:
    """A matrix in which every number says where it is."""
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


class InItsFile:
    """A weight that was not read yet: it has a shape, and slices can be had, nothing else. Counts the numbers that were read."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.shape, self.num_read = whole, whole.shape, 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        assert all(isinstance(each, slice) for each in parts), f"a file gives slices alone, and was asked for {index}"
        part = self.whole[index]
        self.num_read += part.numel()
        return part


class TestColumnAndRow:
    def test_a_worked_case_of_column(self) -> None:
        weight = InItsFile(numbered(4, 2))
        got = {"part": shard_column(weight, 1, 2), "numbers read": weight.num_read}
        says = "rank 1 of 2 holds the last two of the rows [0, 1], [2, 3], [4, 5], [6, 7], and reads no others"
        worked_case("m6.6 column", got, {"part": [[4.0, 5.0], [6.0, 7.0]], "numbers read": 4}, says)

    def test_a_worked_case_of_row(self) -> None:
        weight = InItsFile(numbered(2, 4))
        got = {"part": shard_row(weight, 1, 2), "numbers read": weight.num_read}
        says = "rank 1 of 2 holds the last two columns of the rows [0, 1, 2, 3] and [4, 5, 6, 7], and reads no others"
        worked_case("m6.6 row", got, {"part": [[2.0, 3.0], [6.0, 7.0]], "numbers read": 4}, says)

    @given(size=SIZES, share=st.integers(1, 5), other=st.integers(1, 5))
    def test_the_ranks_together_are_the_whole(self, size: int, share: int, other: int) -> None:
        tall, wide, bias = numbered(size * share, other), numbered(other, size * share), torch.arange(size * share)
        columns, rows = ([cut(w, r, size) for r in range(size)] for cut, w in ((shard_column, tall), (shard_row, wide)))
        assert {(*part.shape,) for part in columns} == {(share, other)}, "column cuts the rows of the weight: outputs"
        assert {(*part.shape,) for part in rows} == {(other, share)}, "row cuts the columns of the weight: inputs"
        assert torch.equal(torch.cat(columns), tall), "the ranks' rows, in the order of the ranks, are the whole"
        assert torch.equal(torch.cat(rows, 1), wide), "the ranks' columns, in the order of the ranks, are the whole"
        parts = [shard_column(bias, r, size) for r in range(size)]
        assert torch.equal(torch.cat(parts), bias), "a bias is cut as its rows are"

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_an_mlp_by_hand(self, size: int) -> None:
        """A column cut, then a row cut: each rank alone up to one sum."""
        generator = torch.Generator().manual_seed(size)
        shapes = (24, 8), (24, 8), (8, 24), (5, 8)
        gate, up, down, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        total = torch.zeros(5, 8, dtype=torch.float64)
        for rank in range(size):
            own_gate, own_up = shard_column(gate, rank, size), shard_column(up, rank, size)
            total += (F.silu(x @ own_gate.T) * (x @ own_up.T)) @ shard_row(down, rank, size).T
        says = "gate and up cut by outputs, down by inputs: the ranks' sums are those of the whole MLP"
        torch.testing.assert_close(total, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, msg=says)


class TestQkv:
    def test_a_worked_case(self) -> None:
        """Heads of two rows, each row named 10 * head + row."""
        four, two = torch.tensor([0, 1, 10, 11, 20, 21, 30, 31]), torch.tensor([0, 1, 10, 11])
        got = {
            "four heads on two ranks": [shard_qkv(four, 2, rank, 2) for rank in range(2)],
            "two heads on four ranks": [shard_qkv(two, 2, rank, 4) for rank in range(4)],
        }
        answers = [[[0, 1, 10, 11], [20, 21, 30, 31]], [[0, 1], [0, 1], [10, 11], [10, 11]]]
        says = "two whole heads each; where ranks are more than heads, neighbouring ranks share one"
        worked_case("m6.6 shard_qkv", got, dict(zip(got, answers, strict=True)), says)

    @given(size=SIZES, share=st.integers(1, 4), dim=st.integers(1, 4))
    def test_an_equal_share_of_the_heads(self, size: int, share: int, dim: int) -> None:
        weight = numbered(size * share * dim, 3)
        parts = [shard_qkv(weight, dim, rank, size) for rank in range(size)]
        assert all(len(part) == share * dim for part in parts), "each rank has as many heads as the others"
        assert torch.equal(torch.cat(parts), weight), "the heads, each of them whole, in the order of the ranks"

    @given(heads=st.integers(1, 4), copies=st.integers(2, 4), dim=st.integers(1, 4))
    def test_fewer_kv_heads_than_ranks_live_on_several(self, heads: int, copies: int, dim: int) -> None:
        weight, size = numbered(heads * dim, 3), heads * copies
        for rank in range(size):
            head = weight.view(heads, dim, 3)[rank // copies]
            assert torch.equal(shard_qkv(weight, dim, rank, size), head), "neighbouring ranks share a head"

    @given(kv_heads=st.sampled_from([1, 2, 4]), group=st.sampled_from([1, 2, 4]), size=st.sampled_from([1, 2, 4]))
    def test_query_heads_find_their_kv_head_on_their_own_rank(self, kv_heads: int, group: int, size: int) -> None:
        heads = kv_heads * group
        assume(heads % size == 0)
        query, key = torch.arange(heads)[:, None], torch.arange(kv_heads)[:, None]  # one number a head
        for rank in range(size):
            own, keys = shard_qkv(query, 1, rank, size), shard_qkv(key, 1, rank, size)
            local_group = len(own) // len(keys)
            for i, head in enumerate(own.flatten().tolist()):
                assert keys[i // local_group].item() == head // group, "a query head's KV head is on another rank"

    @pytest.mark.parametrize(("heads", "size", "numbers"), [(4, 2, 24), (2, 4, 12)])
    def test_of_a_weight_in_its_file_only_the_heads_are_read(self, heads: int, size: int, numbers: int) -> None:
        weight = InItsFile(numbered(heads * 4, 3))
        assert shard_qkv(weight, 4, 1, size).numel() == weight.num_read == numbers, "only the rank's own heads are read"


def embedding(weight: torch.Tensor, rank: int, size: int, all_reduce: Any) -> ShardedEmbedding:
    """A rank's layer, of a group that has no other members."""
    layer = ShardedEmbedding.__new__(ShardedEmbedding)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.group = SimpleNamespace(rank=rank, size=size, all_reduce=all_reduce)
    return layer


def looked_up(layer: ShardedEmbedding, ids: torch.Tensor) -> torch.Tensor:
    """What the layer gives for these ids; an index that no row has is a sentence."""
    try:
        return layer(ids)
    except IndexError as error:
        held = f"rank {layer.group.rank} holds {len(layer.weight)} rows"
        pytest.fail(f"{held}, and an index outside of them was read ({error}): mask it first", pytrace=False)


class TestVocabParallelEmbedding:
    VOCAB, WIDTH = 10, 3

    def test_a_worked_case(self) -> None:
        """Rows 10, 20, 30, 40 on two ranks, two each; all four ids are looked up. The sum is played by adding 100."""
        got: dict[str, Any] = {}
        for rank, rows in enumerate(([[10.0], [20.0]], [[30.0], [40.0]])):
            given: list[torch.Tensor] = []

            def all_reduce(part: torch.Tensor, given: list[torch.Tensor] = given) -> torch.Tensor:
                given.append(part)
                return part + 100

            try:
                out = embedding(torch.tensor(rows, dtype=torch.bfloat16), rank, 2, all_reduce)(torch.arange(4))
                returned = [out.flatten(), str(out.dtype)]
            except IndexError as error:
                returned = [f"IndexError: {error}"]
            got[f"rank {rank} gives"] = [part.flatten() for part in given]
            got[f"rank {rank} returns"] = returned
        answers: list[Any] = [[[10.0, 20.0, 0.0, 0.0]], [[110.0, 120.0, 100.0, 100.0], "torch.bfloat16"]]
        answers += [[[0.0, 0.0, 30.0, 40.0]], [[100.0, 100.0, 130.0, 140.0], "torch.bfloat16"]]
        says = "each rank gives its own rows and zeros for the rest, in its weight's dtype, and returns the sum of all"
        worked_case("m6.8", got, dict(zip(got, answers, strict=True)), says)

    def parts(self, ids: torch.Tensor, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The whole embedding, and what each rank gives into the sum."""
        weight, given = 1 + numbered(self.VOCAB, self.WIDTH), []
        for rank in range(size):

            def all_reduce(part: torch.Tensor) -> torch.Tensor:
                given.append(part.clone())
                return 100 + part

            out = looked_up(embedding(shard_vocab(weight, rank, size), rank, size, all_reduce), ids)
            assert torch.equal(out, 100 + given[-1]), "what all_reduce returns is the result"
        assert len(given) == size, "each rank is to call all_reduce once, a lone rank as well"
        return weight, given

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_one_rank_has_a_row_and_the_others_give_zeros(self, size: int) -> None:
        ids = torch.tensor([0, 9, 3, 4, 7, 8, 5, 4])
        weight, given = self.parts(ids, size)
        assert torch.equal(sum(given), weight[ids]), "the ranks' parts add up to the rows of the whole embedding"
        owners = torch.stack([(part != 0).any(-1) for part in given])
        assert (owners.sum(0) == 1).all(), "one rank gives the row, the others zeros"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_no_step_waits_for_the_values(self, dtype: torch.dtype) -> None:
        """It is part of a captured step: tensors without values must do, and shapes must not depend on any."""
        layer = embedding(torch.empty(4, self.WIDTH, device="meta", dtype=dtype), 1, 3, lambda part: part)
        out = layer(torch.empty(7, dtype=torch.int64, device="meta"))
        assert out.shape == (7, self.WIDTH) and out.dtype == dtype, "a row for each id, in the weight's dtype"


class TestVocabParallelArgmax:
    def test_a_worked_case(self) -> None:
        scores = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 5.0], [0.0, 2.0, 5.0]])
        ids = torch.tensor([[30, 9, 1], [10, 8, 40], [20, 7, 50]], dtype=torch.int32)
        best, winners = best_of_ranks(scores, ids)
        says = "column by column the best of three ranks; of 30 and 10, of 9, 8 and 7, of 40 and 50 the lowest id"
        worked_case("m6.9", {"best": best, "ids": winners}, {"best": [1.0, 2.0, 5.0], "ids": [10, 7, 40]}, says)

    @given(data=st.data(), size=SIZES, rows=st.integers(1, 4))
    def test_is_that_of_the_whole_row(self, data: st.DataObject, size: int, rows: int) -> None:
        """Small whole numbers, so that ties are common: the lowest id wins, as in argmax."""
        values = st.lists(st.integers(-2, 2), min_size=8 * size, max_size=8 * size)
        logits = torch.tensor([data.draw(values) for _ in range(rows)]).float()
        shares = logits.view(rows, size, 8)
        ids = (shares.argmax(-1) + 8 * torch.arange(size)).T.int()
        best, winners = best_of_ranks(shares.amax(-1).T, ids)
        assert torch.equal(best, logits.amax(-1)), "the best score of all shares"
        assert torch.equal(winners.long(), logits.argmax(-1)), "its id; of equal scores the lowest"

    def test_almost_equal_is_not_equal(self) -> None:
        """Two neighbouring floats, and ids as large as they may be."""
        scores = torch.tensor([[1.0], [1.0 + 2**-23]])
        best, winners = best_of_ranks(scores, torch.tensor([[3], [2**31 - 2]], dtype=torch.int32))
        assert (best.item(), winners.item()) == (1.0 + 2**-23, 2**31 - 2), "the second score is larger, by one bit"

    def test_a_rank_without_tokens_never_wins(self) -> None:
        scores = torch.tensor([[-torch.inf, -3.0], [-50.0, -torch.inf]])
        found = best_of_ranks(scores, torch.tensor([[2, 2], [9, 9]], dtype=torch.int32))[1]
        assert found.tolist() == [9, 2], "a rank whose score is -inf has nothing to offer"

    def test_where_all_scores_are_minus_infinity(self) -> None:
        """They are equal scores like others."""
        best, winners = best_of_ranks(torch.full((3, 1), -torch.inf), torch.tensor([[7], [4], [6]], dtype=torch.int32))
        assert (best.item(), winners.item()) == (-torch.inf, 4), "-inf everywhere: equal scores, so the lowest id"

    def test_no_step_waits_for_the_values(self) -> None:
        """It is part of a captured step: tensors without values must do."""
        scores, ids = torch.empty(4, 7, device="meta"), torch.empty(4, 7, dtype=torch.int32, device="meta")
        best, winners = best_of_ranks(scores, ids)
        assert best.shape == winners.shape == (7,) and (best.dtype, winners.dtype) == (torch.float32, torch.int32), (
            "one score and one id a row, in the dtypes in which they came"
        )
