# %% [markdown]
# # X5: hybrid models
#
# A cache grows with every token. A state does not: it is a matrix for each head, and all that a layer knows of the text so far is in it. Here you see what such a matrix remembers and what it
# loses, why a prompt need not be computed a token at a time, what a decode costs after ten tokens and after ten thousand, and why a prefix is found only where a snapshot was taken.
#
# The [chapter](../docs/x5_hybrid.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("x5")

# %%
import inspect
import time
import warnings
from statistics import median
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import torch

from folovllm import LLM, SamplingParams
from folovllm.electives.hybrid import snapshots
from folovllm.electives.hybrid.delta_rule import delta_rule, delta_rule_chunk, delta_rule_step, l2norm
from folovllm.electives.hybrid.short_conv import convolve
from folovllm.electives.hybrid.snapshots import SnapshotCache, snapshot_to_evict
from folovllm.electives.hybrid.state_layer import num_snapshots

torch.set_num_threads(1)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})

MODEL = {"model": "stories-hybrid", "device": "cpu", "max_num_seqs": 4, "use_tqdm": False}


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. A head has keys of 64 numbers. How many pairs of random keys and values can its matrix hold before half of each answer is wrong?
# 2. A decode after 16 tokens, and one after 4,000: how many times longer does the second take in a layer of full attention? In a linear one?
# 3. A prompt of 512 tokens: by how much are chunks of 64 faster than single steps, on this CPU?
# 4. A prompt shares 100 tokens with an earlier one, and snapshots are taken every 32 tokens. How many tokens need not be computed?
# 5. What happens to the text if a sequence begins with all cached blocks and an older state?
#
# ## Feel the problem
#
# What a layer must read for one more token: K and V of all tokens so far, or a state.

# %%
HEADS, DIM = 4, 64
lengths = [16, 64, 256, 1024, 4096]


def milliseconds(work, rounds=15):
    """The processor's time, the median over rounds."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        times.append(1e3 * (time.thread_time() - start))
    return median(times)


def attend(query, keys, values):
    weights = (query[:, None] @ keys.mT / DIM**0.5).softmax(-1)  # [H, 1, n]
    return weights @ values


state = torch.randn(1, HEADS, DIM, DIM)
one = [
    l2norm(torch.randn(1, HEADS, DIM)),
    l2norm(torch.randn(1, HEADS, DIM)),
    torch.randn(1, HEADS, DIM),
    -torch.rand(1, HEADS),
    torch.rand(1, HEADS),
]
full = []
for n in lengths:
    keys, values, query = torch.randn(HEADS, n, DIM), torch.randn(HEADS, n, DIM), torch.randn(HEADS, DIM)
    full.append(milliseconds(lambda: attend(query, keys, values)))
    print(
        f"after {n:5} tokens: {2 * HEADS * n * DIM * 4 / 1e3:8.0f} kB of K/V, {full[-1]:6.3f} ms; or {HEADS * DIM * DIM * 4 / 1e3:.0f} kB of state, {milliseconds(lambda: delta_rule_step(state, *one)):6.3f} ms"
    )
assert full[-1] > 3 * full[0], "attention over a long text takes longer"

# %% [markdown]
# ## The mini: a memory in ten lines
#
# (It has the idea of x5.1 in it. To find it yourself, read on from "Your turn" and come back.)
#
# A matrix learns pairs, one after the other, and is asked for all of them again. Once by the delta rule, once by adding up (linear attention as of 2020).


# %%
def remember(keys, values, delta):
    S = torch.zeros(keys.shape[1], values.shape[1])
    for k, v in zip(keys, values, strict=True):
        S += torch.outer(k, v - k @ S if delta else v)
    return keys @ S


counts, wrong = [1, 8, 16, 32, 48, 64, 96, 128], {True: [], False: []}
for n in counts:
    keys, values = l2norm(torch.randn(n, DIM)), torch.randn(n, DIM)
    for delta in wrong:
        error = (remember(keys, values, delta) - values).square().mean() / values.square().mean()
        wrong[delta].append(error.item())
    print(
        f"{n:4} pairs: {100 * wrong[True][-1]:5.1f}% of the answers' power is wrong by the delta rule, {100 * wrong[False][-1]:5.1f}% by adding up"
    )
fig, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.plot(counts, wrong[True], "o-", label="delta rule")
axis.plot(counts, wrong[False], "s--", label="adding up")
axis.axvline(DIM, color="gray", linestyle=":", label="dimensions of a key")
axis.set(xlabel="pairs that were written", ylabel="share of the answers that is wrong")
axis.legend(frameon=False)
plt.show()
again = l2norm(torch.randn(1, DIM)).repeat(2, 1)
old_and_new = torch.stack([torch.ones(DIM), -torch.ones(DIM)])
print(
    f"one key, first with 1 and then with -1: the delta rule says {remember(again, old_and_new, True)[0, 0]:+.1f}, adding up says {remember(again, old_and_new, False)[0, 0]:+.1f}"
)

# %% [markdown]
# A full list would be right every time, and grow. That is the bargain of a hybrid model: most layers remember a bounded amount, and a few keep the list.
#
# ## Your turn
#
# Six functions, five exercises. In a terminal:
#
# ```
# python -m milestones start x5        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint x5.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
EXERCISES = {
    "x5.1": [delta_rule_step],
    "x5.2": [delta_rule_chunk],
    "x5.3": [convolve],
    "x5.4": [SnapshotCache.longest_prefix, SnapshotCache.cache_snapshot],
    "x5.5": [snapshot_to_evict],
}
for id, functions in EXERCISES.items():
    for f in functions:
        print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def delta_rule_step{inspect.signature(delta_rule_step)}:\n")
print(inspect.getdoc(delta_rule_step))

# %% [markdown]
# ## Measure: chunks against steps
#
# 512 tokens of a prompt. Both ways give the same numbers.


# %%
def tokens(n):
    return [
        l2norm(torch.randn(n, HEADS, DIM)),
        l2norm(torch.randn(n, HEADS, DIM)),
        torch.randn(n, HEADS, DIM),
        -0.1 * torch.rand(n, HEADS),
        torch.rand(n, HEADS),
    ]


def step_by_step(state, *prompt):
    outputs, state = [], state[None]
    for i in range(len(prompt[0])):
        out, state = delta_rule_step(state, *(x[i : i + 1] for x in prompt))
        outputs.append(out)
    return torch.cat(outputs), state[0]


start, prompt = torch.zeros(HEADS, DIM, DIM), tokens(512)
by_chunks, by_steps = delta_rule(start, *prompt), step_by_step(start, *prompt)
slow, fast = milliseconds(lambda: step_by_step(start, *prompt), 3), milliseconds(lambda: delta_rule(start, *prompt), 3)
print(
    f"outputs differ by at most {(by_chunks[0] - by_steps[0]).abs().max():.0e}, states by {(by_chunks[1] - by_steps[1]).abs().max():.0e}"
)
print(f"step by step {slow:.0f} ms, chunks {fast:.0f} ms: {slow / fast:.1f} times as fast")
assert torch.allclose(by_chunks[0], by_steps[0], atol=1e-3)
assert fast < slow

# %% [markdown]
# ## See it: what fades
#
# A head writes one pair at token 0 and is asked for it later, while other tokens are written. How much of the answer is left depends on the decay that the model chooses.

# %%
fig, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for decay in (1.0, 0.99, 0.95, 0.8):
    first = l2norm(torch.randn(1, 1, DIM))
    S, value = torch.zeros(1, 1, DIM, DIM), torch.randn(1, 1, DIM)
    _, S = delta_rule_step(S, first, first, value, torch.zeros(1, 1), torch.ones(1, 1))
    left = []
    for _ in range(100):
        left.append(float((first[0, 0] @ S[0, 0]) @ value[0, 0] / value.square().sum()))
        key = l2norm(torch.randn(1, 1, DIM))
        _, S = delta_rule_step(
            S, key, key, torch.randn(1, 1, DIM), torch.tensor([[decay]]).log(), torch.full((1, 1), 0.2)
        )
    axis.plot(left, label=f"decay {decay}")
axis.set(xlabel="tokens since", ylabel="what is left of the answer")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The engine: a cache that grows beside states that do not
#
# The real engine over a hybrid model. K/V are kept by its two layers of full attention alone.

# %%
TEXT = "Once upon a time there was a little girl named Lily. She had a red kite. One day the wind was strong and the kite flew away over the trees. "
with LLM(milestone="m6", max_model_len=512, **MODEL) as llm:
    setup = llm.engine.setup
    states = llm.engine.executor._worker.runner.inner.states
    slots = setup.max_num_seqs + 1 + num_snapshots(setup)
    a_state = states.num_bytes / slots
    print(
        f"K/V of a token: {setup.kv_bytes_per_token / 1e3:.1f} kB; the state of a sequence: {a_state / 1e3:.0f} kB, as much as {a_state / setup.kv_bytes_per_token:.0f} tokens"
    )
    print(f"{slots} slots: {setup.max_num_seqs} rows, one for padding, {num_snapshots(setup)} snapshots")
    for count in (8, 64, 128):
        llm.generate([TEXT], greedy(count), use_tqdm=False)
        print(f"an answer of {count:3} tokens: the states take {states.num_bytes / 1e6:.1f} MB before and after")

# %% [markdown]
# ## The switch: snapshots
#
# One conversation of three turns, with snapshots every 32 tokens, every 256, and without prefix caching. The text is the same.

# %%
turns = [TEXT, TEXT * 2, TEXT * 3]
answers = {}
for name, fields in {
    "every 32": {"snapshot_interval": 32},
    "every 256": {"snapshot_interval": 256},
    "none": {"enable_prefix_caching": False},
}.items():
    with LLM(milestone="m6", max_model_len=512, num_snapshots=32, **fields, **MODEL) as llm:
        answers[name] = [
            list(llm.generate([turn], greedy(12), use_tqdm=False)[0].outputs[0].token_ids) for turn in turns
        ]
        stats = llm.engine.scheduler.kv.stats
        print(f"{name:9}: {stats.tokens_hit:4} of {stats.tokens} tokens were found")
assert answers["every 32"] == answers["none"], "a snapshot changes no text"

# %% [markdown]
# A prompt is found up to the last snapshot before its first new token. So a short interval finds more, takes more memory, and cuts prompts into more steps.
#
# ## See it: states beside blocks
#
# This recording of the engine has a snapshot every 16 tokens: a dark bar at the end of a block. It stops at a question; guess, then press *See what happens*.

# %%
from folovllm.apps.inspector import show
from folovllm.apps.inspector.scenes import scenes

show(*scenes()["states"].files)

# %% [markdown]
# A request takes another block every 8 tokens. Its state stays in one slot, which never grows: that of its row. From step 31 on D needs blocks and snapshots. At first snapshots make room for new ones and their blocks stay; in step 33 a block is evicted, and its snapshot goes with it.
#
# ## Compare
#
# | | this engine | vLLM |
# |---|---|---|
# | where states are | a table by row | pages of the pool, made as large as a state |
# | chunked form | one kernel, chunks of 32 | several kernels, chunks of 64 |
# | prefix caching | snapshots at an interval, a pool of their own | states at the ends of steps on block borders, in the pool |
# | speculation | refused | states of all drafted tokens are kept until the verification |
#
# ## Break it
#
# **A hit that is not cut.** All cached blocks are adopted, and the state is that of an earlier token. Attention sees tokens that the state does not know.


# %%
def keeps_all(self, blocks):
    found = longest(self, blocks)
    return (blocks, found[1]) if found[1] is not None else found


def scored(llm, texts):
    """The answer to the last of the texts, and the log-probability of each of its tokens."""
    for text in texts:
        (output,) = llm.generate(
            [text], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1), use_tqdm=False
        )
    answer = output.outputs[0]
    return list(answer.token_ids), torch.tensor(
        [entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)]
    )


def compare(name, broken, right):
    """Say whether the text is another, and how far the first token's log-probability is off."""
    off = float((broken[1] - right[1])[0].abs())
    print(
        f"{name}: {'the same' if broken[0] == right[0] else 'another'} text, and the first token's log-probability is off by {off:.4f}; no error says so"
    )
    return off


SNAPSHOTS = {"snapshot_interval": 48, "block_size": 16, "num_snapshots": 32, "max_model_len": 512, "milestone": "m6"}
longest = SnapshotCache.longest_prefix
with LLM(**SNAPSHOTS, **MODEL) as llm:
    right = scored(llm, turns[1:])
with patch.object(SnapshotCache, "longest_prefix", keeps_all), LLM(**SNAPSHOTS, **MODEL) as llm:
    broken = scored(llm, turns[1:])
assert compare("a hit that is not cut", broken, right) > 1e-5

# %% [markdown]
# **A slot that is not begun anew.** The state of the sequence before is left in the slot, as if nobody looked whether a sequence begins.

# %%
from folovllm.electives.hybrid import gated_delta_net

OTHER = "Tom and his dog ran to the park. It was a hot day, so they sat under a big tree. "
with LLM(milestone="m3", max_model_len=512, **MODEL) as llm:
    right = scored(llm, [OTHER, TEXT])
with (
    patch.object(gated_delta_net, "lacks_initial_state", lambda batch: torch.zeros(batch.num_seqs, dtype=torch.bool)),
    LLM(milestone="m3", max_model_len=512, **MODEL) as llm,
):
    stale = scored(llm, [OTHER, TEXT])
assert compare("a state of another story", stale, right) > 1e-5

# %% [markdown]
# **The wrong one goes.** A system prompt that every third request uses, among long prompts that nobody asks for again, and a pool of 12 snapshots. Least recently used against two other rules.


# %%
def requests_found(rule):
    cache, found = SnapshotCache(12), 0
    with patch.object(snapshots, "snapshot_to_evict", rule):
        for request in range(60):
            cache.clock += 1
            if request % 3 == 0:
                block = snapshots.Block(0, serial=1)
                found += cache.longest_prefix([block])[1] is not None
                if 1 not in cache._by_serial:
                    cache.cache_snapshot(cache.allocate(), 512, 1)
            else:
                for i in range(5):
                    cache.cache_snapshot(cache.allocate(), 512 * (i + 1), 1000 * (request + 1) + i)
    return found


print(f"least recently used:    {requests_found(snapshot_to_evict)} of 20 requests found the system prompt")
print(f"most recently used out: {requests_found(lambda kept: max(kept, key=lambda s: s.last_used))} of 20")
print(f"shortest out:           {requests_found(lambda kept: min(kept, key=lambda s: s.num_tokens))} of 20")

# %% [markdown]
# ## Where you are
#
# ```
# pytest -m x5 --mine
# folovllm generate "..." --model stories-hybrid
# ```
