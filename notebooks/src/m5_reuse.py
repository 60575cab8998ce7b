# %% [markdown]
# # M5: reuse
#
# M3 gave a block back as soon as its sequence ended, and forgot what was in it. Yet the next turn of a conversation begins with all that was
# said before, and a thousand users share one system prompt. Here a block keeps its contents and a *name* until another request needs it,
# and a request that begins with the same words finds it. A second idea belongs to it: a long prompt that does have to be computed comes in
# chunks, so that no other request has to stop.
#
# The [chapter](../docs/5_reuse.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("m5")

# %%
import inspect
import json
import time
import warnings
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import numpy as np
import torch

from folovllm import LLM, SamplingParams
from folovllm.apps.bench.reuse import bench_sharing, time_to_first_token, watch_gaps
from milestones.pictures import lanes, step
from milestones.running_example import play

MODEL = "stories-5m"  # comes with the package

CLOCK = time.process_time  # seconds that this process ran: with one thread, what the wall's clock shows on an idle machine

torch.set_num_threads(1)  # so that two runs of this notebook can be compared
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})


def load(milestone="m5", **options):
    options = {"max_model_len": 256, "device": "cpu", "use_tqdm": False} | options
    return LLM(MODEL, milestone=milestone, **options)


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def serve(engine, requests, look=lambda: None):
    """Submit (prompt, max_tokens) pairs at once, step until all are done, look after each step; the answers' token ids."""
    for i, (prompt, count) in enumerate(requests):
        engine.add_request(str(i), prompt, greedy(count), stream=False)
    answers = {}
    while engine.has_unfinished_requests():
        answers |= {int(out.request_id): out.outputs[0].token_ids for out in engine.step()}
        look()
    return [answers[i] for i in range(len(requests))]


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. Two prompts share their first 1,600 tokens and differ in the last 32. How many times sooner does the second one's first token come?
# 2. Two stories have a paragraph in common, in the middle. How much of the second one's paragraph need not be computed?
# 3. What does it cost to look for prefixes if there are none to be found, in percent of the time?
# 4. A request is being answered when a prompt of 1,600 tokens arrives. How many times longer than usual does it wait for its next
#    token? And if the prompt comes in chunks of 128: how much later does the newcomer get its first token?
#
# <details><summary>Answers, roughly</summary>
#
# 1. Fifteen to twenty-five times: 32 tokens in place of 1,632, but they attend to all.
# 2. Nothing of it. K/V of a word are made from all words before it.
# 3. Well below one percent.
# 4. Fifty to a hundred times. In chunks of 128 the newcomer waits a little longer for its first token, and the other request ten times less.
#
# </details>
#
# ## A, B and C
#
# The three requests of the chapters, in M4 and in M5, with the same memory of ten blocks. `8+1`: 8 tokens found, 1 computed.

# %%
four, five = play("m4"), play("m5")
assert four.answers == five.answers
for run in (four, five):
    print(run.milestone, sum(scheduled.end - scheduled.start for turn in run.turns for scheduled in turn.scheduled_seqs), "tokens computed in", len(run.turns), "steps")
lanes(("Whole prompts, nothing kept (M4)", four), ("Chunks and prefixes (M5)", five))

# %% [markdown]
# B's prompt comes in two chunks. C begins like A, and so with A's blocks. When C comes back after its preemption, M4 computes 11 tokens again, M5 one.
# The step in which C finds A's blocks (a star: the block has a name):

# %%
step(five, 2)

# %% [markdown]
# ## Feel the problem
#
# A conversation with M4. Each turn sends all that was said so far, for that is all an engine ever gets. What does it compute?

# %%
TURNS = ["Tell me a story about a dog.", "What is the name of the boy?", "Tell me a story about a cat.", "Thank you!"]


def converse(llm):
    """The turns one after the other; for each, the tokens of its prompt and how many were computed for it."""
    messages, counts, engine = [], [], llm.engine
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        engine.history = []
        out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)[0]
        messages.append({"role": "assistant", "content": out["text"]})
        computed = sum(n for step in engine.history for *_, n in step.scheduled_seqs)
        counts.append((len(out.prompt_token_ids), computed - len(out["token_ids"]) + 1, out.num_cached_tokens))
    return messages, counts


m4 = load("m4", max_model_len=1024)
talk, m4_counts = converse(m4)
for turn, (prompt, computed, _) in zip(TURNS, m4_counts, strict=True):
    print(f"{turn:30} prompt {prompt:4} tokens, {computed:4} computed")
assert all(prompt == computed for prompt, computed, _ in m4_counts)

# %% [markdown]
# And a request that is being answered while a long prompt arrives. The engine computes a prompt in one step, and in that step no other
# request gets a token before all of it is done.

# %%
LONG = 1600
m4_long = load("m4", max_model_len=LONG + 64, max_num_batched_tokens=LONG + 64)
watch_gaps(m4_long.engine, 200, seed=0)  # warm up
gaps, ttft = watch_gaps(m4_long.engine, LONG, 1, CLOCK)
ticks = []
serve(m4_long.engine, [([5] * 8, 12)], lambda: ticks.append(CLOCK()))
usual = float(np.median(np.diff(ticks)))
print(f"usual gap between two tokens {usual * 1e3:.0f} ms; while the prompt came {max(gaps) * 1e3:.0f} ms, {max(gaps) / usual:.0f} times as long")
assert max(gaps) > 10 * usual

# %% [markdown]
# ## The mini: blocks with names
#
# (It has the ideas of m5.1 to m5.4 in it. To find them yourself, read on from "Your turn" and come back.)
#
# Below is M3's pool of blocks, with one thing more. A full block gets a name: the hash of *the name of the block before it* and
# of its own tokens. So equal names mean equal prefixes, not just equal blocks. A freed block keeps its name until it is taken for something
# else, and a newcomer begins with the blocks whose names it can compute. No import of the engine, and the same tokens as the preset. (To write it yourself:
# `python -m milestones build mini`, stage 5.)

# %%
from milestones.mini import harness

adapters = harness.load(harness.REFERENCE)  # M3's engine over blocks, with M4's attention, to import from

# %%
# milestones/mini/reference/prefix.py
"""Stage 5: what was computed once is found again, and a long prompt comes in chunks beside the others' next tokens."""

from collections.abc import Iterator

from attention import TiledEngine
from blocks import Blocks
from contract import Limits
from engine import Piece
from serial import Request

PENDING = -1  # stage 6: in the place of a token that is not read yet


class PrefixBlocks(Blocks):
    """Full blocks have names. A name stays when the block is freed, until the block is taken for something else.

    A name is the name of the block before and the block's own tokens. So equal names mean equal prefixes.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.holders = [0] * limits.num_blocks
        self.block_of, self.name_of = dict[int, int](), dict[int, int]()

    def names(self, tokens: list[int]) -> Iterator[int]:
        """The names of the full blocks of `tokens`."""
        name, size = 0, self.limits.block_size
        for end in range(size, len(tokens) + 1, size):
            name = hash((name, *tokens[end - size : end]))
            yield name

    def match(self, request: Request) -> int:
        """Begin its table with the blocks that are there. Return how many tokens these hold; one is left to compute."""
        table = self.tables[request.id] = []
        for name in self.names(request.tokens[:-1]):
            if (block := self.block_of.get(name)) is None:
                break
            if not self.holders[block]:
                self.free.remove(block)
            self.holders[block] += 1
            table.append(block)
        return len(table) * self.limits.block_size

    def publish(self, request: Request, end: int) -> None:
        """Name the full blocks of its first `end` tokens, all of which are computed. A name belongs to one block."""
        tokens = request.tokens[:end]
        known = tokens[: tokens.index(PENDING)] if PENDING in tokens else tokens
        for block, name in zip(self.tables[request.id], self.names(known), strict=False):
            if name not in self.block_of and block not in self.name_of:
                self.block_of[name], self.name_of[block] = block, name

    def take(self) -> int:
        block = self.free.pop(0)  # the one that was free for the longest time
        if block in self.name_of:
            del self.block_of[self.name_of.pop(block)]
        self.holders[block] = 1
        return block

    def release(self, request: Request) -> None:
        for block in reversed(
            self.tables.pop(request.id, [])
        ):  # so that the end of a prefix is taken before its beginning
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)


class ChunkedEngine(TiledEngine):
    """Begins with the blocks that it finds, and gives a step no more tokens than its budget."""

    memory_type = PrefixBlocks
    memory: PrefixBlocks

    def num_tokens(self, request: Request, budget: int) -> int:
        return min(len(request.tokens) - request.computed, budget)

    def admit(self, request: Request, budget: int) -> int:
        if not budget:
            return 0
        request.computed = self.memory.match(request)
        if n := super().admit(request, budget):
            return n
        self.memory.release(request)
        request.computed = 0
        return 0

    def advance(self, piece: Piece, token: int | None) -> None:
        request = next(request for request in self.running if request.id == piece.id)
        self.memory.publish(request, piece.start + len(piece.ids))
        super().advance(piece, token)

# %%
from contract import Limits

llm = load(block_size=4, num_kv_blocks=64)
BEGINNING = "Once upon a time, there was a girl named Lily. She had a red ball and a small dog. One day,"
ENDINGS = ["", " Lily saw a bird.", " Lily saw a bird. The dog", " the dog ran away. Lily was sad."]
stories = [(llm.tokenizer.encode(BEGINNING + ending), 24) for ending in ENDINGS]
limits = Limits(num_blocks=64, block_size=4, max_seqs=4, max_tokens=10)
mini_tokens, steps = harness.serve(ChunkedEngine(llm.engine.setup.path, limits), stories)
computed = sum(n for step in steps for _, _, n in step.work)
preset_tokens = serve(llm.engine, stories)
assert mini_tokens == preset_tokens
in_all = sum(len(ids) + count - 1 for ids, count in stories)
assert computed < in_all
lines = sum(1 for line in In[-2].splitlines() if line.strip())  # the cell above
assert lines <= 80, lines
print(f"{lines} lines; {in_all} tokens to compute, {computed} computed; all {sum(map(len, mini_tokens))} generated tokens equal")

# %% [markdown]
# The mini believes its 64-bit hash. The engine compares the tokens, too.
#
# ## Your turn
#
# Six functions, four exercises. In a terminal:
#
# ```
# python -m milestones start m5        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint m5.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
from folovllm.cache import prefix_cache
from folovllm.cache.prefix_cache import PrefixCache, PrefixCachingBlockManager
from folovllm.engine import scheduler

EXERCISES = {
    "m5.1": [prefix_cache.compute_hash, PrefixCache.longest_cached_prefix],
    "m5.3": [PrefixCache.cache_blocks],
    "m5.4": [PrefixCache.evict, PrefixCachingBlockManager.adopt],
    "m5.5": [scheduler.chunk],
}
for id, functions in EXERCISES.items():
    for f in functions:
        print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
f = PrefixCache.longest_cached_prefix
print(f"def {f.__name__}{inspect.signature(f)}:\n")
print(inspect.getdoc(f))

# %% [markdown]
# ## See it: the chain in a live pool
#
# Four stories that begin alike; one has been told already, three are being told. Each box is a block that has a name: its number, the
# number of sequences that hold it, its words. A line leads to the block that it follows. White boxes are held by no sequence: free to take, and
# still to be found. Below it, the free list, in the order in which its blocks will be forgotten.

# %%
tokenizer = llm.tokenizer


def chain(kv):
    """Named blocks as (block, depth, children); the roots, in order of their serials."""
    blocks = sorted(kv.prefix_cache._by_hash.values(), key=lambda block: block.serial)
    children = {block.serial: [] for block in blocks} | {prefix_cache.ROOT: []}
    for block in blocks:
        children.setdefault(block.parent, []).append(block)
    return children


def draw_chain(kv, title):
    children, spots, rows = chain(kv), {}, 0

    def place(parent, depth):
        nonlocal rows
        for i, block in enumerate(children.get(parent, [])):
            rows += i > 0
            spots[block.block_id] = depth, rows
            place(block.serial, depth + 1)

    place(prefix_cache.ROOT, 0)
    depth = max(x for x, _ in spots.values()) + 1
    figure, axes = plt.subplots(figsize=(max(9, 1.5 * depth), 0.8 * rows + 1.6))
    shades = plt.get_cmap("Blues")
    for siblings in children.values():
        for block in siblings:
            x, y = spots[block.block_id]
            words = tokenizer.decode(np.frombuffer(block.token_ids, np.int32).tolist())
            colour = shades(0.12 + 0.14 * block.ref_count) if block.ref_count else "white"
            text = f"block {block.block_id} · held {block.ref_count}x\n{words.strip()[:19]}"
            axes.text(x, -y, text, ha="center", va="center", fontsize=7.5, bbox={"boxstyle": "round", "fc": colour, "ec": "grey"})
            for child in children.get(block.serial, []):
                cx, cy = spots[child.block_id]
                axes.plot([x + 0.1, cx - 0.1], [-y, -cy], color="grey", lw=1, zorder=0)
    axes.set(xlim=(-0.6, depth - 0.4), ylim=(-rows - 0.6, 0.6), title=title)
    axes.axis("off")
    plt.show()
    free = [f"{block.block_id}" + ("*" if block.hash is not None else "") for block in kv._free]
    print("free list, next to be taken first (* has a name):", " ".join(free))


live = load(block_size=4, num_kv_blocks=32, max_model_len=96)
serve(live.engine, [(stories[3][0], 6)])  # told and gone
for i, (ids, _) in enumerate(stories[:3]):
    live.engine.add_request(str(i), ids, greedy(9))
for _ in range(7):
    live.engine.step()
pool = live.engine.scheduler.kv
draw_chain(pool, "named blocks after 7 steps: three sequences run, one is gone")
held = [pool.blocks[block].ref_count for seq in live.engine.scheduler.running for block in seq.block_table]
assert max(held) == 3 and any(b.ref_count == 0 for b in pool.prefix_cache._by_hash.values())

# %% [markdown]
# It is a tree, although no code builds one: each block knows the serial number of the block it follows, and that is all. The beginning is held
# three times and is stored once. The white chain is the story that has been told. Two stories go on with ", Lily saw a". They came into the
# same step, and still one of them computed this block and both hold it: it had its name before the step began. Where a text goes on
# differently, so does the chain, at the granularity of a block: the block in which two texts part is stored twice.
#
# And the conversation from above:

# %%
m5 = load(max_model_len=1024)
same_talk, m5_counts = converse(m5)
assert [m["content"] for m in same_talk] == [m["content"] for m in talk], "the cache changes no word"
figure, axes = plt.subplots(figsize=(8, 2.6))
for i, ((prompt, _, _), (_, mine, cached)) in enumerate(zip(m4_counts, m5_counts, strict=True)):
    axes.barh(i - 0.2, prompt, 0.36, color="tab:red", label="M4: computed" if i == 0 else None)
    axes.barh(i + 0.2, mine, 0.36, color="tab:blue", label="M5: computed" if i == 0 else None)
    axes.barh(i + 0.2, cached, 0.36, left=mine, color="white", edgecolor="tab:blue", label="M5: found" if i == 0 else None)
axes.set(yticks=range(len(TURNS)), yticklabels=TURNS, xlabel="tokens of the prompt")
axes.invert_yaxis()
axes.legend(frameon=False)
plt.show()
stats = m5.engine.prefix_cache_stats()
print(f"found {stats.tokens_hit} of {stats.tokens} tokens ({stats.hit_rate:.0%}), in {stats.requests_hit} of {stats.requests} requests")
assert sum(mine for _, mine, _ in m5_counts) < sum(prompt for prompt, *_ in m4_counts) / 2

# %% [markdown]
# Answers are found as well: what the engine generated in one turn is part of the prompt of the next.
#
# Now the paragraph in the middle: after another beginning, how much of it is found?

# %%
rng = np.random.default_rng(0)


def fresh(count):
    """Tokens that no request has had."""
    return rng.integers(3, 4000, count).tolist()


paragraph, found = fresh(64), []
for i, prompt in enumerate([paragraph + fresh(8), paragraph + fresh(8), fresh(16) + paragraph + fresh(8)]):
    m5.engine.add_request(f"middle {i}", prompt, greedy(1))
    [out] = m5.engine.step()
    found.append(out.num_cached_tokens)
print("the same 64 tokens, found:", dict(zip(["the first time", "at the beginning again", "in the middle"], found, strict=True)))
assert found == [0, 64, 0]

# %% [markdown]
# Nothing, although the words are the same and lie on block boundaries. The K/V of a word is made from all words before it, so in another
# story it is another K/V. The chain says just that.
#
# ## Measure: the first token, with and without a hit
#
# Prompts of 1,632 tokens, the first so many of which have been asked before.

# %%
reader = load(max_model_len=LONG + 64, max_num_batched_tokens=LONG + 64).engine
time_to_first_token(reader, fresh(200))
shared, ttfts = fresh(LONG), {}
time_to_first_token(reader, shared + fresh(32))
for known in (0, 400, 800, 1200, LONG):
    ttfts[known] = min(time_to_first_token(reader, shared[:known] + fresh(LONG + 32 - known), CLOCK) for _ in range(2))
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(list(ttfts), [1e3 * t for t in ttfts.values()], "o-", color="tab:blue")
axes.set(xlabel="tokens known before, of 1,632", ylabel="ms", title="time to first token", ylim=0)
plt.show()
print(f"nothing known: {1e3 * ttfts[0]:.0f} ms; all but the tail: {1e3 * ttfts[LONG]:.0f} ms; {ttfts[0] / ttfts[LONG]:.0f} times sooner")
assert ttfts[0] > 5 * ttfts[LONG]

# %% [markdown]
# ## Measure: sixteen requests, the cache off and on
#
# Eight requests with 192 tokens in common, and eight of the same lengths with nothing in common.

# %%
contender = ("m5", {"model": MODEL, "milestone": "m5", "device": "cpu", "use_tqdm": False})
off, on = bench_sharing(contender, prefix=192, count=8, output_len=6, repeats=2, clock=CLOCK).runs
for name in on.metrics:
    before = f"{off.metrics[name].median:8.1f}" if name in off.metrics else " " * 8
    print(f"{name:38} off {before}   on {on.metrics[name].median:8.2f} {on.metrics[name].unit}")
assert on.metrics["prefix shared"].median > off.metrics["prefix shared"].median

# %% [markdown]
# A cache that finds nothing costs next to nothing: a hash of 64 bytes per block, once per sequence, and a look into a dictionary.
#
# ## Measure: chunks against the longest gap
#
# The prompt of 1,600 tokens again, in one step or in chunks, while another request waits for tokens. `max_num_batched_tokens` is the size of a
# step: the running request takes one token of it, the prompt the rest.

# %%
curves = {}
for size in (LONG + 64, 512, 128, 32):
    engine = load(max_model_len=LONG + 64, max_num_batched_tokens=size, enable_prefix_caching=False).engine
    watch_gaps(engine, 100, seed=0)
    curves[size] = watch_gaps(engine, LONG, 1, CLOCK)
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3))
for size, (seen, _) in curves.items():
    left.step(np.cumsum([0, *seen]), range(len(seen) + 1), where="post", label="whole" if size > LONG else f"{size} a step")
left.set(xlabel="seconds after the long prompt arrives", ylabel="tokens", title="tokens of the running request", yscale="symlog")
left.legend(frameon=False)
names = ["whole", *map(str, list(curves)[1:])]
places = np.arange(len(names))
right.bar(places - 0.2, [1e3 * max(seen) for seen, _ in curves.values()], 0.4, label="longest gap", color="tab:red")
right.bar(places + 0.2, [1e3 * first for _, first in curves.values()], 0.4, label="TTFT of the long prompt", color="tab:blue")
right.set(xticks=places, xticklabels=names, ylabel="ms", yscale="log", xlabel="tokens a step")
right.legend(frameon=False, bbox_to_anchor=(1, 1))
figure.tight_layout()
plt.show()
for name, (seen, first) in zip(names, curves.values(), strict=True):
    print(f"{name:>6}: longest gap {1e3 * max(seen):6.0f} ms, {len(seen):3} tokens meanwhile; TTFT of the long prompt {1e3 * first:6.0f} ms")
assert max(curves[LONG + 64][0]) > 3 * max(curves[128][0])

# %% [markdown]
# The gap follows the chunk, as a step takes as long as the tokens in it. What do small chunks cost? Each reads the weights again, and the
# K/V of all chunks before it. Here that shows below a hundred tokens or so. On a GPU a chunk has to be large enough to be bound by arithmetic,
# some hundred tokens, and so the usual budgets are 512 to 8,192.
#
# ## Compare
#
# | | this milestone | nano-vLLM | vLLM | SGLang |
# |---|---|---|---|---|
# | known prefixes are in | a dictionary of block names | a dictionary of block names | a dictionary of block names | a radix tree of token ids |
# | a name is | xxh64(previous name, tokens) | the same | SHA-256 of the same, and more (images, adapters, salt) | none: a path |
# | tokens compared on a hit | yes, and the parent | the block's own | no | yes, they are the tree's edges |
# | granularity | a block, 16 tokens | a block, 256 | a block, 16 | a block, 1 token by default |
# | forgotten first | freed for the longest time, tail first | freed for the longest time, tail first | freed for the longest time, tail first | the leaf unused for the longest time |
# | the queue heeds the cache | no | no | no | yes: longest match first, if asked |
#
# The chapter compares the last two at length. In short: the tree is exact and finer, the dictionary is a few lines and its names mean
# something on other machines, too.
#
# ## Break it
#
# Six requests in a small pool, after four others: prefixes are shared, and blocks are forgotten all the time. The right answers come from
# an engine without a cache.

# %%
def texts(*numbers):
    """A first block of its own for each, then the same two blocks, then a block of its own."""
    words = tokenizer.encode(" She had a red ball and a small dog")[:8]
    return [([100 + n] * 4 + words + [200 + n] * 3, 12) for n in numbers]


waves = [texts(1, 2, 3, 4), texts(1, 5, 2, 1, 6, 3), texts(7, 3, 1)]
SMALL = {"block_size": 4, "num_kv_blocks": 30, "max_model_len": 64}


def play(engine):
    answers = []
    for wave in waves:
        for i, (prompt, count) in enumerate(wave):
            engine.add_request(str(i), prompt, greedy(count), stream=False)
        done = {}
        for _ in range(400):  # an engine that is stuck makes no progress, and no noise
            done |= {int(out.request_id): out.outputs[0].token_ids for out in engine.step()}
            if not engine.has_unfinished_requests():
                break
        answers += [done.get(i) for i in range(len(wave))]
        if engine.has_unfinished_requests():
            return answers, True
    return answers, False


right_answers, _ = play(load(enable_prefix_caching=False, **SMALL).engine)
total = len(right_answers)


def own_tokens_only(token_ids, prefix):
    return real_hash(token_ids, 0)


def trusting(self, seq):
    found = []
    for i in range((seq.num_tokens - 1) // self._block_size):
        if (block := self._by_hash.get(self._hash(seq, i))) is None:
            break
        found.append(block)
    return found


def to_the_last_token(self, seq):
    found = []
    for i in range(seq.num_tokens // self._block_size):
        if (block := self._by_hash.get(self._hash(seq, i))) is None:
            break
        found.append(block)
    return found


def found_and_free(self, block):
    block.ref_count += 1


def never_forgets(self, block):
    pass


real_hash = prefix_cache.compute_hash
hash_alone = patch.object(prefix_cache, "compute_hash", own_tokens_only)
trust = patch.object(PrefixCache, "longest_cached_prefix", trusting)
breaks = {
    "as it is": [],
    "names without the parent": [hash_alone],
    "hits believed, names right": [trust],
    "both": [hash_alone, trust],
    "found, and still free": [patch.object(PrefixCachingBlockManager, "adopt", found_and_free)],
    "taken, and not forgotten": [patch.object(PrefixCache, "evict", never_forgets)],
}
said = {}
for name, patches in breaks.items():
    for broken in patches:
        broken.start()
    try:
        engine = load(**SMALL).engine
        answers, stuck = play(engine)
        right = sum(a == b for a, b in zip(answers, right_answers, strict=False))
        found = engine.prefix_cache_stats().tokens_hit
        said[name] = f"{right:2} of {total} answers right, {found:3} tokens found" + (", and then it stands still" if stuck else "")
    except (RuntimeError, IndexError, AssertionError, KeyError, ValueError) as error:
        said[name] = f"{type(error).__name__}: {error}"
    finally:
        for broken in patches:
            broken.stop()
    print(f"{name:28} {said[name]}")

# %%
assert said["as it is"].startswith(f"{total} of {total}")
assert said["names without the parent"].startswith(f"{total} of {total}"), "the comparison on a hit saves the day"
assert not said["both"].startswith(f"{total} of {total}")
assert play(load(**SMALL).engine)[0] == right_answers, "nothing stayed broken"

# %% [markdown]
# Look at the second, third and fourth line. Each check alone is enough to give right answers here: with wrong names, hits are refused because the parent is
# another, and the cache merely finds less. With right names, belief does no harm until two hashes collide, once in many years. Without
# either, users read the continuation of another user's story. It is worth the two comparisons.
#
# One more: leave nothing to compute.

# %%
with patch.object(PrefixCache, "longest_cached_prefix", to_the_last_token):
    engine = load(**SMALL).engine
    prompt = texts(1)[0][0][:12]  # three full blocks
    serve(engine, [(prompt, 2)])
    engine.add_request("again", prompt, greedy(2))
    try:
        engine.step()
        raise AssertionError("there was nothing to run")
    except RuntimeError as error:
        print(f"{len(engine.scheduler.waiting)} request waits, none runs; the engine says: {error}")

# %% [markdown]
# All of the prompt is cached, so there is nothing to compute, so there are no logits, so there is no token. K/V are what a token leaves
# behind for others, not what it says itself.
#
# ## What the next milestone is for
#
# Where does a decode step spend its time now? Some of it is not the model's.

# %%
engine, marks = load().engine, []
model = engine.executor._worker.runner.model
model.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter()))
model.register_forward_hook(lambda *_: marks.append(time.perf_counter()))
serve(engine, [(fresh(8), 4)])
engine.history, marks[:] = [], []
serve(engine, [(fresh(8), 60) for _ in range(8)])
in_model = sum(b - a for a, b in zip(marks[::2], marks[1::2], strict=True))
total = sum(step.seconds for step in engine.history)
print(f"{in_model / total:.0%} of the time in the model's layers; the rest schedules, builds tensors, samples tokens, makes text")
assert 0 < in_model < total

# %% [markdown]
# On this CPU the model is slow, and the rest looks small. On a large GPU the layers of a small model take a millisecond or two, the rest
# takes as long as it does here, and the GPU waits for Python. To get Python out of the way is [M6](../notebooks/m6_speed_and_scale.ipynb).

# %% [markdown]
# ## Beside the exercises: build a prefix cache of another kind, for example a radix tree
#
# `python -m milestones build m5` gives you an empty file, the protocol and the tests; the structure is yours, and no exercise needs it. The score
# serves conversations in virtual time, with little memory. Once yours is begun, it has a row too.

# %%
from IPython.display import Markdown

from milestones.builders import own_scores

Markdown(own_scores("m5"))
