"""Kernels whose result for a token has the same bits in any batch: interpreted here, compiled on a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm import LLM
from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.electives.rollouts.kernel_layers import InvariantTritonBackend
from folovllm.electives.rollouts.kernels.linear import invariant_linear
from folovllm.electives.rollouts.trainer import Policy
from folovllm.kernels.activation import silu_and_mul
from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
from folovllm.kernels.rms_norm import add_rms_norm
from tests.helpers import tiny_checkpoint
from tests.m4.cases import DEVICE, Paged, assert_close, starts
from tests.x6.test_batch_invariance import Answer, answers, check_gradients, prompt
from tools.bench_attention import make_batch

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TINY = {"num_hidden_layers": 1}
EXAMPLES = 30 if DEVICE.type == "cuda" else 3
WEIGHTS = [(7, 20), (48, 130), (70, 64)]  # [N, K]: inside a tile, at its end and behind it
if DEVICE.type == "cuda":
    WEIGHTS += [(1024, 3072), (4096, 1024), (6144, 1024), (151_936, 1024)]
HEADS = [(4, 2, 16), (3, 1, 32), (5, 5, 16), (12, 4, 64)]  # Hq, Hkv, D
if DEVICE.type == "cuda":
    HEADS += [(16, 8, 128), (32, 8, 128), (16, 1, 256)]


@pytest.fixture(scope="module", autouse=True)
def products_by_rows() -> Iterator[None]:
    """Let the interpreter multiply as a GPU does, each row by itself. numpy's library computes rows at the end of a matrix otherwise."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        total = d.data.copy()
        for column, row in zip(a.data.T.astype(total.dtype), b.data.astype(total.dtype), strict=True):
            total += np.outer(column, row)
        return TensorHandle(total, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


@pytest.mark.parametrize("size", WEIGHTS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product(size: tuple[int, int], bias: bool) -> None:
    """Rows of a wider tensor, in more than one tile."""
    x, weight = random(70, size[1] + 3)[:, : size[1]], random(*size)
    added = random(size[0]) if bias else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert_close(invariant_linear(x, weight, added), expected)


@pytest.mark.parametrize("size", WEIGHTS, ids=str)
@settings(max_examples=EXAMPLES)
@given(cuts=st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_a_row_of_a_product_is_the_same_alone_and_anywhere(size: tuple[int, int], cuts: list[int]) -> None:
    """Batches of other sizes, in which the row stands elsewhere."""
    x, weight = random(sum(cuts), size[1]), random(*size)
    whole = invariant_linear(x, weight)
    assert torch.equal(torch.cat([invariant_linear(part, weight) for part in x.split(cuts)]), whole)
    assert torch.equal(invariant_linear(x.flip(0), weight).flip(0), whole)
    assert torch.equal(invariant_linear(x[-1:], weight), whole[-1:])


@pytest.mark.parametrize("tokens", [8, 9, 70])
def test_the_fused_kernels_compute_each_row_alone(tokens: int) -> None:
    """The engine's own, for few tokens and for many: norm and sum, activation, and QK-norm with rotation."""
    width, dim = (1024, 128) if DEVICE.type == "cuda" else (64, 16)
    x, residual, weight, heads = random(tokens, width), random(tokens, width), random(width), random(tokens, 5, dim)
    preparation = Preparation(torch.rand(tokens, dim, device=DEVICE), random(dim), random(dim), 1e-6)

    def computed(rows: slice) -> list[torch.Tensor]:
        slots = torch.arange(tokens, device=DEVICE)[rows]
        cache = torch.zeros(2, tokens, 1, 1, dim, device=DEVICE, dtype=DTYPE)
        query, key, value = heads[rows].split([3, 1, 1], dim=1)
        query = qk_norm_rope_store(query, key, value, slots, cache, slots, preparation)
        return [*add_rms_norm(x[rows], residual[rows], weight, 1e-6), silu_and_mul(x[rows]), query, *cache[:, rows]]

    whole = computed(slice(None))
    for i in (0, tokens // 2, tokens - 1):
        for one, every in zip(computed(slice(i, i + 1)), whole, strict=True):
            assert torch.equal(one, every[i : i + 1])


def attended(paged: Paged, query: torch.Tensor, new: list[int], heads: tuple[int, int, int]) -> torch.Tensor:
    """By the backend, in a step with so many `new` tokens of each sequence."""
    config = AttentionConfig(*heads, query.dtype, DEVICE, paged.kv_cache.shape[2], 8)
    backend, batch = InvariantTritonBackend(config), make_batch(paged.seq_lens.tolist(), 16, False, DEVICE)
    batch.query_start_loc, batch.block_tables, batch.seq_lens = starts(new), paged.block_tables, paged.seq_lens
    batch.input_ids = torch.zeros(len(query), device=DEVICE, dtype=torch.int64)
    backend.plan(batch)
    return backend.forward(query, paged.kv_cache, batch)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_attention(heads: tuple[int, int, int], block_size: int) -> None:
    """Decodes, whole prompts, chunks and an empty row in one step; what no sequence owns is NaN."""
    lens, new = [1, 65, 40, 0, 130, 33], [1, 1, 40, 0, 70, 2]
    paged = Paged.make(lens, block_size, heads[1], heads[2], DTYPE)
    query = random(sum(new), heads[0], heads[2])
    assert_close(attended(paged, query, new, heads), paged.attention(query, new))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), block_size=st.sampled_from([1, 16, 48]))
def test_a_token_attends_the_same_in_any_step(heads: tuple[int, int, int], data: Any, block_size: int) -> None:
    """A prompt at once, in chunks, and decoded, alone and beside others: all its tokens have the same bits."""
    length, others = data.draw(st.integers(1, 150)), data.draw(st.lists(st.integers(1, 150), max_size=3))
    paged = Paged.make([length, *others], block_size, heads[1], heads[2], DTYPE)
    query, more = random(length, heads[0], heads[2]), random(len(others), heads[0], heads[2])

    def chunk(start: int, end: int, beside: bool) -> torch.Tensor:
        """The prompt's tokens `start` to `end`; beside it the others decode."""
        count = len(others) if beside else 0
        seen = Paged(paged.kv_cache, paged.block_tables[: 1 + count], paged.seq_lens[: 1 + count].clone())
        seen.seq_lens[0] = end
        rows = torch.cat([query[start:end], more[:count]])
        return attended(seen, rows, [end - start, *[1] * count], heads)[: end - start]

    whole = chunk(0, length, beside=False)
    assert torch.equal(chunk(0, length, beside=True), whole)
    middle = data.draw(st.integers(0, length - 1))
    assert torch.equal(torch.cat([chunk(0, middle, True), chunk(middle, length, True)]), whole)
    assert torch.equal(chunk(middle, middle + 1, beside=False), whole[middle : middle + 1]), "prefill is not decode"


def engine(model: dict[str, Any] = TINY, **overrides: Any) -> LLM:
    fields = {"milestone": "m6", "max_model_len": 96, "num_kv_blocks": 60, "attention_backend": "triton", **overrides}
    return LLM(str(tiny_checkpoint(**model)), batch_invariant=True, device=DEVICE.type, use_tqdm=False, **fields)


def trainers(llm: LLM, prompts: list[list[int]], found: list[Answer]) -> list[list[float]]:
    sequences = [p + tokens for p, (tokens, _) in zip(prompts, found, strict=True)]
    return [row.tolist() for row in Policy(llm).logprobs(sequences, [len(p) for p in prompts])]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of padding, which nobody reads
def test_the_engine_and_the_trainer() -> None:
    """Alone and beside others, in chunks, found again in the cache, and in the trainer: the same bits."""
    prompts = [prompt(0, 3), prompt(1, 17), prompt(1, 17) + prompt(2, 4)]
    with engine() as llm:
        expected = [answers(llm, [one], 2)[0] for one in prompts]
        assert trainers(llm, prompts, expected) == [logprobs for _, logprobs in expected]
    with engine(max_num_batched_tokens=8) as llm:
        assert answers(llm, prompts, 2) == expected, "a chunk, a cached prefix or the batch shows"


def test_gradients_of_kernels_are_those_of_plain_layers() -> None:
    with engine(dtype="float32") as llm:
        check_gradients(llm, 9, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_request_alone_and_among_64(dtype: str, family: str) -> None:
    """Captured steps of all widths, prompts of all lengths, in chunks; and the trainer."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3}
    model = {"family": family, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64, **sizes}
    prompts = [prompt(i, 1 + 11 * i % 400) for i in range(64)]
    config = {"dtype": dtype, "max_model_len": 512, "num_kv_blocks": None, "max_num_seqs": 64}
    with engine(model, **config, max_num_batched_tokens=300) as llm:
        found = answers(llm, prompts, 40)
        assert answers(llm, prompts[::-1], 40) == found[::-1], "the batch's order or the prefix cache shows"
        assert [answers(llm, [one], 40)[0] for one in prompts[::9]] == found[::9], "a request is not the same alone"
        few = slice(None, None, 5)
        assert trainers(llm, prompts[few], found[few]) == [logprobs for _, logprobs in found[few]]
    with engine(model, **config, enforce_eager=True) as llm:
        assert answers(llm, prompts[:9], 40) == found[:9], "a captured step shows"


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [259, 32_000, 151_936])
def test_log_softmax_of_a_row_is_the_same_alone(vocab_size: int) -> None:
    """It is torch's."""
    logits = random(70, vocab_size).float()
    whole = logits.log_softmax(-1)
    for rows in (slice(1), slice(33, 34), slice(5, 69)):
        assert torch.equal(logits[rows].clone().log_softmax(-1), whole[rows])
