# %% [markdown]
# # M4: attention kernels
#
# M3 copies all blocks of all running sequences together, in every layer of every step, before it attends. Here attention walks the blocks
# itself, a tile at a time, and keeps three running numbers per query. That needs code of our own on the GPU: Triton. Without a GPU
# the same code runs in Triton's interpreter, slowly and exactly. This notebook interprets everywhere, for it looks into the kernels; Triton
# itself exists on Linux only.
#
# The [chapter](../docs/4_kernels.md) explains at leisure. Here you predict, count, and break things.

# %%
from milestones.notebooks import running

running("m4")

# %%
import inspect
import json
import os
import sys
import time
import warnings
from types import SimpleNamespace
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
import folovllm.kernels  # where there is no Triton, numpy stands in for it

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import numpy as np
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from folovllm import LLM, SamplingParams
from folovllm.attention.backends import triton as triton_backend
from folovllm.attention.backends.abstract import AttentionConfig, BackendUnavailable
from folovllm.attention.backends.flash_attn import FlashAttentionBackend
from folovllm.attention.backends.registry import BACKENDS, get_backend
from folovllm.attention.backends.torch_paged import TorchPagedBackend, attend, gather_blocks
from folovllm.apps.bench.roofline import measure_rates
from folovllm.step.forward_batch import ForwardBatch
from folovllm.kernels import decode, online_softmax, prefill, rms_norm, store
from folovllm.kernels.online_softmax import LOG2_E
from milestones.pictures import DARK
from milestones.running_example import engine_for, example, play

MODEL, CPU = "stories-5m", torch.device("cpu")  # the model comes with the package
HQ, HKV, D, B = 4, 2, 64, 16  # its heads; tokens a block

torch.set_num_threads(1)  # so that two runs of this notebook can be compared
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
PALETTE = plt.get_cmap("tab20")


def load(backend="auto", **options):
    options = {"max_model_len": 512, "kv_cache_memory": 1 << 24, "device": "cpu", "use_tqdm": False} | options
    return LLM(MODEL, milestone="m4", attention_backend=backend, **options)


def make_batch(lens, decode):
    """A step over sequences of these lengths in shuffled blocks: one new token each, or all of them new."""
    blocks, new = [-(-n // B) for n in lens], [1] * len(lens) if decode else lens
    parts = torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)
    nothing = torch.empty(0, dtype=torch.int64)  # what attention does not read
    return ForwardBatch(
        input_ids=nothing, positions=nothing, slot_mapping=nothing, logits_indices=nothing,
        query_start_loc=torch.tensor([0, *new]).cumsum(0).to(torch.int32), seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True),
        num_seqs=len(lens), num_decodes=len(lens) if decode else 0, max_query_len=max(new), max_seq_len=max(lens),
        query_lens_host=new, seq_lens_host=lens,
    )


def paged(lens, decode=True, seed=0):
    """Random K/V of sequences in shuffled blocks, NaN where no token is; (query [T, Hq, D], cache, batch)."""
    torch.manual_seed(seed)
    batch = make_batch(lens, decode)
    blocks = sum(-(-n // B) for n in lens)
    kv_cache = torch.full((2, blocks, HKV, B, D), torch.nan).permute(0, 1, 3, 2, 4)  # [2, N, B, Hkv, D]
    for table, n in zip(batch.block_tables.long(), lens, strict=True):
        p = torch.arange(n)
        kv_cache[:, table[p // B], p % B] = torch.randn(2, n, HKV, D)
    return torch.randn(len(lens) if decode else sum(lens), HQ, D), kv_cache, batch


def make_backend(name, lens):
    config = AttentionConfig(HQ, HKV, D, torch.float32, CPU, B, len(lens))
    get_backend(name).check_available(config)
    return get_backend(name)(config)


def run(name, problem):
    query, kv_cache, batch = problem
    backend = make_backend(name, batch.seq_lens_host)
    backend.plan(batch)
    return backend.forward(query, kv_cache, batch)


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on.
#
# 1. A prompt of 32,768 tokens, 16 query heads. How much memory do the scores of *one* layer take in bfloat16 if all are written out?
# 2. For a decode, `torch_paged` copies K/V together and then attends. How many bytes move for each byte of K/V?
# 3. Softmax needs the largest score and the sum of all weights before it can give the first weight. How can attention be computed
#    in one pass over the keys nevertheless?
# 4. Two query heads share a KV head; everything is bfloat16. How many floating-point operations does a decode do for each byte it reads?
#    A large GPU can do some 200 in the time of one byte.
# 5. A sequence is cut into chunks that different programs work on. Their results are added up and divided by the total
#    weight. What is missing?
#
# <details><summary>Answers</summary>
#
# 1. 32 GiB, where Q, K, V and the result take 0.4.
# 2. Three: the copy reads and writes, attention reads once more.
# 3. It keeps the largest score so far, the sum of weights and the weighted sum of values, and scales both sums when the maximum rises.
# 4. Two: a multiplication and an addition for each of two heads, for two bytes. So the memory decides.
# 5. Each chunk has weighed by its own maximum. Before they are added, all must be brought to the same.
#
# </details>

# %% [markdown]
# ## Feel the problem
#
# What M3 does in a layer for one new token, at growing context: gathering, then attending. How much of the time is the copy?

# %%
def clock(f, repeats=9):
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


contexts, spent = (256, 1024, 4096, 16384), {"copy the blocks": [], "attend": []}
for n in contexts:
    query, kv_cache, batch = paged([n])
    table, gathered = batch.block_tables[0], gather_blocks(kv_cache, batch.block_tables[0], n)
    spent["copy the blocks"].append(clock(lambda: gather_blocks(kv_cache, table, n)))
    spent["attend"].append(clock(lambda: attend(query, *gathered, D**-0.5)))
share = np.array(spent["copy the blocks"]) / np.sum(list(spent.values()), 0)
figure, axes = plt.subplots(figsize=(7, 2))
left = np.zeros(len(contexts))
for name, colour in (("copy the blocks", "tab:red"), ("attend", "tab:blue")):
    part = np.array(spent[name]) / np.sum(list(spent.values()), 0)
    axes.barh([f"{n:,}" for n in contexts], part, left=left, color=colour, label=name)
    left += part
axes.set(xlabel="share of the time", ylabel="context", title="one decode, one layer of M3")
axes.legend(ncols=2, frameon=False, loc="lower center", bbox_to_anchor=(0.5, -0.75))
plt.show()
print("copying takes", ", ".join(f"{s:.0%}" for s in share))
assert share.max() > 0.2

# %% [markdown]
# The other way to waste memory is a prompt: all scores written out. Each of the `Hq` heads has one for each pair of tokens.

# %%
for n in (1024, 8192, 32768):
    print(f"{n:7,} tokens, 16 heads, bfloat16: scores {16 * n * n * 2 / 2**30:6.2f} GiB, Q, K, V and the result {48 * n * 128 * 2 / 2**30:.2f} GiB")

# %% [markdown]
# ## The mini: softmax in one pass
#
# (It has the ideas of m4.1 and m4.5 in it. To find them yourself, read on from "Your turn" and come back.)
#
# Keep for each query the largest score so far $m$, the sum of the weights $l$ and the weighted sum of the values $a$. A new tile may
# raise $m$; then what was summed is scaled down once, by $e^{m - m'}$. Below: this fold, a merge of two such states (so that two
# programs can share one sequence), in numpy; then the same fold as the attention of M3's mini engine. No score outlives its tile. (To write it
# yourself: `python -m milestones build mini`, stage 4.)

# %%
def fold(state, q, k, v, visible):
    """One tile of keys [N, D] into the state (m [M], l [M], a [M, D]) of queries [M, D]."""
    m, total, acc = state
    scores = np.where(visible, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    new = np.maximum(m, scores.max(1))
    weights, shrink = np.exp(scores - new[:, None]), np.exp(m - new)
    return new, total * shrink + weights.sum(1), acc * shrink[:, None] + weights @ v


def empty(q):
    return np.full(len(q), -1e30), np.zeros(len(q)), np.zeros_like(q)


def merge(one, other):
    """Two states over different keys into one over all of them: bring both to the larger maximum, add."""
    m = np.maximum(one[0], other[0])
    w, x = np.exp(one[0] - m), np.exp(other[0] - m)
    return m, one[1] * w + other[1] * x, one[2] * w[:, None] + other[2] * x[:, None]


def attention(q, k, v, positions, tile=16):
    """Causal attention [M, D] over keys [n, D]; the even and the odd tiles are two states, merged at the end."""
    states = [empty(q), empty(q)]
    for i, start in enumerate(range(0, len(k), tile)):
        keys = np.arange(start, min(start + tile, len(k)))
        states[i % 2] = fold(states[i % 2], q, k[keys], v[keys], keys <= positions[:, None])
    _, total, acc = merge(*states)
    return acc / total[:, None]


# %%
from milestones.mini import harness

adapters = harness.load(harness.REFERENCE)  # M3's engine, to import from

# %%
# milestones/mini/reference/attention.py
"""Stage 4: attention that visits each block once, and keeps no score and no copy of the keys."""

import torch
from blocks import PagedEngine
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, table: list[int], start: int) -> Tensor:
    """Causal attention of one sequence by an online softmax (Milakov and Gimelshein 2018; FlashAttention).

    `query` [n, Hq, D] are at positions `start` and on. `keys[b]` and `values[b]` read block b [B, Hkv, D]; token p of the
    sequence is in block table[p // B]. Slots behind the last token hold anything. Returns [n, Hq, D].

    For each query it keeps the largest score so far, the sum of the weights and the weighted sum of the values. A block with
    a larger score makes what was summed smaller, once.
    """
    n, num_heads, dim = query.shape
    positions, end, first = torch.arange(start, start + n), start + n, 0
    for block in table:
        if first >= end:
            break
        key, value = keys[block][: end - first], values[block][: end - first]  # [b, Hkv, D]
        if first == 0:
            grouped = query.view(n, key.shape[1], -1, dim) / dim**0.5  # [n, Hkv, G, D]
            largest = query.new_full(grouped.shape[:-1], -torch.inf)
            total, summed = torch.zeros_like(largest), torch.zeros_like(grouped)
        scores = torch.einsum("nhgd,bhd->nhgb", grouped, key)
        future = torch.arange(first, first + len(key)) > positions[:, None]  # [n, b]
        scores = scores.masked_fill(future[:, None, None], -torch.inf)
        new = torch.maximum(largest, scores.amax(-1))  # finite: every query sees the first token
        weights, shrink = (scores - new[..., None]).exp(), (largest - new).exp()
        total = total * shrink + weights.sum(-1)
        summed = summed * shrink[..., None] + torch.einsum("nhgb,bhd->nhgd", weights, value)
        largest, first = new, first + len(key)
    return (summed / total[..., None]).reshape(n, num_heads, dim)


class TiledEngine(PagedEngine):
    """A paged engine with this attention."""

    attend = staticmethod(attend)

# %%
q, k, v, where = *(np.random.default_rng(0).normal(size=(50, 16)) for _ in "qkv"), np.arange(50)
scores = np.where(where <= where[:, None], q @ k.T / 4, -np.inf)
plain = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) @ v
assert np.abs(attention(q, k, v, where) - plain).max() < 1e-12

llm = load()
prompt = llm.tokenizer.encode("Once upon a time, there was a little")
greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
preset_tokens = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
from contract import Limits

[mini_tokens], _ = harness.serve(TiledEngine(llm.engine.setup.path, Limits(8, 16, 1, 64)), [(prompt, 40)])
assert mini_tokens == list(preset_tokens)
lines = sum(1 for line in In[-2].splitlines() if line.strip())  # the cell above
assert lines <= 80
print(f"{lines} lines; equal to softmax written out; {len(mini_tokens)} tokens equal to those of m4 on {llm.engine.setup.backend}")
from folovllm.attention.backends.torch_paged import attend  # again: the cell above has one of this name

# %% [markdown]
# ## Your turn
#
# Six `@triton.jit` functions are yours to write. In a terminal:
#
# ```
# python -m milestones start m4        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint m4.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. You need no GPU: in the interpreter a kernel is a Python
# function that you can put a `print` into.

# %%
EXERCISES = {
    "m4.1": online_softmax.online_softmax_tile,
    "m4.2": store.store_kvcache_kernel,
    "m4.3": prefill.prefill_loop,
    "m4.4": decode.decode_split,
    "m4.5": decode.merge_partials,
    "m4.6": rms_norm.add_rms_norm_kernel,
}
for id, f in EXERCISES.items():
    print(f"{id}  {f.fn.__module__}:{f.fn.__qualname__}\n    {inspect.getdoc(f.fn).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
f = online_softmax.online_softmax_tile.fn
print(f"def {f.__name__}{inspect.signature(f)}:\n")
print(inspect.getdoc(f))

# %% [markdown]
# **A stretch.** Some models let a query see the last `window` tokens only, itself included. Then most tiles need not be read at all. Write
# `mine(q, k, v, position, window)` for one query `[1, D]` at `position` over keys `[n, D]`, with `fold` in tiles of 16 that begin at
# multiples of 16, and return the result and how many tiles you folded. `check` wants the right numbers, and says how many tiles would do.

# %%
def check(mine):
    rng = np.random.default_rng(0)
    for n, window in ((100, 30), (33, 1), (64, 64), (20, 500)):
        (q,), k, v = rng.normal(size=(1, 1, D)), *rng.normal(size=(2, n, D))
        keys = np.arange(n)
        weights = np.exp(q @ k.T / D**0.5) * (keys > n - 1 - window)
        out, tiles = mine(q, k, v, n - 1, window)
        assert np.abs(out - weights @ v / weights.sum()).max() < 1e-9
        print(f"{n:4} keys, window {window:4}: right, {tiles} tiles folded, {(n - 1) // 16 - max(0, n - window) // 16 + 1} needed")


def all_tiles(q, k, v, position, window):
    state, starts = empty(q), range(0, position + 1, 16)
    for start in starts:
        keys = np.arange(start, min(start + 16, position + 1))
        state = fold(state, q, k[keys], v[keys], keys > position - window)
    return state[2] / state[1][:, None], len(starts)


check(all_tiles)

# %% [markdown]
# Note that it is right although whole tiles are hidden: a state that starts at the finite -1e30 survives them. Starting at $-\infty$
# would have given $e^{-\infty+\infty}$.
#
# ## See it: three running numbers
#
# Real queries and keys, taken from the engine while it reads a prompt, layer 3. The kernel's own `online_softmax_tile` folds them, a block
# at a time, and a small kernel around it stores the state after each tile.

# %%
TEXT = (
    "Once upon a time there was a girl named Lily. She had a red kite and a small dog. One day she went to the park with her mom. "
    "The wind was strong and the kite flew up into a tall tree. Lily was sad. The dog barked at the tree, and a big boy came to help. "
    "He was very tall. He took the kite down and gave it to Lily. She said thank you and smiled. Then they all played with the kite "
    "and the dog ran after them. In the evening Lily told her dad about the tall boy, and her dad said that he was proud of her."
)
seen = []
forward = TorchPagedBackend.forward


def spy(self, query, kv_cache, batch):
    seen.append((query.clone(), kv_cache.clone(), batch.block_tables[0].clone(), batch.seq_lens_host[0]))
    return forward(self, query, kv_cache, batch)


text_ids = llm.tokenizer.encode(TEXT)
with patch.object(TorchPagedBackend, "forward", spy):
    llm.generate([text_ids], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)


@triton.jit
def trace_kernel(q_ptr, k_ptr, v_ptr, max_ptr, sum_ptr, acc_ptr, n, scale, TILE: tl.constexpr, D: tl.constexpr):
    i, d = tl.arange(0, TILE), tl.arange(0, D)
    q = tl.load(q_ptr + i[:, None] * D + d[None, :])
    row_max, row_sum, acc = tl.full([TILE], -1.0e30, tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE, D], tl.float32)
    for token in range(0, n, TILE):
        keys = token + i
        k = tl.load(k_ptr + keys[:, None] * D + d[None, :], mask=(keys < n)[:, None], other=0.0)
        v = tl.load(v_ptr + keys[:, None] * D + d[None, :], mask=(keys < n)[:, None], other=0.0)
        visible = keys[None, :] <= (n - TILE + i)[:, None]
        row_max, row_sum, acc = online_softmax.online_softmax_tile(q, k, v, visible, row_max, row_sum, acc, scale)
        tile = token // TILE
        tl.store(max_ptr + tile * TILE + i, row_max)
        tl.store(sum_ptr + tile * TILE + i, row_sum)
        tl.store(acc_ptr + (tile * TILE + i)[:, None] * D + d[None, :], acc)


def trace(layer, head):
    """Scores [n] of the last token, and max, sum [tiles], acc [tiles, D] after each tile."""
    query, kv_cache, table, n = seen[layer]
    k, v = (x[:, head // (HQ // HKV)].contiguous() for x in gather_blocks(kv_cache, table, n))
    q, tiles = query[-16:, head].contiguous(), -(-n // 16)
    state = torch.zeros(tiles, 16), torch.zeros(tiles, 16), torch.zeros(tiles, 16, D)
    trace_kernel[(1,)](q, k, v, *state, n, D**-0.5 * LOG2_E, TILE=16, D=D)
    return (q[-1] @ k.T * D**-0.5 * LOG2_E), v, *(x[:, -1] for x in state)


# The head in which the maximum rises most often on the way.
head = max(range(HQ), key=lambda h: len(trace(3, h)[2].unique()))
scores, values, row_max, row_sum, acc = trace(3, head)
n, tiles = len(scores), len(row_max)
edges = np.arange(0, n + 1, 16) if n % 16 == 0 else np.append(np.arange(0, n, 16), n)
figure, panels = plt.subplots(1, 3, figsize=(14, 3))
panels[0].plot(scores, ".", ms=4, color="tab:gray", label="score of a key")
panels[0].stairs(row_max, edges, color="tab:red", lw=2, baseline=None, label="running maximum")
panels[0].set(title=f"layer 3, head {head}: scores (powers of two)", xlabel="key")
panels[0].legend(frameon=False, fontsize=8)
panels[1].plot(edges[1:], row_sum, "o-", color="tab:blue", ms=4, label="running sum")
shrunk = [t for t in range(1, tiles) if row_max[t] > row_max[t - 1]]
for t in shrunk:
    panels[1].axvline(edges[t], color="tab:red", lw=0.8, ls=":")
panels[1].set(title="sum of weights (dotted: the scale changes)", xlabel="keys folded")
exact = torch.softmax(scores / LOG2_E, -1) @ values
error = (acc / row_sum[:, None] - exact).norm(dim=-1) / exact.norm()
panels[2].semilogy(edges[1:], error, "o-", color="tab:green", ms=4)
panels[2].set(title="acc / sum, distance from the result", xlabel="keys folded")
figure.tight_layout()
plt.show()
print(f"{tiles} tiles, the scale changed {len(shrunk)} times after the first; final error {error[-1]:.1e}")
assert error[-1] < 1e-5 < error[0] and (row_max.diff() >= 0).all()
assert torch.allclose(row_max[-1], scores.max())

# %% [markdown]
# The maximum only ever rises. Where it rises by much the sum drops, because everything before was counted too large. In the middle panel no value
# means anything by itself: only the quotient does, and at the end it is the attention.
#
# ## See it: how a decode is cut into work
#
# One query per sequence gives a GPU too little to do: Qwen3-0.6B has 8 KV heads, an H200 has 132 multiprocessors. So the keys are cut into chunks,
# each a work item; the plan chooses their length on the device, once a step. The same kernel that runs in the engine, asked for its list:

# %%
BATCHES = {"one long text": [4096], "long and short": [2000, 300, 40, 900], "many": [300, 500, 120, 800, 640, 260, 90, 410] * 4}
figure, panels = plt.subplots(1, 3, figsize=(14, 2.8))
plans = {}
for panel, (name, lens) in zip(panels, BATCHES.items(), strict=True):
    splitter = decode.SplitKVDecode(len(lens), 8, 8, 16, B, CPU, num_programs=264)
    splitter.plan(torch.tensor(lens, dtype=torch.int32), len(lens))
    total, chunk = splitter.header.tolist()
    plans[name] = total, chunk
    for order, (seq, c, length, _) in enumerate(splitter.items[: total // 8].tolist()):
        width = min(chunk, length - c * chunk)
        panel.barh(seq, width, left=c * chunk, height=0.8, color=PALETTE(order % 20), edgecolor="white", lw=0.5)
    panel.set(title=f"{name}: {total} items, chunks of {chunk}", xlabel="token", ylabel="sequence")
figure.tight_layout()
plt.show()
assert plans["one long text"][1] < plans["many"][1]
assert plans["one long text"][0] <= 264

# %% [markdown]
# 264 programs, two a multiprocessor, 8 KV heads. One text of 4,096 tokens is cut fine, so that each has something to read; many
# texts need no fine cut, and each cut costs a merge.

# %% [markdown]
# ## See it: which program reads which block
#
# A, B and C, whom the chapters follow, in the engine with our kernels. In step 2 A and B decode while C's prompt comes in. Below: the addresses of
# each `tl.load` in the interpreter, as blocks of the cache; a row is a program of a grid.

# %%
def reads(engine, step):
    """Serve A, B and C; in `step`, which program of which kernel loads keys of which blocks."""
    found, at_work = {}, []
    load, call = InterpreterBuilder.create_masked_load, decode.SplitKVDecode.__call__

    def noted_load(builder, ptrs, mask, *rest):
        for name, keys in at_work:
            places = ptrs.data[mask.data].astype(np.int64) - keys.data_ptr()  # in bytes, from the layer's first key on
            block_bytes = keys.stride(0) * keys.element_size()
            blocks = places[(places >= 0) & (places < len(keys) * block_bytes)] // block_bytes
            if len(blocks):
                found.setdefault((name, builder.grid_idx), set()).update(blocks.tolist())
        return load(builder, ptrs, mask, *rest)

    def noted(name, kernel):
        def run(*args, **options):
            at_work.append((name, next(a for a in args if isinstance(a, torch.Tensor) and a.ndim == 5)[0]))
            result = kernel(*args, **options)
            at_work.clear()
            return result

        return run

    for turn in range(step + 1):
        for request in example().requests:
            if request.turn == turn:
                params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
                engine.add_request(request.name, list(request.prompt_token_ids), params, stream=False)
        if turn == step:
            with (
                patch.object(InterpreterBuilder, "create_masked_load", noted_load),
                patch.object(triton_backend, "prefill", noted("prefill", prefill.prefill)),
                patch.object(decode.SplitKVDecode, "__call__", lambda *args, **options: noted("decode", call)(*args, **options)),
            ):
                engine.step()
        else:
            engine.step()
    return found


abc = engine_for("m4", attention_backend="triton")
read = reads(abc, 2)
tables = {seq.request_id: seq.block_table for seq in abc.scheduler.running}
figure, axes = plt.subplots(figsize=(7, 2.8))
names = [f"{name} {grid[0]}" for name, grid in read]
for row, blocks in enumerate(read.values()):
    owner = next(name for name, table in tables.items() if blocks <= set(table))
    axes.barh([row] * len(blocks), 0.9, left=sorted(blocks), height=0.8, color=DARK[owner])
    axes.text(max(blocks) + 1.1, row, owner, va="center", fontsize=9)
axes.set(yticks=range(len(read)), yticklabels=names, xticks=np.arange(10) + 0.45, xticklabels=range(10), xlim=(0, 10.6), xlabel="block", title="step 2: a program and the blocks it reads")
axes.invert_yaxis()
plt.show()
print("block tables:", tables)
assert sorted(map(sorted, read.values())) == sorted([[0, 1, 2]] * 2 + [[3, 4, 5, 6]] * 2 + [[7, 8, 9]] * 4)

# %% [markdown]
# Two programs for each decode, one a KV head; four for the prompt, one a query head. The decode kernel takes B first, for it has more keys.
#
# ## FlashAttention's two functions
#
# The package runs on a GPU only. What its functions *promise* fits into a few lines of torch. So our backend's own code can run here, over stand-ins, in the
# engine, and its results can be compared with `torch_paged`'s. A, B and C once more, in M5, where a step may have a chunk beside decodes.

# %%
calls = []


def flash_attn_varlen_func(q, k_cache, v_cache, *, cu_seqlens_q, cu_seqlens_k, block_table, softmax_scale, causal, **bounds):
    """[total_q, Hq, D]: the queries of each sequence over the blocks that its row of the table names."""
    calls.append({"cu_seqlens_q": cu_seqlens_q.tolist(), "cu_seqlens_k": cu_seqlens_k.tolist(), "block_table": block_table.tolist(), **bounds})
    results = []
    for i, table in enumerate(block_table):
        n = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        keys, values = (cache[table[: -(-n // cache.shape[1])].long()].flatten(0, 1)[:n] for cache in (k_cache, v_cache))
        results.append(attend(q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]], keys, values, softmax_scale))
    return torch.cat(results)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal):
    """[S, 1, Hq, D]: one query of each sequence."""
    calls.append({"cache_seqlens": cache_seqlens.tolist(), "block_table": block_table.tolist()})
    ends = torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0))
    results = [
        attend(q[i], *(cache[table.long()].flatten(0, 1)[: ends[i + 1] - ends[i]] for cache in (k_cache, v_cache)), softmax_scale)
        for i, table in enumerate(block_table)
    ]
    return torch.stack(results)


stand_in = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache)
with patch.dict(sys.modules, flash_attn=stand_in):
    flash = FlashAttentionBackend(AttentionConfig(HQ, HKV, D, torch.float32, CPU, 4, 8))
differences, paged_forward = [], TorchPagedBackend.forward


def compared(self, query, kv_cache, batch):
    flash.plan(batch)
    result = paged_forward(self, query, kv_cache, batch)
    differences.append(float((flash.forward(query, kv_cache, batch) - result).abs().max()))
    return result


with patch.object(TorchPagedBackend, "forward", compared):
    play("m5")
print(f"{len(differences)} layers' attention, {len(calls)} calls; largest difference {max(differences):.1e}")
chunk = next(i for i, call in enumerate(calls) if call.get("cu_seqlens_q") == [0, 9] and call["cu_seqlens_k"] == [0, 12])
print("step 1:", calls[chunk - 1], calls[chunk], sep="\n  ")
assert max(differences) < 1e-5

# %% [markdown]
# B's second chunk: nine queries, twelve keys. `cu_seqlens_q` and `cu_seqlens_k` say it, and nothing else in the call knows of chunks.
#
# ## Count the bytes
#
# How many bytes does each way of attending move? Not by formula: we count them. For torch, what every operation reads and writes (views are
# free); for our kernels, what each `tl.load` and `tl.store` touches in the interpreter, and what is masked out is not counted.

# %%
FREE = torch.ops.aten.empty.memory_format, torch.ops.aten._unsafe_view.default


class TorchBytes(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function not in FREE:
            # An index reads what it picks, not the whole cache.
            read = (args[1:], result) if function is torch.ops.aten.index.Tensor else (args, kwargs)
            flat = torch.utils._pytree.tree_leaves((read, result))
            self.total += sum(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
        return result


class TritonBytes:
    total = 0

    def __enter__(self):
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder, ptrs, mask, *rest):
            result = load(builder, ptrs, mask, *rest)
            self.total += int(mask.data.sum()) * result.data.itemsize
            return result

        def counted_store(builder, ptrs, value, mask, *rest):
            self.total += int(mask.data.sum()) * value.data.itemsize
            return store(builder, ptrs, value, mask, *rest)

        self.patches = [patch.object(InterpreterBuilder, "create_masked_load", counted_load)]
        self.patches += [patch.object(InterpreterBuilder, "create_masked_store", counted_store)]
        for p in self.patches:
            p.start()
        return self

    def __exit__(self, *_):
        for p in self.patches:
            p.stop()


def count(name, lens, is_decode):
    problem = paged(lens, is_decode)
    with TritonBytes() if name == "triton" else TorchBytes() as counter:
        run(name, problem)
    return counter.total


LENGTHS = {"decode": (128, 512, 2048), "prefill": (64, 128, 256, 512)}
WAYS = {"torch_naive": "naive: all scores", "torch_paged": "paged: copy, then attend", "triton": "flash: by tiles"}
moved = {(phase, way): [count(way, [n], phase == "decode") for n in LENGTHS[phase]] for phase in LENGTHS for way in WAYS}
figure, panels = plt.subplots(1, 2, figsize=(12, 3.2))
for panel, (phase, lengths) in zip(panels, LENGTHS.items(), strict=True):
    least = [((2 * HQ * (1 if phase == "decode" else n)) + 2 * HKV * n) * D * 4 for n in lengths]
    for way, label in WAYS.items():
        panel.loglog(lengths, np.array(moved[phase, way]) / 1e6, "o-", base=2, label=label)
    panel.loglog(lengths, np.array(least) / 1e6, "k:", base=2, label="everything once")
    panel.set(title=f"{phase}: MB moved, one layer", xlabel="tokens", xticks=lengths, xticklabels=lengths)
panels[1].legend(frameon=False, fontsize=8)
plt.show()
for (phase, way), counts in moved.items():
    n = LENGTHS[phase][-1]
    once = ((2 * HQ * (1 if phase == "decode" else n)) + 2 * HKV * n) * D * 4
    print(f"{phase:8} {n:5} tokens  {way:12} {counts[-1] / 1e6:8.2f} MB, {counts[-1] / once:5.1f} times what must be moved")
assert moved["decode", "triton"][-1] < 1.1 * 2 * HKV * 2048 * D * 4, "a decode reads K/V once"
assert moved["decode", "torch_paged"][-1] > 2.5 * moved["decode", "triton"][-1]
assert moved["prefill", "torch_naive"][-1] > 4 * moved["prefill", "triton"][-1]

# %% [markdown]
# A decode by tiles touches each key and value once, which is all one can ask for. `torch_paged` touches them three times: the blocks are
# copied into the order of tokens (read, written), and attended to (read).
#
# In its prefill the kernel inside PyTorch is one operation to us, of which we see what goes in and comes out; it is a flash kernel
# itself, and its re-reads are not counted. Ours are: in a prefill each tile of queries walks over the keys anew,
# so the count grows with the square, too, but divided by the tile's 32 rows (128 on a GPU, where moreover the re-reads are served by
# the cache on the chip).
#
# ## Measure: the switch off and on
#
# One flag. The engine with `torch_paged`, and with our kernels in the interpreter, fused layers included. Do not read the seconds as a
# verdict: the interpreter runs each program as Python, some milliseconds apiece. What it shows is that the numbers agree.

# %%
outputs, seconds = {}, {}
short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
for name in ("torch_paged", "triton"):
    engine = load(name, max_num_seqs=2)
    began = time.perf_counter()
    outputs[name] = [out.outputs[0].token_ids for out in engine.generate([prompt[:6], prompt[:3]], short, use_tqdm=False)]
    seconds[name] = time.perf_counter() - began
    print(f"{name:12} {seconds[name]:6.2f} s  {[engine.tokenizer.decode(list(ids)) for ids in outputs[name]]}")
assert outputs["torch_paged"] == outputs["triton"]

# %% [markdown]
# All backends on one table: a decode of four sequences, one layer, against float64.

# %%
lens = [5, 16, 200, 67]
problem = paged(lens)
exact = run("torch_naive", tuple(x.double() if isinstance(x, torch.Tensor) else x for x in problem))
print(f"{'backend':12} {'error':>8} {'KB moved':>9} {'ms here':>8}")
worked = []
for name in BACKENDS:
    try:
        out = run(name, problem)
    except BackendUnavailable as reason:
        print(f"{name:12} not here: {reason}")
        continue
    error = float((out - exact).norm() / exact.norm())
    backend = make_backend(name, lens)
    backend.plan(problem[2])
    took = clock(lambda: backend.forward(*problem), repeats=1 if name == "triton" else 9)
    print(f"{name:12} {error:8.1e} {count(name, lens, True) / 1e3:9.0f} {took * 1e3:8.2f}")
    worked.append(error)
assert len(worked) >= 3 and max(worked) < 1e-5

# %% [markdown]
# And where kernels are compiled instead of interpreted. From `docs/performance_log.md`: one NVIDIA H200, torch 2.11, Triton 3.6, flash-attn 2.8.3.post2,
# bfloat16, 16 query and 8 KV heads of 128, blocks of 256, microseconds a layer; repeat it with `python -m tools.bench_attention`.
#
# | decode | `torch_paged` | `flash_attn` | `triton` | of the copy bandwidth |
# |---|---|---|---|---|
# | 256 sequences of 300 to 1500 tokens | 26,640 | 266.7 | 223.3 | 101% |
# | 16 sequences of 300 to 1500 tokens | 1,318 | 29.2 | 20.6 | 66% |
# | 1 sequence of 4,096 tokens | 102 | 17.3 | 9.2 | 43% |
#
# | prefill, TFLOP/s | `flash_attn` | `triton` |
# |---|---|---|
# | 16 prompts of 1,024 tokens | 239 | 287 |
# | 16 prompts of 4,096 tokens | 300 | 419 |
#
# ## Arithmetic intensity and the roofline
#
# A machine has two speeds: bytes a second and operations a second. A computation that does $I$ operations per byte can reach at most
# $\min(I \cdot W, F)$. For a decode, each number of K or V takes part in one multiplication and one addition per query head that
# shares it: $4 G D$ operations for $2 D$ numbers, $I = G$ in bfloat16 and $G / 2$ in float32, *whatever the length*. For a prefill $I$ grows with the prompt.

# %%
rates = max((measure_rates(CPU, torch.float32) for _ in range(2)), key=lambda r: r.copy)  # other programs only slow it down
points = []
for n in (1024, 65536):
    q, k, v = torch.randn(1, HQ, D), *torch.randn(2, n, HKV, D)
    took = clock(lambda: attend(q, k, v, D**-0.5))
    points.append((f"decode, {n:,}", HQ / HKV / 2, 4 * HQ * D * n / took))
for n in (64, 256, 1024):
    q, k, v = torch.randn(1, HQ, n, D), *torch.randn(2, 1, HQ, n, D)
    took = clock(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    points.append((f"prefill, {n:,}", n * HQ / (2 * HQ + 2 * HQ) / 2, 2 * HQ * D * n * n / took))
log = [("decode, 256 x 4,096", 2, 2 * 4.31e12), ("decode, 16 x 300-1500", 2, 2 * 2.84e12)]
log += [(f"prefill, {b} x {n:,}", n / 3, t * 1e12) for b, n, t in ((16, 1024, 287), (16, 4096, 419), (1, 32768, 444))]

figure, panels = plt.subplots(1, 2, figsize=(13, 3.4))
machines = [("this CPU, one thread, float32 (measured now)", rates.copy, rates.matmul, points)]
machines += [("H200, bfloat16 (performance log; top: datasheet)", 4.27e12, 989e12, log)]
for panel, (name, bandwidth, peak, measured) in zip(panels, machines, strict=True):
    x = np.logspace(-1, 4.2, 100)
    panel.loglog(x, np.minimum(x * bandwidth, peak), color="black")
    for i, (label, intensity, flops) in enumerate(measured):
        panel.plot(intensity, flops, "o", color=PALETTE(2 * i), label=label)
    panel.set(title=name, xlabel="operations per byte", ylabel="operations per second")
    panel.legend(frameon=False, fontsize=8, loc="lower right")
plt.show()
print(f"here: copy {rates.copy / 1e9:.0f} GB/s, matrices {rates.matmul / 1e9:.0f} GFLOP/s; the ridge is at {rates.matmul / rates.copy:.0f} operations per byte")
print(f"H200: the ridge is at {989 / 4.27:.0f}; a decode with two query heads per KV head is at 2")
assert rates.matmul / rates.copy > 1

# %% [markdown]
# Both decodes sit under the slope: no cleverness in arithmetic helps there, only reading less (fewer KV heads, smaller numbers) or reading
# at full speed. A point above the slope of the CPU is no mistake: the slope is the speed of its memory, and a short K/V stays in its cache.
# A prefill sits under the flat part.
#
# ## Compare
#
# | | this milestone | nano-vLLM | vLLM |
# |---|---|---|---|
# | prefill | Triton, walks blocks | flash-attn, contiguous or paged | FlashAttention 3, FlashInfer, Triton and others |
# | decode | Triton, split K/V, one launch with the merge | `flash_attn_with_kvcache` | the same choice |
# | how it is split | plan on the device, once a step | inside flash-attn | scheduler metadata per step, or fixed segments (Triton) |
# | store | Triton, slot mapping, -1 skipped | Triton, slot mapping, -1 skipped | CUDA, slot mapping, -1 skipped |
# | element-wise | three fused Triton kernels | `torch.compile` | hand-written CUDA, and `torch.compile` |
# | sizes | a small table | | autotuned tables per card |
#
# ## Break it
#
# Five mistakes, each put into the running kernels. Which of them show at once, which only for some shapes, and which one never, here?

# %%
@triton.jit
def adds_up(max_ptr, sum_ptr, acc_ptr, first_row, num_chunks, stride, GROUP: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):
    g, dims = tl.arange(0, GROUP), tl.arange(0, D)
    row_sum, acc = tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, D], tl.float32)
    for c in range(0, num_chunks):
        row_sum += tl.load(sum_ptr + first_row + c * stride + g)
        acc += tl.load(acc_ptr + (first_row + c * stride + g)[:, None] * D + dims[None, :])
    return row_sum, acc


right_tile = online_softmax.online_softmax_tile


@triton.jit
def half_a_rescale(q, k, v, visible, row_max, row_sum, acc, scale):
    new_max, new_sum, acc = right_tile(q, k, v, visible, row_max, row_sum, acc, scale)
    return new_max, new_sum + row_sum * (1.0 - tl.exp2(row_max - new_max)), acc


@triton.jit
def scores_only(q, k, v, visible, row_max, row_sum, acc, scale):
    hole = tl.where(tl.max(visible.to(tl.int32), 0)[:, None] == 1, 0.0, float("nan"))  # as if NaN had been loaded
    return right_tile(q, k + hole, v + hole, visible, row_max, row_sum, acc, scale)


right_ids = online_softmax.block_ids


@triton.jit
def first_block(table_ptr, token, end, B: tl.constexpr, TILE: tl.constexpr):
    return right_ids(table_ptr, token * 0, end, B, TILE)


BREAKS = {
    "as it is": {},
    "partial results added up": {"merge_partials": adds_up},
    "only acc is rescaled": {"online_softmax_tile": half_a_rescale},
    "masked scores, unmasked loads": {"online_softmax_tile": scores_only},
    "always the first block": {"block_ids": first_block},
    "the maximum starts at -inf": {"LOWEST": tl.constexpr(float("-inf"))},
}
CASES = {"1 token": [1], "32 tokens": [32], "200 tokens": [200]}
print(f"{'relative error':32}" + "".join(f"{case:>12}" for case in CASES))
errors = {}
for name, broken in BREAKS.items():
    row = []
    for lens in CASES.values():
        problem = paged(lens)
        expected = run("torch_naive", problem)
        with patch.multiple(decode, **broken) if broken else warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row.append(float((run("triton", problem) - expected).norm() / expected.norm()))
    errors[name] = row
    print(f"{name:32}" + "".join(f"{error:12.1e}" for error in row))
assert max(errors["as it is"]) < 1e-5 and max(errors["the maximum starts at -inf"]) < 1e-5
assert errors["partial results added up"][0] < 1e-5 < 0.01 < errors["partial results added up"][2]
assert errors["only acc is rescaled"][1] < 1e-5 < 0.01 < errors["only acc is rescaled"][2]
assert np.isnan(errors["masked scores, unmasked loads"][0])
assert errors["always the first block"][0] < 1e-5 < 0.01 < errors["always the first block"][2]

# %% [markdown]
# At 32 tokens, exactly one tile, everything looks right: one tile needs no rescale, one chunk no merge, nothing is masked, and the first blocks
# are the right ones. Hence the tests at and around every boundary of tile, chunk and block. The last mistake does nothing *here*, because every tile that these kernels fold shows each
# query at least one key; with a sliding window (the stretch above) it would be NaN.
#
# ## What the next milestone is for
#
# A prompt is computed at the speed of arithmetic, and a decode at the speed of memory. What is left is not to do the work at all: two
# prompts that begin alike compute the same K/V twice, and a long prompt keeps all others waiting for a whole step. That is
# [M5](../notebooks/m5_reuse.ipynb).

# %% [markdown]
# ## Beside the exercises: build a prefill kernel from an empty file
#
# `python -m milestones build m4` gives you an empty file, the protocol and the tests; the structure is yours, and no exercise needs it. The score
# counts in the interpreter what a kernel loads, stores and multiplies. Once yours is begun, it has a row too.

# %%
from IPython.display import Markdown

from milestones.builders import own_scores

Markdown(own_scores("m4"))
