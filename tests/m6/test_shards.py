"""What a rank holds, a function at a time: no process is started here, the ranks are computed one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from folovllm.distributed.sharding import shard_column, shard_qkv, shard_row, shard_vocab
from folovllm.layers.sharded import ShardedEmbedding
from folovllm.worker.step_sampler import best_of_ranks
from tests.tiny import worked_case

SIZES = [1, 2, 3, 4]


def numbered(rows: int, columns: int) -> torch.Tensor:
    """A matrix in which every number says where it is."""
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


class InItsFile:
    """A weight that was not read yet: it has a shape, and slices can be had, nothing else. Counts the numbers that were read."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.shape, self.num_read = whole, whole.shape, 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert all(isinstance(each, slice) for each in (index if isinstance(index, tuple) else (index,))), (
            f"a file gives slices alone, and was asked for {index}"
        )
        part = self.whole[index]
        self.num_read += part.numel()
        return part


class TestColumnAndRow:
    def test_a_worked_case_of_column(self) -> None:
        weight = InItsFile(numbered(4, 2))
        got = {"part": shard_column(weight, 1, 2), "numbers read": weight.num_read}  # type: ignore[arg-type]
        says = "rank 1 of 2 holds the last two of the rows [0, 1], [2, 3], [4, 5], [6, 7], and reads no others"
        worked_case("m6.6 column", got, {"part": [[4.0, 5.0], [6.0, 7.0]], "numbers read": 4}, says)

    def test_a_worked_case_of_row(self) -> None:
        weight = InItsFile(numbered(2, 4))
        got = {"part": shard_row(weight, 1, 2), "numbers read": weight.num_read}  # type: ignore[arg-type]
        says = "rank 1 of 2 holds the last two columns of the rows [0, 1, 2, 3] and [4, 5, 6, 7], and reads no others"
        worked_case("m6.6 row", got, {"part": [[2.0, 3.0], [6.0, 7.0]], "numbers read": 4}, says)

    @pytest.mark.parametrize("size", SIZES)
    def test_the_ranks_together_are_the_whole(self, size: int) -> None:
        weight, bias = numbered(24, 12), torch.arange(24.0)
        assert torch.equal(torch.cat([shard_column(weight, r, size) for r in range(size)]), weight), (
            "the ranks' rows, in the order of the ranks, are the whole"
        )
        assert torch.equal(torch.cat([shard_column(bias, r, size) for r in range(size)]), bias), (
            "a bias is cut as its rows are"
        )
        assert torch.equal(torch.cat([shard_row(weight, r, size) for r in range(size)], 1), weight), (
            "the ranks' columns, in the order of the ranks, are the whole"
        )

    def test_shapes(self) -> None:
        weight = numbered(24, 12)
        assert shard_column(weight, 1, 2).shape == (12, 12) and shard_row(weight, 1, 2).shape == (24, 6), (
            "column cuts the rows of the weight, which are outputs, row its columns, which are inputs"
        )

    @pytest.mark.parametrize("shard", [shard_column, shard_row], ids=["column", "row"])
    def test_of_a_weight_in_its_file_only_the_part_is_read(self, shard: Any) -> None:
        weight = InItsFile(numbered(24, 12))
        assert shard(weight, 1, 4).numel() == 72, "rank 1 of 4 holds a quarter"
        assert weight.num_read == 72, f"{weight.num_read} numbers were read for a part of 72"

    @pytest.mark.parametrize("size", SIZES)
    def test_an_mlp_by_hand(self, size: int) -> None:
        """A column cut, then a row cut: each rank alone up to one sum."""
        generator = torch.Generator().manual_seed(size)
        gate, up, down, x = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((24, 8), (24, 8), (8, 24), (5, 8))
        )
        total = torch.zeros(5, 8, dtype=torch.float64)
        for rank in range(size):
            own_gate, own_up = shard_column(gate, rank, size), shard_column(up, rank, size)
            total += (F.silu(x @ own_gate.T) * (x @ own_up.T)) @ shard_row(down, rank, size).T
        torch.testing.assert_close(total, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


class TestQkv:
    DIM = 4

    def test_a_worked_case(self) -> None:
        """Heads of two rows, each row named 10 * head + row."""
        four, two = torch.tensor([0, 1, 10, 11, 20, 21, 30, 31]), torch.tensor([0, 1, 10, 11])
        got = {
            "four heads on two ranks": [shard_qkv(four, 2, rank, 2) for rank in range(2)],
            "two heads on four ranks": [shard_qkv(two, 2, rank, 4) for rank in range(4)],
        }
        answers = [[[0, 1, 10, 11], [20, 21, 30, 31]], [[0, 1], [0, 1], [10, 11], [10, 11]]]
        says = "two whole heads each; where ranks are more than heads, neighbouring ranks share one"
        worked_case("m6.7", got, dict(zip(got, answers, strict=True)), says)

    def heads(self, count: int, rank: int, size: int) -> list[int]:
        """Which of `count` heads the rank gets; each must come whole."""
        weight = torch.arange(float(count)).repeat_interleave(self.DIM)[:, None].expand(-1, 3)
        part = shard_qkv(weight, self.DIM, rank, size)
        assert part.shape[1] == 3, "heads are rows: the columns stay"
        return part.view(-1, self.DIM, 3)[:, 0, 0].tolist()

    @pytest.mark.parametrize(("heads", "size"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3)])
    def test_an_equal_share_of_the_heads(self, heads: int, size: int) -> None:
        shares = [self.heads(heads, rank, size) for rank in range(size)]
        assert {len(share) for share in shares} == {heads // size}, "each rank has as many heads as the others"
        assert [head for share in shares for head in share] == list(range(heads)), "the heads in the order of the ranks"

    @pytest.mark.parametrize(
        ("heads", "size", "owners"), [(1, 2, [0, 0]), (2, 4, [0, 0, 1, 1]), (2, 8, [0] * 4 + [1] * 4)]
    )
    def test_fewer_kv_heads_than_ranks_live_on_several(self, heads: int, size: int, owners: list[int]) -> None:
        assert [self.heads(heads, rank, size) for rank in range(size)] == [[owner] for owner in owners], (
            "neighbouring ranks share a head, and each has one"
        )

    @pytest.mark.parametrize(("hq", "hkv", "size"), [(8, 4, 2), (8, 2, 2), (8, 2, 4), (8, 2, 8), (6, 3, 3)])
    def test_query_heads_find_their_kv_head_on_their_own_rank(self, hq: int, hkv: int, size: int) -> None:
        for rank in range(size):
            queries, kv = self.heads(hq, rank, size), self.heads(hkv, rank, size)
            group = len(queries) // len(kv)
            for i, query in enumerate(queries):
                assert kv[i // group] == query // (hq // hkv), "a query head's KV head is on another rank"

    @pytest.mark.parametrize(("heads", "size", "numbers"), [(4, 2, 24), (2, 4, 12)])
    def test_of_a_weight_in_its_file_only_the_heads_are_read(self, heads: int, size: int, numbers: int) -> None:
        weight = InItsFile(numbered(heads * self.DIM, 3))
        assert shard_qkv(weight, self.DIM, 1, size).numel() == weight.num_read == numbers, (
            "only the rank's own heads are read"
        )

    def test_a_bias(self) -> None:
        assert shard_qkv(torch.arange(16.0), 4, 1, 2).tolist() == list(range(8, 16)), (
            "the second half of a bias belongs to rank 1"
        )


class TestVocabParallelEmbedding:
    VOCAB, WIDTH = 10, 3

    def test_a_worked_case(self) -> None:
        """Rows 10, 20, 30, 40 on two ranks, two each; all four ids are looked up. The sum is played by adding 100."""
        got: dict[str, Any] = {}
        for rank, rows in enumerate(([[10.0], [20.0]], [[30.0], [40.0]])):
            layer, given = ShardedEmbedding.__new__(ShardedEmbedding), []
            torch.nn.Module.__init__(layer)
            layer.weight = torch.nn.Parameter(torch.tensor(rows, dtype=torch.bfloat16), requires_grad=False)

            def all_reduce(part: torch.Tensor, given: list[torch.Tensor] = given) -> torch.Tensor:
                given.append(part)
                return part + 100

            layer.group = SimpleNamespace(rank=rank, size=2, all_reduce=all_reduce)  # type: ignore[assignment]
            try:
                out = layer(torch.arange(4))
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
            layer = ShardedEmbedding.__new__(ShardedEmbedding)
            torch.nn.Module.__init__(layer)
            layer.weight = torch.nn.Parameter(shard_vocab(weight, rank, size), requires_grad=False)

            def all_reduce(part: torch.Tensor) -> torch.Tensor:
                given.append(part.clone())
                return 100 + part

            layer.group = SimpleNamespace(rank=rank, size=size, all_reduce=all_reduce)  # type: ignore[assignment]
            out = layer(ids)
            assert torch.equal(out, 100 + given[-1]), "what all_reduce returns is the result"
        assert len(given) == size, "each rank is to call all_reduce once"
        return weight, given

    @pytest.mark.parametrize("size", SIZES)
    def test_the_parts_add_up(self, size: int) -> None:
        ids = torch.tensor([0, 9, 3, 4, 7, 8, 5, 4])
        weight, given = self.parts(ids, size)
        assert torch.equal(sum(given), weight[ids]), "the ranks' parts add up to the rows of the whole embedding"  # type: ignore[arg-type]

    def test_one_rank_has_it_and_the_others_give_zeros(self) -> None:
        _, given = self.parts(torch.arange(self.VOCAB), 3)  # 4 rows each, two of them padding
        owners = torch.stack([(part != 0).any(-1) for part in given])
        assert owners.int().argmax(0).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2], (
            "each id's row comes from the rank that holds it"
        )
        assert (owners.sum(0) == 1).all(), "one rank gives the row, the others zeros"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_no_step_waits_for_the_values(self, dtype: torch.dtype) -> None:
        """It is part of a captured step: tensors without values must do, and shapes must not depend on any."""
        layer = ShardedEmbedding.__new__(ShardedEmbedding)
        torch.nn.Module.__init__(layer)
        layer.weight = torch.nn.Parameter(torch.empty(4, self.WIDTH, device="meta", dtype=dtype), requires_grad=False)
        layer.group = SimpleNamespace(rank=1, size=3, all_reduce=lambda part: part)  # type: ignore[assignment]
        out = layer(torch.empty(7, dtype=torch.int64, device="meta"))
        assert out.shape == (7, self.WIDTH) and out.dtype == dtype, "a row for each id, in the weight's dtype"


class TestVocabParallelArgmax:
    def test_a_worked_case(self) -> None:
        scores = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 5.0], [0.0, 2.0, 5.0]])
        ids = torch.tensor([[30, 9, 1], [10, 8, 40], [20, 7, 50]], dtype=torch.int32)
        best, winners = best_of_ranks(scores, ids)
        says = "column by column the best of three ranks; of 30 and 10, of 9, 8 and 7, of 40 and 50 the lowest id"
        worked_case("m6.9", {"best": best, "ids": winners}, {"best": [1.0, 2.0, 5.0], "ids": [10, 7, 40]}, says)

    def test_is_that_of_the_whole_row(self) -> None:
        logits = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
        shares = logits.chunk(4, 1)
        scores = torch.stack([share.amax(-1) for share in shares])
        ids = torch.stack([8 * rank + share.argmax(-1) for rank, share in enumerate(shares)]).int()
        best, winners = best_of_ranks(scores, ids)
        assert torch.equal(best, logits.amax(-1)) and torch.equal(winners.long(), logits.argmax(-1)), (
            "the best of all shares, and its id"
        )

    def test_of_equals_the_lowest_id_in_whatever_order_they_come(self) -> None:
        scores = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 5.0], [0.0, 2.0, 5.0]])
        ids = torch.tensor([[30, 9, 1], [10, 8, 40], [20, 7, 50]], dtype=torch.int32)
        best, winners = best_of_ranks(scores, ids)
        assert best.tolist() == [1.0, 2.0, 5.0] and winners.tolist() == [10, 7, 40], (
            "of equal scores the lowest id, whichever rank it is on"
        )

    def test_almost_equal_is_not_equal(self) -> None:
        """Two neighbouring floats, and ids as large as they may be."""
        scores = torch.tensor([[1.0], [1.0 + 2**-23]])
        best, winners = best_of_ranks(scores, torch.tensor([[3], [2**31 - 2]], dtype=torch.int32))
        assert (best.item(), winners.item()) == (1.0 + 2**-23, 2**31 - 2), "the second score is larger, by one bit"

    def test_a_rank_without_tokens_never_wins(self) -> None:
        scores = torch.tensor([[-torch.inf, -3.0], [-50.0, -torch.inf]])
        assert best_of_ranks(scores, torch.tensor([[2, 2], [9, 9]], dtype=torch.int32))[1].tolist() == [9, 2], (
            "a rank whose score is -inf has nothing to offer"
        )

    def test_no_step_waits_for_the_values(self) -> None:
        """It is part of a captured step: tensors without values must do."""
        scores, ids = torch.empty(4, 7, device="meta"), torch.empty(4, 7, dtype=torch.int32, device="meta")
        best, winners = best_of_ranks(scores, ids)
        assert best.shape == winners.shape == (7,) and (best.dtype, winners.dtype) == (torch.float32, torch.int32), (
            "one score and one id a row, in the dtypes in which they came"
        )
