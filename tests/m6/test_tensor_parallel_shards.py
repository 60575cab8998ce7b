"""Which rank holds which part of a model, and that the parts compute what the whole does.

The functions that cut a weight are the exercises of `test_shards.py`.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.config import EngineConfig
from folovllm.distributed.sharding import local_config, shard_vocab, vocab_shard_size
from folovllm.engine.build_packed import make_packed_worker
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.sharded import sharded
from folovllm.models.loader import load_native_model
from folovllm.models.sharded_loader import load_sharded_model
from folovllm.step.packed import Field
from folovllm.worker.step_sampler import TensorParallelSampler
from folovllm.worker.warm_up import dummy_seqs
from tests.helpers import assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.m1.test_loader import altered
from tests.m6.ranks import ThreadGroup, on_ranks


def numbered(*shape: int) -> torch.Tensor:
    """A tensor in which no two numbers are the same."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(count).float().view(*shape)


@settings(max_examples=50)
@given(vocab_size=st.integers(1, 40), size=st.integers(1, 6))
def test_shards_of_a_vocabulary_are_the_whole_and_zeros(vocab_size: int, size: int) -> None:
    weight, rows = 1 + numbered(vocab_size, 2), vocab_shard_size(vocab_size, size)
    assert rows % 4 == 0 and rows * size >= vocab_size and (rows - 4) * size < vocab_size
    parts = torch.cat([shard_vocab(weight, rank, size) for rank in range(size)])
    assert parts.shape == (rows * size, 2)
    assert torch.equal(parts[:vocab_size], weight) and not parts[vocab_size:].any()


def test_padding_cannot_be_drawn() -> None:
    def work(group: ThreadGroup) -> torch.Tensor:
        head = sharded(LayerSet(), group, 5).make(ParallelLMHead, vocab_shard_size(5, 3), 2).requires_grad_(False)
        head.weight.zero_()
        return head(torch.ones(1, 2))

    logits = torch.cat(on_ranks(3, work), dim=1)
    assert logits[:, :5].eq(0).all() and logits[:, 5:].eq(-torch.inf).all() and logits.shape == (1, 12)


class TestSizes:
    def config(self, heads: int, kv_heads: int, inner: int = 48) -> Any:
        return SimpleNamespace(
            num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner, hidden_size=96, vocab_size=259
        )  # fmt: skip

    @pytest.mark.parametrize(("heads", "kv_heads", "inner", "size", "works"), [
        (8, 2, 48, 3, "1, 2, 4, 8"), (6, 2, 48, 3, "1, 2, 6"), (8, 8, 48, 16, "1, 2, 4, 8"), (8, 4, 6, 4, "1, 2"),
    ])  # fmt: skip
    def test_sizes_that_do_not_work(self, heads: int, kv_heads: int, inner: int, size: int, works: str) -> None:
        with pytest.raises(ValueError, match=f"sizes that work are {works}$"):
            local_config(self.config(heads, kv_heads, inner), size)

    def test_before_any_work(self) -> None:
        with pytest.raises(ValueError, match="sizes that work are 1, 2, 4"):
            set_up(EngineConfig(model=str(tiny_checkpoint()), device="cpu", tensor_parallel_size=3))
        with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1"):
            EngineConfig(tensor_parallel_size=0)
        with pytest.raises(ValueError, match="tensor_parallel_size"):
            EngineConfig(milestone="m2", tensor_parallel_size=2)


@pytest.mark.parametrize(("family", "fields", "size"), [
    ("qwen3", {}, 2),
    ("qwen3", {}, 4),  # tied; its 2 KV heads are copied
    ("llama", {"tied": False, "attention_bias": True, "mlp_bias": True}, 2),
    ("qwen2", {"num_kv_heads": 4}, 4),
    ("mistral", {"tied": False, "num_kv_heads": 1}, 2),
    ("phi3", {}, 4),  # its checkpoints hold merged layers: each of their parts is cut
])  # fmt: skip
def test_the_whole_model(family: str, fields: dict[str, Any], size: int) -> None:
    """Ranks that read their parts from the file compute the logits that transformers' model does."""
    path, tokens = tiny_checkpoint(family, **fields), prompts([23])[0]
    fields = {"device": "cpu", "tensor_parallel_size": size, "use_tqdm": False, "max_num_seqs": 4, "max_model_len": 24}
    setup = set_up(EngineConfig(model=str(path), **fields))

    @torch.inference_mode()
    def work(group: ThreadGroup) -> torch.Tensor:
        _, graphs = make_packed_worker(setup, group)
        runner = graphs.inner
        runner.load_model()
        angles = runner.model.model.layers[0].self_attn.rope.cos_sin_cache
        assert len(angles) == setup.max_model_len, "positions that no request has"
        runner.allocate_kv_cache(2)
        (share,) = dummy_seqs([len(tokens)], setup.block_size)
        batch = runner._input_batch.build([share._replace(token_ids=np.array(tokens, np.int32))])
        runner.backend.plan(batch)
        hidden = runner.model(batch)
        batch.logits_indices = torch.arange(len(tokens))
        return TensorParallelSampler(setup.vocab_size, group).full_logits(runner.model.compute_logits(hidden, batch))

    for logits in on_ranks(size, work):
        assert_logits_equal(logits, hf_logits(path, tokens))


def test_random_weights_are_those_of_one_rank() -> None:
    config = EngineConfig(model=str(tiny_checkpoint()), device="cpu", random_weights=True, use_tqdm=False)
    setup = set_up(replace(config, tensor_parallel_size=2))
    whole = load_native_model(set_up(config)).state_dict()
    parts = on_ranks(2, lambda group: load_sharded_model(setup, group).state_dict())
    down, embedding, norm = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"
    assert torch.equal(torch.cat([part[down] for part in parts], dim=1), whole[down])
    assert torch.equal(torch.cat([part[embedding] for part in parts])[:259], whole[embedding])
    assert all(torch.equal(part[norm], whole[norm]) for part in parts)


K, DOWN = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(("change", "says"), [
    (lambda tensors: tensors.pop(K), rf"lacks {K}"),
    (lambda tensors: tensors.update({"model.extra.weight": torch.ones(4)}), r"hold 'model\.extra\.weight'"),
    (lambda tensors: tensors.update({DOWN: tensors[DOWN][:-2].clone()}), rf"{DOWN}' has shape"),
])  # fmt: skip
def test_a_rank_checks_the_weights_as_one_device_does(change: Any, says: str, tmp_path: Path) -> None:
    setup = two_ranks(altered(tmp_path, change))
    with pytest.raises(ValueError, match=says):
        on_ranks(2, lambda group: load_sharded_model(setup, group))


def test_a_rank_checks_its_own_part_for_nan(tmp_path: Path) -> None:
    """The number is in the last columns, which the second of two ranks reads."""
    setup = two_ranks(altered(tmp_path, lambda tensors: tensors[DOWN][0, -1:].fill_(torch.nan)))
    failed = []

    def work(group: ThreadGroup) -> None:
        try:
            load_sharded_model(setup, group)
        except ValueError as error:
            failed.append((group.rank, str(error)))

    on_ranks(2, work)
    assert [rank for rank, _ in failed] == [1] and f"'{DOWN}' holds NaN" in failed[0][1]


def two_ranks(path: Path) -> EngineSetup:
    return set_up(EngineConfig(model=str(path), device="cpu", tensor_parallel_size=2, use_tqdm=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_still_give_a_token(temperature: float) -> None:
    fields = torch.zeros(len(Field), 2, dtype=torch.int32)
    fields[Field.TEMPERATURE] = torch.full((2,), temperature).view(torch.int32)

    def work(group: ThreadGroup) -> list[int]:
        logits = torch.full((2, vocab_shard_size(259, 2)), torch.nan)
        if group.rank == 1:
            logits[1, 3] = 0.0
        tokens, last = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        TensorParallelSampler(259, group).one_pass(logits, fields, tokens, last)
        return tokens.tolist()

    for tokens in on_ranks(2, work):
        assert tokens == [0, vocab_shard_size(259, 2) + 3]
