# %% [markdown]
# # M3: a paged KV cache
#
# M2 gave every sequence a block as long as the longest text there may be. Here the memory is cut into short blocks, and a sequence holds
# just those that its tokens fill. Three small things make it work: a table per sequence, a free list, and a rule for the day on which
# no block is left.
#
# The [chapter](../docs/3_paged_kv.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("m3")

# %%
import inspect
import json
import warnings
from collections import Counter
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import numpy as np
import torch

from folovllm import LLM, SamplingParams
from folovllm.apps.bench.memory import measure
from folovllm.apps.bench.workload import mixed_workload
from folovllm.apps.cli.show import draw_pool
from folovllm.apps.inspector.watcher import Watcher
from milestones import pictures
from milestones.running_example import example, play

MODEL = "stories-5m"  # comes with the package
CONTEXT = 256  # the longest text that the engines here serve
WHOLE = 4  # blocks as long as the context: M2's share of the memory; M3 gets the same bytes

torch.set_num_threads(1)  # so that two runs of this notebook can be compared
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
PALETTE = plt.get_cmap("tab20")


def load(milestone="m3", **options):
    options = {"max_model_len": CONTEXT, "device": "cpu", "use_tqdm": False} | options
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
# 1. The memory holds four texts of 256 tokens. Requests are of mixed lengths, most of them short. How many run at once if the memory
#    comes in blocks of 16 tokens?
# 2. What share of the memory that sequences hold is empty, with M2's long blocks and with short ones of 16 tokens? And with blocks of 64?
# 3. Blocks of one token waste nothing. Why does no engine use them?
# 4. A sequence of 100 tokens is thrown out for lack of memory and comes back later. How many steps does it take to be where it was?
#    And does its text change?
# 5. A, B and C in ten blocks of 4 tokens: A holds 10 tokens and B 12 when C comes with 9. Does C fit? And one step later? And two?

# %% [markdown]
# ## A, B and C in short blocks
#
# The same memory as in M2, 40 slots, in ten blocks of 4. C need not wait for a long block any more; but in step 4 there is no block left.

# %%
long, short = play("m2"), play("m3")
assert long.answers == short.answers == {request.name: request.answer_token_ids for request in example().requests}
pictures.lanes(("two long blocks (M2)", long), ("ten short blocks (M3)", short))

# %% [markdown]
# From the tokens to the memory, in step 2: the positions of each request in groups of four, the block under each group, the slots of the new
# tokens, and the ten blocks before and after.

# %%
pictures.step(short, 2)

# %% [markdown]
# Step 4: A needs a block for its token 12. C came last, so C gives its three blocks back. One of them goes to A; the others keep C's old
# numbers until they are taken.

# %%
assert short.turns[4].preempted == {"C": "A"} and short.turns[4].after.tables["A"][-1] == 9
pictures.step(short, 4)

# %% [markdown]
# Step 7: B is done, and C comes back. One step computes its 11 tokens again, nine of the prompt and two of the answer.

# %%
assert [scheduled.end - scheduled.start for scheduled in short.turns[7].scheduled_seqs] == [1, 11]
pictures.step(short, 7)

# %% [markdown]
# How much more memory would have spared C the way out? The engine can be asked:

# %%
for blocks in range(8, 14):
    tried = play("m3", num_kv_blocks=blocks)
    print(f"{blocks} blocks: {len(tried.turns)} steps, {sum(len(turn.preempted) for turn in tried.turns)} preemptions, C's first token in step",
          next(turn.number for turn in tried.turns if "C" in turn.drawn))
    assert tried.answers == short.answers

# %% [markdown]
# From 11 blocks on the three need 10 steps, as many as A alone: more memory would bring nothing. With nine there is no preemption either,
# because C does not get in at all. Overbooking, and now and then a preemption, is the better use of the same memory.
#
# ## Feel the problem
#
# Three are a toy; here are fourteen. M2, four blocks, fourteen requests. The picture is the memory itself after some steps: a line is a block, and each of its 256 slots can
# keep one token. A colour is a token of a request, grey is a slot that is reserved and empty.

# %%
rng = np.random.default_rng(0)
REQUESTS = [(rng.integers(300, 1000, int(p)).tolist(), int(a)) for p, a in zip(rng.integers(4, 60, 14), rng.integers(8, 90, 14))]


def watch(engine):
    """Who holds which block, kept up to date by what the engine tells after each step."""
    engine.subscribe(watcher := Watcher())
    return watcher


def contents(watcher):
    """The memory, a number a slot: who has a token there, -1 reserved and empty, -2 free; [N * B]."""
    picture = np.full((len(watcher.cells), watcher.block_size), -2)
    for block_id, holders in enumerate(watcher.holders()):
        for seq, tokens in holders:
            picture[block_id] = -1
            picture[block_id, :tokens] = int(seq.request_id)
    return picture.ravel()


def paint(picture):
    colours = {-2: (1.0, 1.0, 1.0), -1: (0.82, 0.82, 0.82)}
    return np.array([[colours.get(i) or PALETTE(i % 20)[:3] for i in row] for row in picture.tolist()])


def snapshot(llm, step=20):
    seen, watcher = [], watch(llm.engine)
    serve(llm.engine, REQUESTS, lambda: seen.append((contents(watcher), llm.engine.stats())))
    picture, stats = seen[step]
    return picture.reshape(WHOLE, CONTEXT), stats, len(seen)


before, m2_stats, m2_steps = snapshot(load("m2", num_kv_blocks=WHOLE))
figure, axes = plt.subplots(figsize=(11, 1.5))
axes.imshow(paint(before), aspect="auto", interpolation="nearest")
axes.set(yticks=range(WHOLE), yticklabels=[f"block {i}" for i in range(WHOLE)], xlabel="slot of the block")
axes.set_title(f"M2 after 21 steps: {m2_stats.running} run, {m2_stats.waiting} wait, {m2_stats.kv_waste:.0%} of what is reserved is empty")
plt.show()
assert m2_stats.running == WHOLE and m2_stats.kv_waste > 0.5

# %% [markdown]
# Ten requests wait for memory while most of the memory holds nothing. It cannot be lent out: a sequence's memory must be in one piece, because the
# K/V of position p is in slot `block * 256 + p`, and the engine does not know yet how long a text will get.
#
# ## The mini: short blocks in one cell
#
# (It has the ideas of m3.1 to m3.3 in it. To find them yourself, read on from "Your turn" and come back.)
#
# The remedy is as old as virtual memory, whose blocks are called *pages*: look the place up. Below is what changes in M2's mini:
# a pool of blocks in the place of its slots. A
# table per sequence says where its blocks lie; a sequence takes a block when it needs one; if there is none, the last to arrive gives
# back all of its blocks and starts over with the text it has. No import of the engine, and the same tokens as the preset. (To write it
# yourself: `python -m milestones build mini`, stage 3.)

# %%
from milestones.mini import harness

adapters = harness.load(harness.REFERENCE)  # M1's model, and M2's engine over slots, to import from

# %%
# milestones/mini/reference/blocks.py
"""Stage 3: short blocks. A table says where a sequence's tokens lie, and who came last gives way when memory is full."""

import torch
from engine import Engine, Piece, Slots
from model import causal_attention
from serial import Request
from torch import Tensor


class Blocks(Slots):
    """Which blocks a sequence has: as many as its tokens need, taken when it needs them."""

    def allocate(self, request: Request, end: int) -> bool:
        table = self.tables.get(request.id, [])
        missing = -(-end // self.limits.block_size) - len(table)
        if missing > len(self.free):
            return False
        self.tables[request.id] = table + [self.take() for _ in range(missing)]
        return True

    def take(self) -> int:
        """A block for new contents."""
        return self.free.pop(0)


class PagedEngine(Engine):
    """Knows its K/V by block tables, and preempts."""

    memory_type = Blocks

    def make_room(self, request: Request, end: int) -> bool:
        """Whether it has room now. Until it has, the last to arrive gives way, in the end the sequence itself."""
        while not self.memory.allocate(request, end):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, victim: Request) -> None:
        """Take its blocks. It waits in front, with its tokens, and computes them all again."""
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        self.memory.release(victim)
        self.preempted.append(victim.id)
        victim.computed = 0

    def store(self, layer: int, piece: Piece, kv: Tensor) -> None:
        positions, size = torch.arange(piece.start, piece.start + kv.shape[1]), self.limits.block_size
        block = torch.tensor(piece.table)[positions // size]
        self.cache[layer, :, block, positions % size] = kv  # the one line that translates positions

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, table: list[int], start: int) -> Tensor:
        end = start + len(query)
        key, value = (cache[table].flatten(0, 1)[:end] for cache in (keys, values))  # a copy, in order
        return causal_attention(query, key, value, start)

# %%
from contract import Limits

STORIES = ["Once upon a time, there was a", "One day, a little", "The dog", "In the morning the sun came up and"]
llm = load(block_size=8, num_kv_blocks=32)
stories = [(llm.tokenizer.encode(text), 40) for text in STORIES]
limits = Limits(num_blocks=16, block_size=8, max_seqs=4, max_tokens=512)
mini_tokens, steps = harness.serve(PagedEngine(llm.engine.setup.path, limits), stories)
preemptions = sum(len(step.preempted) for step in steps)
preset_tokens = serve(llm.engine, stories)
assert mini_tokens == preset_tokens and preemptions > 0
lines = sum(1 for line in In[-2].splitlines() if line.strip())  # the cell above
assert lines <= 80
print(f"{lines} lines; {sum(map(len, mini_tokens))} tokens in 16 blocks of 8, {preemptions} preemptions, all tokens equal")

# %% [markdown]
# ## Your turn
#
# The engine does the same with six functions that are yours to write. In a terminal:
#
# ```
# python -m milestones start m3        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint m3.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
from folovllm.attention.backends import torch_paged
from folovllm.cache.block_manager import BlockManager
from folovllm.engine import scheduler

EXERCISES = {
    "m3.1": BlockManager.slots,
    "m3.2": BlockManager.allocate,
    "m3.3": BlockManager.may_append,
    "m3.4": BlockManager.deallocate,
    "m3.5": torch_paged.gather_blocks,
    "m3.6": scheduler.preempt,
}
for id, f in EXERCISES.items():
    print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
f = BlockManager.deallocate
print(f"def {f.__name__}{inspect.signature(f)}:\n")
print(inspect.getdoc(f))

# %% [markdown]
# **A stretch.** `gather_blocks` copies a sequence's whole cache in every layer of every step. It need not: attention can be folded block by
# block with three running numbers per query, the largest score so far $m$, the sum of weights $l$ and the weighted sum of values $a$.
# With the scores $s$ and the values $v$ of the next block,
#
# $$m' = \max(m, \max s), \quad l' = l\,e^{m-m'} + \sum e^{s-m'}, \quad a' = a\,e^{m-m'} + \sum e^{s-m'} v, \qquad \text{out} = a / l$$
#
# Write it as `mine(query, kv_cache, block_table, seq_len, scale)` for one sequence and hand it to `check`. M4 does this on the GPU, a
# tile at a time.

# %%
def check(mine):
    """Compare with gathering first, on scattered blocks with NaN in the unused slots."""
    torch.manual_seed(0)
    kv_cache, table = torch.randn(2, 9, 16, 2, 32), torch.tensor([7, 2, 5])
    kv_cache[:, 5, 6:] = torch.nan  # 38 tokens: the last block is not full
    query = torch.randn(1, 4, 32)  # one new token, Hq = 4
    expected = torch_paged.attend(query, *torch_paged.gather_blocks(kv_cache, table, 38), scale=32**-0.5)
    torch.testing.assert_close(mine(query, kv_cache, table, 38, 32**-0.5), expected)
    print("equal")


check(lambda query, kv_cache, table, n, scale: torch_paged.attend(query, *torch_paged.gather_blocks(kv_cache, table, n), scale))

# %% [markdown]
# ## See it: the same bytes in short blocks
#
# The requests of before, in the same memory, after the same number of steps. A row is now just a line break; white is free.

# %%
paged = load(num_kv_blocks=WHOLE * CONTEXT // 16, block_size=16)
after, m3_stats, m3_steps = snapshot(paged)
figure, axes = plt.subplots(figsize=(11, 1.5))
axes.imshow(paint(after), aspect="auto", interpolation="nearest")
axes.set(yticks=[], xticks=range(0, CONTEXT + 1, 16), xlabel="slots, a tick a block")
axes.set_title(f"M3 after 21 steps: {m3_stats.running} run, {m3_stats.waiting} wait, {m3_stats.kv_waste:.0%} of what is reserved is empty")
plt.show()
print(f"all done after {m3_steps} steps; M2 took {m2_steps}")
assert m3_stats.kv_bytes_total == m2_stats.kv_bytes_total
assert m3_stats.running > 2 * m2_stats.running and m3_stats.kv_waste < m2_stats.kv_waste / 2 and m3_steps < m2_steps

# %% [markdown]
# `folovllm generate ... --show-steps` draws the same in the terminal, a character a block: a capital is a full block, a small letter one
# that is being filled. Here are the first eight of these requests, served alone.

# %%
steps_before, watcher = paged.engine.stats().steps, watch(paged.engine)


def print_pool():
    step = paged.engine.stats().steps - steps_before
    if step % 15 == 0:
        print(f"after step {step}\n{draw_pool(watcher).plain}\n")


serve(paged.engine, REQUESTS[:8], print_pool)
assert paged.engine.stats().kv_blocks_used == 0

# %% [markdown]
# ## See it: a preemption as it happens
#
# Now the memory is really short: 16 blocks of 8 tokens, six requests that want up to ten blocks each. Left: who holds which block, step by
# step. Right: which tokens each request computes; a red bar is a sequence that comes back and computes all it had in one step.

# %%
tight = load(block_size=8, num_kv_blocks=16, max_model_len=80)
hungry = [(prompt[:12], 45) for prompt, _ in REQUESTS[:6]]
tight.engine.history, owners, holding = [], [], watch(tight.engine)


def look():
    row = np.full(16, -2)
    for block_id, holders in enumerate(holding.holders()):
        for seq, _ in holders:
            row[block_id] = int(seq.request_id)
    owners.append(row)


short_of_memory = serve(tight.engine, hungry, look)
history = tight.engine.history
figure, (left, right) = plt.subplots(1, 2, figsize=(13, 3.4))
left.imshow(paint(np.array(owners).T), aspect="auto", interpolation="nearest")
for step in history:
    if step.preempted:
        left.axvline(step.index, color="black", lw=0.7, ls=":")
left.set(xlabel="step", ylabel="block", title="who holds which block (dotted: a preemption)")
resumed = Counter()
for step in history:
    for request, _, start, n in step.scheduled_seqs:
        again = start == 0 and n > len(hungry[int(request)][0])
        resumed[request] += again
        right.bar(step.index, 0.8, bottom=int(request) - 0.4, width=1, color="tab:red" if again else PALETTE(int(request)))
        if again:
            right.text(step.index + 1, int(request) - 0.5, f"{n} tokens", fontsize=8)
right.set(xlabel="step", ylabel="request", ylim=(5.6, -0.8), title="who takes part (red: computes everything again)")
figure.tight_layout()
plt.show()
recomputed = sum(n for step in history for _, _, start, n in step.scheduled_seqs) - sum(len(p) + a - 1 for p, a in hungry)
print(f"{tight.engine.stats().preemptions} preemptions, {recomputed} tokens computed again")
assert tight.engine.stats().preemptions == sum(resumed.values()) > 2
assert short_of_memory == serve(paged.engine, hungry), "with memory for all: the same text"

# %% [markdown]
# And as a film. ✕ goes to the next preemption: the page says who gave way to whom, and how many tokens are lost. Click on a request for its block table, on a
# block for what it holds.

# %%
from folovllm.apps.inspector import film, show

with film(tight, "Sixteen blocks for six requests") as run:
    serve(tight.engine, hungry)
show(run, height=480)

# %% [markdown]
# The first to arrive never gives way, and no request gives way to one that came later. Those that do wait with their tokens, not with their cache; when there is room again, one step
# computes all of them together, like a prompt. That is cheap: a step of 50 tokens costs far less than 50 steps (M1's roofline).
#
# ## Measure: long blocks against short ones, and how long a block should be
#
# The same bytes, the same requests, all there at the start.

# %%
requests = mixed_workload(24, seed=1, prompts=(4, 64), answers=(8, 128))
options = {"model": MODEL, "slots": WHOLE, "max_model_len": CONTEXT, "device": "cpu"}
results = [measure("m2", requests, **options)]
results += [measure("m3", requests, block_size=size, **options) for size in (1, 16, 64, 256)]
print("        block   in flight   waste   steps   preempted   tokens/s")
for r in results:
    print(f"{r.milestone:>5} {r.block_size:7} {r.mean_running:11.1f} {r.mean_waste:7.1%} {r.steps:7} {r.preemptions:11} {r.tokens_per_second:10.0f}")

figure, panels = plt.subplots(1, 3, figsize=(12, 2.8))
sizes = [str(r.block_size) for r in results[1:]]
columns = {"sequences in flight": "mean_running", "waste": "mean_waste", "steps": "steps"}  # counts: no clock, no noise
for panel, (title, field) in zip(panels, columns.items(), strict=True):
    panel.bar(sizes, [getattr(r, field) for r in results[1:]], color="tab:blue")
    panel.axhline(getattr(results[0], field), color="tab:red", lw=1.5, label="M2's blocks")
    panel.set(title=title, xlabel="tokens a block")
panels[0].legend(frameon=False)
figure.tight_layout()
plt.show()
m2, one, sixteen, _, whole = results
assert {r.kv_bytes for r in results} == {m2.kv_bytes}
assert sixteen.mean_running > 2 * m2.mean_running and sixteen.mean_waste < 0.25 < 0.5 < m2.mean_waste
assert one.mean_waste == 0
assert (whole.steps, whole.mean_waste, whole.mean_running) == (m2.steps, m2.mean_waste, m2.mean_running)

# %% [markdown]
# The last bar is the joke of this milestone: with blocks as long as the context, M3 *is* M2, step for step and byte for byte. Going left,
# the waste falls to at most B - 1 slots per sequence. Beyond 16 or so there is nothing more to gain, and something to lose: the tables get
# long, and a kernel (M4) wants many neighbouring tokens in one read. Blocks of one token waste nothing and cost a table entry each.
#
# The bars show counts, which are the same on every machine. The tokens a second in the table come from a clock, and on a busy machine they
# vary from run to run. What they should follow is the number of steps: a step with twice as many sequences takes little longer, because they
# share the pass over the weights, and here the Python around it. On a CPU this has a limit, because attention is a loop over sequences.
#
# ## Compare
#
# | | this milestone | nano-vLLM | vLLM |
# |---|---|---|---|
# | tokens a block | any; 16 unless the backend wants more | 256 | 16 on most GPUs |
# | free blocks | linked list through the blocks | `deque` | linked list through the blocks |
# | a new block when | the table is too short for the tokens of the step | `len(seq) % block_size == 1` | the table is too short for the tokens of the step |
# | no block left | last to arrive recomputes | last in the running list recomputes | last in the running list (or least priority) recomputes |
# | admission holds back | 1% of the blocks | nothing | nothing; once, 1% |
# | attention | copies blocks, then PyTorch's kernel | FlashAttention on the table | several kernels on the table |
#
# ## Break it
#
# Four mistakes, each a line. Which of them crash, which change the text, and which do nothing until later?

# %%
def contiguous(block_table, block_size, start, end):
    return np.arange(block_table[0] * block_size + start, block_table[0] * block_size + end)


def whole_blocks(kv_cache, block_table, seq_len):
    key, value = kv_cache[:, block_table[: -(-seq_len // kv_cache.shape[2])]].flatten(1, 2)
    return key, value


def first_gives_way(chosen, candidates):
    return scheduler_preempt(chosen, [min(candidates, key=chosen.rank)])


def leaking(self, seq):
    for block_id in seq.block_table[1:]:
        self.blocks[block_id].ref_count -= 1
        self._free.append(self.blocks[block_id])
    seq.block_table.clear()


scheduler_preempt = scheduler.preempt
from folovllm.engine import build_batch

breaks = {
    "as it is": None,
    "blocks taken for neighbours": patch.object(BlockManager, "slots", staticmethod(contiguous)),
    "the last block read to its end": patch.object(torch_paged, "gather_blocks", whole_blocks),
    "the first gives way": patch.object(build_batch, "preempt", first_gives_way),
    "one block never comes back": patch.object(BlockManager, "deallocate", leaking),
}
said = {}
for name, broken in breaks.items():
    if broken:
        broken.start()
    try:
        fresh = load(block_size=8, num_kv_blocks=16, max_model_len=80)
        tokens = serve(fresh.engine, hungry) if name != "one block never comes back" else None
        if tokens is None:  # an endless wait would be the end: count what is left after three short requests
            serve(fresh.engine, [(prompt, 2) for prompt, _ in hungry[:3]])
            said[name] = f"{fresh.engine.stats().kv_blocks_used} of 16 blocks in use, and no request runs"
        else:
            right_answers = sum(a == b for a, b in zip(tokens, short_of_memory, strict=True))
            stats = fresh.engine.stats()
            said[name] = f"{right_answers} of {len(hungry)} answers right, {stats.steps} steps, {stats.preemptions} preemptions"
    except (RuntimeError, IndexError) as error:
        said[name] = f"{type(error).__name__}: {error}"
    finally:
        if broken:
            broken.stop()
    print(f"{name:30} {said[name]}")
assert said["as it is"].startswith("6 of 6")
assert not said["blocks taken for neighbours"].startswith("6 of 6")
assert said["one block never comes back"].startswith("3 of 16")
assert serve(load(block_size=8, num_kv_blocks=16, max_model_len=80).engine, hungry) == short_of_memory, "nothing stayed broken"

# %% [markdown]
# With A, B and C one sees why "blocks taken for neighbours" goes wrong (15 blocks, so that C stays). A's token 12
# belongs into A's fourth block, block 10. It lands in slot 12, on top of B's first word, and A reads a block that nothing was written into:

# %%
with patch.object(BlockManager, "slots", staticmethod(contiguous)):
    neighbours = play("m3", num_kv_blocks=15)
for request in example().requests:
    print(request.name, repr(request.answer), "->", repr(llm.tokenizer.decode(neighbours.answers[request.name])))
assert neighbours.answers["A"] != short.answers["A"] and neighbours.turns[4].after.memory[12] == ("A", 12)
pictures.step(neighbours, 4)

# %% [markdown]
# A leak is the nastiest: every answer is right, until one day nothing is admitted any more. Hence the tests that play random requests
# and count the blocks at the end.
#
# ## What the next milestone is for
#
# Where does a step spend its time now? Gathering: each layer copies the K/V of all running sequences together before it can attend. What a
# step adds to the cache is the same at any length; what it copies grows with every token.

# %%
import time

gather, moved = torch_paged.gather_blocks, Counter()


def watched(*args):
    began = time.perf_counter()
    key, value = gather(*args)
    moved["seconds"] += time.perf_counter() - began
    moved["bytes"] += key.nbytes + value.nbytes
    return key, value


def decodes(context, sequences=6, steps=10):
    """(share of the time that goes into copying, bytes copied a step, bytes of new K/V a step) while all decode."""
    engine = load(max_model_len=context + 32, num_kv_blocks=sequences * (context // 16 + 3) + 16).engine
    for i in range(sequences):
        engine.add_request(str(i), rng.integers(300, 1000, context).tolist(), greedy(steps + sequences), stream=False)
    while engine.stats().waiting:  # the last prompt is computed in the step that lets it in
        engine.step()
    moved.clear()
    engine.history = []
    with patch.object(torch_paged, "gather_blocks", watched):
        for _ in range(steps):
            engine.step()
    assert all(step.num_tokens == sequences for step in engine.history)
    total = sum(step.seconds for step in engine.history)
    return moved["seconds"] / total, moved["bytes"] / steps, sequences * engine.setup.kv_bytes_per_token


print("context   time for copying   copied a step   new K/V a step")
for context in (64, 512, 2048):
    scheduled, copied, new = decodes(context)
    print(f"{context:7,} {scheduled:18.0%} {copied / 1e6:12.1f} MB {new / 1e3:13.1f} KB")
assert copied > 1000 * new

# %% [markdown]
# At 64 tokens one could live with it. At 2,048 every token of an answer pays for a copy of all that was said before, almost two thousand times what it adds
# itself, and every byte of the copy is read once more right after. A kernel that follows the table itself, and folds block after block into a
# running softmax, copies nothing: that is [M4](../notebooks/m4_kernels.ipynb).

# %% [markdown]
# ## Beside the exercises: build a block manager with data structures of your own
#
# `python -m milestones build m3` gives you an empty file, the protocol and the tests; the structure is yours, and no exercise needs it. The score
# serves a checked-in trace in virtual time, with little memory. Once yours is begun, it has a row too.

# %%
from IPython.display import Markdown

from milestones.builders import own_scores

Markdown(own_scores("m3"))
