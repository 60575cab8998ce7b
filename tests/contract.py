"""What every attention backend over a paged cache must do, against float64.

`check(backend, case, ...)` builds a cache in which every slot that holds no token is NaN, lets the backend store the new
tokens and attend, and compares. A backend joins by being registered: see tests/m3/test_contract.py.
"""

from dataclasses import dataclass

import pytest
import torch

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.registry import BACKENDS, get_backend
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.kv_format import UNSCALED

PAGED = tuple(BACKENDS)  # they keep their K/V in blocks
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # inputs are standard normal
LARGEST_BLOCK = 256  # of a backend that does not take a case's blocks


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens cached before, new tokens), decodes first; Hq, Hkv, D, B."""

    name: str
    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None  # tokens that a token sees

    def __str__(self) -> str:
        return self.name


MIXED = ((7, 1), (40, 1), (0, 5), (19, 4))
CASES = (
    Case("one prompt", ((0, 9),)),
    Case("one token", ((0, 1),)),
    Case("ragged prompts", ((0, 1), (0, 33), (0, 2), (0, 17))),
    Case("decodes", ((1, 1), (15, 1), (16, 1), (30, 1), (31, 1), (32, 1))),
    Case("decodes and prompts", MIXED),
    Case("long context, few new tokens", ((200, 1), (190, 3), (77, 2))),
    Case("a block less one, exactly, and one more", ((0, 15), (0, 16), (0, 17), (16, 16), (15, 17))),
    Case("blocks of 1", MIXED, block_size=1),
    Case("blocks of 2", MIXED, block_size=2),
    Case("blocks of 256", MIXED, block_size=256),
    *(Case(f"{ratio} to 1, D {d}", MIXED, ratio * kv, kv, d) for ratio, kv, d in (
        (1, 2, 64), (2, 1, 128), (3, 2, 32), (4, 1, 64), (5, 1, 32), (6, 1, 32), (7, 1, 64), (8, 1, 128),
    )),
)  # fmt: skip


@dataclass
class Problem:
    """The tensors of a case: what the backend gets, and what it has to give."""

    batch: ForwardBatch
    kv_cache: torch.Tensor  # [2, N, B, Hkv, D], a view as the engine makes it; cached tokens written, the rest NaN
    query: torch.Tensor  # [T, Hq, D]
    key: torch.Tensor  # [T, Hkv, D]
    value: torch.Tensor
    cache_after: torch.Tensor  # the cache with the new tokens too
    expected: torch.Tensor  # [T, Hq, D] float64


def make_backend(name: str, case: Case, dtype: torch.dtype, device: str = DEVICE) -> AttentionBackend:
    """The backend, set up for a case; skips the test, with the backend's own words, where it cannot run."""
    try:
        kind = get_backend(name)
        block_size = case.block_size if kind.supports_block_size(case.block_size) else LARGEST_BLOCK
        heads = case.num_heads, case.num_kv_heads, case.head_dim
        config = AttentionConfig(*heads, dtype, torch.device(device), block_size, max_num_seqs=8)
        kind.check_available(config)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return kind(config)


def make_problem(config: AttentionConfig, case: Case, seed: int = 0) -> Problem:
    """Random K/V in scattered blocks. Table entries beyond a sequence name a block of NaN that nobody owns."""
    assert config.block_size is not None
    generator, b, dtype = torch.Generator().manual_seed(seed), config.block_size, config.dtype
    lens = [sum(pair) for pair in case.seqs]
    blocks = [-(-n // b) for n in lens]
    order = torch.randperm(sum(blocks) + 1, generator=generator)
    nobodys, owned = order[0], list(order[1:].split(blocks))
    tables = torch.stack([torch.cat((own, nobodys.repeat(max(blocks) + 1 - len(own)))) for own in owned])
    kv = [torch.randn(2, n, config.num_kv_heads, config.head_dim, generator=generator).to(dtype) for n in lens]
    new = [n for _, n in case.seqs]
    query = torch.randn(sum(new), config.num_heads, config.head_dim, generator=generator).to(dtype)

    slots = [table[torch.arange(n) // b] * b + torch.arange(n) % b for table, n in zip(tables, lens, strict=True)]
    cache = torch.full((2, len(order), config.num_kv_heads, b, config.head_dim), torch.nan, dtype=dtype).transpose(2, 3)
    after = cache.clone()
    for (cached, _), own, slot in zip(case.seqs, kv, slots, strict=True):
        cache[:, slot[:cached] // b, slot[:cached] % b] = own[:, :cached]
        after[:, slot // b, slot % b] = own
    key, value = torch.cat([own[:, n - k :] for own, n, k in zip(kv, lens, new, strict=True)], dim=1)
    expected = [attention_float64(q, *own, case.window) for q, own in zip(query.split(new), kv, strict=True)]
    for own, n, k in zip(owned, lens, new, strict=True):  # blocks that no new token sees may be others' by now
        behind = 0 if case.window is None else max(0, n - k + 1 - case.window) // b
        cache[:, own[:behind]] = after[:, own[:behind]] = torch.nan
    on = config.device
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(new), dtype=torch.int64, device=on),
        positions=torch.cat([torch.arange(cached, n) for (cached, _), n in zip(case.seqs, lens, strict=True)]).to(on),
        slot_mapping=torch.cat([slot[n - k :] for slot, n, k in zip(slots, lens, new, strict=True)]).to(on),
        query_start_loc=torch.tensor([0, *new]).cumsum(0).int().to(on),
        seq_lens=torch.tensor(lens).int().to(on),
        block_tables=tables.int().to(on),
        logits_indices=(torch.tensor(new).cumsum(0) - 1).to(on),
        num_seqs=len(new), num_decodes=next((i for i, n in enumerate(new) if n > 1), len(new)),
        max_query_len=max(new), max_seq_len=max(lens), query_lens_host=new, seq_lens_host=lens,
    )  # fmt: skip
    tensors = (cache, query, key, value, after)
    cache, query, key, value, after = (as_allocated(t.to(on)) if t.dim() == 5 else t.to(on) for t in tensors)
    return Problem(batch, cache, query, key, value, after, torch.cat(expected).to(on))


def as_allocated(cache: torch.Tensor) -> torch.Tensor:
    """The strides that the engine's allocation has: K/V of one block and head contiguous, whatever a copy made of it."""
    return cache.transpose(2, 3).contiguous().transpose(2, 3)


def attention_float64(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence, [n, Hq, D] over [m, Hkv, D], token by token and head by head."""
    q, k, v = query.double(), key.double(), value.double()
    group, first = q.shape[1] // k.shape[1], len(k) - len(q)
    out = torch.empty_like(q)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            seen = slice(0 if window is None else max(0, first + i + 1 - window), first + i + 1)
            weights = (k[seen, head // group] @ q[i, head] / q.shape[2] ** 0.5).softmax(0)
            out[i, head] = weights @ v[seen, head // group]
    return out


def check(name: str, case: Case, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> None:
    """Store, then attend: new tokens land in their slots and nowhere else, and the result is float64's up to rounding."""
    whole = make_backend(name, case, dtype, device)
    p, backend = make_problem(whole.config, case), whole.of_layer(UNSCALED, case.window)
    whole.plan(p.batch)
    backend.store(p.key, p.value, p.kv_cache, p.batch.slot_mapping)
    assert_same_cache(p.kv_cache, p.cache_after)
    out = backend.forward(p.query, p.kv_cache, p.batch)
    assert out.shape == p.query.shape and out.dtype == dtype
    assert not out.isnan().any(), "a slot that holds no token of the sequence was read"
    error = float((out.double() - p.expected).abs().max())
    assert error <= TOLERANCE[dtype], f"off by {error:.3g}"
    assert_same_cache(p.kv_cache, p.cache_after)  # attending does not write


def check_skips_slot_minus_one(name: str, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> None:
    """A token of slot -1 is stored nowhere, least of all in the last slot."""
    case = Case("three prompts", ((0, 3), (0, 18), (0, 2)))
    backend = make_backend(name, case, dtype, device)
    p = make_problem(backend.config, case)
    slots, b = p.batch.slot_mapping.clone(), p.kv_cache.shape[2]
    for skipped in (0, 7, 22):
        p.cache_after[:, slots[skipped] // b, slots[skipped] % b] = torch.nan
        slots[skipped] = -1
    backend.store(p.key, p.value, p.kv_cache, slots)
    assert_same_cache(p.kv_cache, p.cache_after)


def assert_same_cache(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaN where NaN was."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
