# %% [markdown]
# # M2: continuous batching
#
# M1 serves one request at a time. The weights of the model go through the processor once per token, and all they do there is help one
# user. Here they help all who wait: a *scheduler* decides before every step which requests take part in it.
#
# The [chapter](../docs/2_continuous_batching.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("m2")

# %%
import inspect
import json
import statistics
import time
import warnings
from collections import deque
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import transformers

from folovllm import LLM, SamplingParams
from milestones import pictures
from milestones.running_example import example, play

MODEL = "stories-5m"  # comes with the package
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # so that two runs of this notebook can be compared
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})


def load(milestone="m2", **options):
    return LLM(MODEL, milestone=milestone, device="cpu", use_tqdm=False, **options)


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


NAMES = ["Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Ana", "Leo", "Zoe", "Sam", "Amy", "Dan", "Eva", "Jim", "Kim", "Ned"]
STORY = "Once upon a time, there was a curious child named {}. One night, {} looked at the moon and saw a"
PROMPTS = [" ".join(STORY.format(name, name).split()[: 11 + 3 * (i % 4)]) for i, name in enumerate(NAMES)]
LENGTHS = [8, 48, 12, 36, 8, 16, 56, 10, 24, 8, 44, 14, 32, 8, 20, 24]  # tokens of each answer: few long, many short

# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. A step for 8 sequences instead of 1: how many times longer does it take on this machine?
# 2. Sixteen requests, answers of 8 to 56 tokens, four at a time. If each group of four must finish before the next begins, what share of
#    the four rows stands empty?
# 3. And if a row is filled again at once?
# 4. Each sequence gets room for the longest context there can be. What share of that room holds a token, on average?
# 5. Chapter 1 left A, B and C in a queue: 23 steps, and C's first token in step 16. With room for two, when does C get its first token?

# %% [markdown]
# ## A, B and C share a step
#
# The three requests of chapter 1, with a cache of two blocks of 20 tokens. Above, C must wait until the group of A and B is done; below, C
# takes B's place. Both pictures are drawn from what the engine did.

# %%
static_run, continuous_run = play("m2", static=True), play("m2")
assert static_run.answers == continuous_run.answers == {request.name: request.answer_token_ids for request in example().requests}
pictures.lanes(("static batching", static_run), ("continuous batching", continuous_run))

# %% [markdown]
# Step 7, as C comes in: the tokens that are computed, the block of each request, the slots of the new tokens, and the memory before and
# after. B's numbers are still there when C overwrites them, slot by slot.

# %%
assert continuous_run.turns[6].finished == ("B",) and continuous_run.turns[7].scheduled_seqs[1].name == "C"
pictures.step(continuous_run, 7)

# %% [markdown]
# Why did B wait in step 0, and C in step 2? The engine says which budget refused them:

# %%
for turn in continuous_run.turns[:4]:
    print(f"step {turn.number}: {[f'{scheduled.name} {scheduled.end - scheduled.start}' for scheduled in turn.scheduled_seqs]}, refused: {turn.refused}")
assert continuous_run.turns[0].refused == {"B": "tokens"} and continuous_run.turns[2].refused == {"C": "blocks"}

# %% [markdown]
# ## Feel the problem
#
# Three are a toy. Sixteen users press Enter in the same second. M1 takes them one after the other:

# %%
def serve(llm, static_groups_of=None):
    """All requests; returns (outputs in order, seconds, steps). Static batching: a group begins when the last one has ended."""
    engine, finished = llm.engine, {}
    engine.history = []
    began = time.perf_counter()
    size = static_groups_of or len(PROMPTS)
    for first in range(0, len(PROMPTS), size):
        for i in range(first, min(first + size, len(PROMPTS))):
            engine.add_request(str(i), PROMPTS[i], greedy(LENGTHS[i]), stream=False)
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step()}
    seconds, history = time.perf_counter() - began, engine.history
    engine.history = None
    return [finished[str(i)] for i in range(len(PROMPTS))], seconds, history


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


with load("m1") as m1:
    FOLDER = m1.engine.setup.path
    m1.generate(PROMPTS[0], greedy(4), use_tqdm=False)  # warm-up
    alone, m1_seconds, _ = serve(m1)

EXPECTED = tokens(alone)
ttft = [output.metrics.ttft for output in alone]
figure, axes = plt.subplots(figsize=(8, 2.6))
axes.bar(range(len(ttft)), ttft, color="tab:red")
axes.set(xlabel="user", ylabel="s until the first token", title=f"M1: {sum(LENGTHS) / m1_seconds:.0f} tokens/s, and the last user waits")
plt.show()
assert ttft[-1] > 10 * ttft[0]

# %% [markdown]
# Is the processor at least busy with the one it serves? Let us ask what a step costs when 1, 2, 4 ... sequences share it. If the step
# were bound by arithmetic, 8 sequences would take 8 times as long.

# %%
def step_ms(llm, batch):
    """Time of a decode step with so many sequences: the quickest, for other programs disturb the rest."""
    engine = llm.engine
    engine.history = []
    for i in range(batch):
        engine.add_request(str(i), PROMPTS[i], greedy(14), stream=False)
    while engine.has_unfinished_requests():
        engine.step()
    steps, engine.history = engine.history, None
    return 1e3 * min(step.seconds for step in steps[2:])


SIZES = [1, 2, 4, 8, 16]
with load() as llm:
    step_ms(llm, 1)  # warm-up
    cost = [step_ms(llm, batch) for batch in SIZES]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
left.plot(SIZES, cost, "o-", label="measured")
left.plot(SIZES, [cost[0] * n for n in SIZES], "--", color="grey", label="if sharing saved nothing")
left.set(xlabel="sequences in the step", ylabel="ms a step", xscale="log", yscale="log", xticks=SIZES, xticklabels=SIZES)
left.legend(frameon=False)
right.plot(SIZES, [1e3 * n / c for n, c in zip(SIZES, cost, strict=True)], "o-", color="tab:green")
right.set(xlabel="sequences in the step", ylabel="tokens/s", ylim=0)
plt.tight_layout()
plt.show()
print(f"8 sequences cost {cost[3] / cost[0]:.1f} times one; 16 cost {cost[4] / cost[0]:.1f} times one")
assert cost[4] < 14 * cost[0]

# %% [markdown]
# A matrix product with one row reads the whole matrix to use each number once. With 8 rows it reads the same matrix and uses each number
# 8 times. (What does grow with the batch, here, is attention: `torch_naive` attends sequence by sequence, in a Python loop. Milestones
# M3 and M4 take that apart.)
#
# So we want many sequences in a step. The answers end at different times, though. What then?

# %% [markdown]
# ## The mini: static and continuous batching in one cell
#
# A scheduler, a slot of the cache for each sequence, and M1's model over a flat batch. One method separates static batching from continuous
# batching. It imports nothing of the engine. (To write it yourself: `python -m milestones build mini`, stage 2.)

# %%
from milestones.mini import harness

adapters = harness.load(harness.REFERENCE)  # M1's model, to import from

# %%
# milestones/mini/reference/engine.py
"""Stage 2: continuous batching. Each step decides anew who takes part, and one pass over the weights serves all of them."""

from collections import deque
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from contract import Limits, Step
from model import Model, causal_attention
from serial import Request
from torch import Tensor


class Slots:
    """Which slot of the cache a sequence has. A slot is a block as long as the longest text."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.free, self.tables = limits, list(range(limits.num_blocks)), dict[str, list[int]]()

    def allocate(self, request: Request, end: int) -> bool:
        """Make the table of `request` cover its first `end` tokens. False, and nothing changed, where there is no room."""
        if request.id not in self.tables:
            if not self.free:
                return False
            self.tables[request.id] = [self.free.pop(0)]
        return True

    def release(self, request: Request) -> None:
        """Take all blocks back."""
        self.free += self.tables.pop(request.id, [])


class Piece(NamedTuple):
    """One sequence's part of a step: values, so that a device may look at them later."""

    id: str
    start: int
    ids: list[int]  # the tokens to compute
    table: list[int]
    is_last: bool  # whether its newest token is among them, so that the step samples the next


class Engine:
    """The scheduler, and the model over a flat batch. Who came first is served first."""

    memory_type: type[Slots] = Slots

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.model, self.limits, self.memory = Model(folder), limits, self.memory_type(limits)
        self.waiting, self.running, self.preempted = deque[Request](), list[Request](), list[str]()
        config = self.model.config
        shape = limits.num_blocks, limits.block_size, config["num_key_value_heads"], config["head_dim"]
        self.cache = torch.zeros(config["num_hidden_layers"], 2, *shape)  # [L, 2, N, B, Hkv, D]

    def add(self, id: str, prompt: list[int], max_tokens: int) -> None:
        self.waiting.append(Request(id, list(prompt), len(prompt) + max_tokens))

    def step(self) -> Step:
        batch, tables = self.schedule()
        tokens = self.run(batch)
        for piece in batch:
            self.advance(piece, tokens.get(piece.id))
        return Step([(piece.id, piece.start, len(piece.ids)) for piece in batch], tables, tokens, self.preempted)

    # -- who takes part ----------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Piece], dict[str, list[int]]]:
        """Return the pieces of the next step, and who holds which blocks: those that run first, then newcomers."""
        batch, self.preempted, budget = list[Piece](), [], self.limits.max_tokens
        for request in list(self.running):
            n = self.num_tokens(request, budget)
            if n and request in self.running and self.make_room(request, request.computed + n):
                batch.append(self.piece(request, n))
                budget -= n
        while self.waiting and len(self.running) < self.limits.max_seqs and not self.preempted:
            n = self.admit(self.waiting[0], budget)
            if not n:
                break
            self.running.append(self.waiting.popleft())
            batch.append(self.piece(self.running[-1], n))
            budget -= n
        return batch, {id: list(table) for id, table in self.memory.tables.items()}

    def num_tokens(self, request: Request, budget: int) -> int:
        """How many tokens of it this step computes: all that are left, or none."""
        n = len(request.tokens) - request.computed
        return n if n <= budget else 0

    def make_room(self, request: Request, end: int) -> bool:
        """Whether a running sequence has room for `end` tokens. It always has: its slot is as long as any text."""
        return self.memory.allocate(request, end)

    def admit(self, request: Request, budget: int) -> int:
        """Give a newcomer its room. Return how many tokens of it this step computes, 0 where it has to wait."""
        n = self.num_tokens(request, budget)
        return n if n and self.memory.allocate(request, request.computed + n) else 0

    def piece(self, request: Request, n: int) -> Piece:
        end, table = request.computed + n, list(self.memory.tables[request.id])
        return Piece(request.id, request.computed, request.tokens[end - n : end], table, end == len(request.tokens))

    def advance(self, piece: Piece, token: int | None) -> None:
        """Note what a step has computed. A sequence that is done gives its blocks back at once."""
        request = next(request for request in self.running if request.id == piece.id)
        request.computed += len(piece.ids)
        if token is not None:
            request.tokens.append(token)
        if request.is_done:
            self.running.remove(request)
            self.memory.release(request)

    # -- what it computes --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: list[Piece]) -> dict[str, int]:
        """Compute all pieces as one flat batch. Return the next token of each sequence whose newest token was in it."""
        if not batch:
            return {}
        ids = torch.tensor([id for piece in batch for id in piece.ids])  # [T]
        positions = torch.cat([torch.arange(p.start, p.start + len(p.ids)) for p in batch])
        hidden = self.model(ids, positions, partial(self.attention, batch))
        last = torch.tensor([len(piece.ids) for piece in batch]).cumsum(0) - 1  # [S]
        tokens = self.model.logits(hidden[last]).argmax(-1).tolist()
        return {piece.id: token for piece, token in zip(batch, tokens, strict=True) if piece.is_last}

    def attention(self, batch: list[Piece], layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """An `Attention`: store the K/V of all pieces, then let each sequence look at its own cache and no other."""
        sizes = [len(piece.ids) for piece in batch]
        for piece, k, v in zip(batch, key.split(sizes), value.split(sizes), strict=True):
            self.store(layer, piece, torch.stack((k, v)))
        keys, values = self.cache[layer]
        pieces = zip(batch, query.split(sizes), strict=True)
        return torch.cat([self.attend(q, keys, values, piece.table, piece.start) for piece, q in pieces])

    def store(self, layer: int, piece: Piece, kv: Tensor) -> None:
        """Put new K/V [2, n, Hkv, D] into the sequence's slot."""
        self.cache[layer, :, piece.table[0], piece.start : piece.start + kv.shape[1]] = kv

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, table: list[int], start: int) -> Tensor:
        """Attention of queries [n, Hq, D] over the sequence's K/V in `keys` and `values` [N, B, Hkv, D]."""
        end = start + len(query)
        return causal_attention(query, keys[table[0], :end], values[table[0], :end], start)

# %%
class StaticEngine(Engine):
    """Lets nobody in before all of a batch have ended: this method is the whole difference."""

    def admit(self, request, budget):
        is_under_way = any(running.computed for running in self.running)
        return 0 if is_under_way else super().admit(request, budget)


# %%
llm = load(max_num_seqs=4)
requests = [(llm.tokenizer.encode(prompt), length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
longest = max(len(p) + n for p, n in requests)
for name, kind in (("static", StaticEngine), ("continuous", Engine)):
    answers, steps = harness.serve(kind(FOLDER, Limits(4, longest, 4, 4 * longest)), requests)
    idle = 1 - sum(len(step.tables) for step in steps) / (4 * len(steps))
    print(f"{name:10} {len(steps):4} steps, {idle:4.0%} of the rows idle")
    assert answers == EXPECTED, "the tokens are the same, whatever else is in the batch"

outputs, *_ = serve(llm)
assert tokens(outputs) == EXPECTED
three = [(request.prompt_token_ids, request.max_tokens) for request in example().requests]
answers, _ = harness.serve(Engine(FOLDER, Limits(2, 20, 2, 40)), three)
assert answers == [list(request.answer_token_ids) for request in example().requests], "A, B and C, too"
print("mini, M1 and M2 say the same:", repr(outputs[1].outputs[0].text[:60]))

# %% [markdown]
# ## Your turn
#
# The engine's version serves any mix of requests: priorities, budgets, aborts, stop strings, several answers to one prompt. These are
# the functions that you write; `python -m milestones start m2` puts them into `mine/`, and this notebook then runs them.

# %%
from folovllm.cache.slot_manager import SlotManager
from folovllm.engine.scheduler import Scheduler
from folovllm.request import Sequence
from folovllm.worker.input_batch import InputBatch


def task(id, function):
    signature = str(inspect.signature(function)).replace("'", "")
    print(f"--- {id}  {function.__qualname__}{signature}\n{inspect.getdoc(function)}\n")


task("m2.1", Sequence.start)
task("m2.1", Sequence.requeue)
task("m2.1", Sequence.finish)
task("m2.2", Scheduler.schedule)
task("m2.3", Scheduler.postprocess)
task("m2.4", SlotManager.allocate_slots)
task("m2.5", InputBatch.flatten)

# %% [markdown]
# ## See it
#
# Both kinds of batching, on the real engine: a snapshot per step says who took part. Static batching is the same engine, given
# one group of four at a time. A row of the picture is a row of the batch; dark is a prompt, light is a token; white: the row is empty.

# %%
def rows_of(history):
    """(row, request, start, seconds, tokens) of every share; a request keeps the lowest row that was free when it came."""
    row, scheduled_seqs = {}, []
    for step in history:
        present = {scheduled[0] for scheduled in step.scheduled_seqs}
        row = {request: r for request, r in row.items() if request in present}
        for request, _, _, count in step.scheduled_seqs:
            if request not in row:
                row[request] = min(set(range(len(row) + 1)) - set(row.values()))
            scheduled_seqs.append((row[request], int(request), step.start - history[0].start, step.seconds, count))
    return scheduled_seqs


def gantt(axes, history, title):
    scheduled_seqs = rows_of(history)
    colours = plt.get_cmap("tab20")
    for p, request, start, seconds, count in scheduled_seqs:
        axes.barh(p, seconds, left=start, height=0.85, color=colours(request % 20), alpha=1.0 if count > 1 else 0.55, linewidth=0)
    for request in {scheduled[1] for scheduled in scheduled_seqs}:
        own = [scheduled for scheduled in scheduled_seqs if scheduled[1] == request]
        axes.text(own[0][2], own[0][0], f" {request}", va="center", fontsize=8)
    end = max(start + seconds for _, _, start, seconds, _ in scheduled_seqs)
    idle = 1 - sum(seconds for *_, seconds, _ in scheduled_seqs) / (4 * end)
    axes.set(yticks=range(4), ylabel="row", title=f"{title}: {len(history)} steps, {end:.2f} s, {idle:.0%} of the area idle")
    return end, idle


static_outputs, _, static_history = serve(llm, static_groups_of=4)
continuous_outputs, _, history = serve(llm)
assert tokens(static_outputs) == tokens(continuous_outputs) == EXPECTED

figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4), sharex=True)
static_end, static_idle = gantt(top, static_history, "static batching")
end, idle = gantt(bottom, history, "continuous batching")
bottom.set_xlabel("s")
plt.tight_layout()
plt.show()
assert len(history) < len(static_history) and idle < static_idle

# %% [markdown]
# The same two runs as a film: on the left in groups, on the right continuously, on one clock. Press ▶, or drag; ‖ goes to the next request that must wait, and the
# page says why. Choose *steps* for the picture above, a row a request.

# %%
from folovllm.apps.inspector import film, show

with film(llm, "In groups of four") as in_groups:
    serve(llm, static_groups_of=4)
with film(llm, "Continuously") as continuously:
    serve(llm)
show(in_groups, continuously, height=480)

# %% [markdown]
# In the upper picture every group waits for its longest answer. In the lower one the only idle area is at the end, where no request is left
# to come in: with a steady stream of users there is no end, and it goes to zero.
#
# What does a newcomer cost the others? A step with a prompt in it is longer than a step of single tokens, and all that take part in it wait.

# %%
figure, (top, middle) = plt.subplots(2, 1, figsize=(9, 4), sharex=True)
at = [step.start - history[0].start for step in history]
top.step(at, [step.running for step in history], where="post", label="running")
top.step(at, [step.waiting for step in history], where="post", label="waiting")
top.set(ylabel="sequences")
top.legend(frameon=False)
prompts_in = [step.num_prefill_tokens > 0 for step in history]
milliseconds = [1e3 * step.seconds for step in history]
middle.bar(at, milliseconds, width=[s.seconds for s in history], align="edge", color=["tab:orange" if p else "tab:blue" for p in prompts_in])
middle.set(xlabel="s", ylabel="ms a step", title="orange: a prompt joined", ylim=(0, 1.2 * sorted(milliseconds)[-2]))
plt.tight_layout()
plt.show()
with_prompt = statistics.median(m for m, p in zip(milliseconds, prompts_in, strict=True) if p)
without = statistics.median(m for m, p in zip(milliseconds, prompts_in, strict=True) if not p)
print(f"a step with a prompt in it: {with_prompt:.1f} ms, without: {without:.1f} ms")

# %% [markdown]
# ## The memory that whole blocks waste
#
# A block holds `max_model_len` tokens, because the engine does not know how long an answer gets. `engine.stats()` says what is reserved and what of
# it is used:

# %%
engine, reserved, used = llm.engine, [], []
for i, prompt in enumerate(PROMPTS):
    engine.add_request(str(i), prompt, greedy(LENGTHS[i]), stream=False)
while engine.has_unfinished_requests():
    engine.step()
    stats = engine.stats()
    reserved.append(stats.kv_bytes_reserved / 2**20)
    used.append(stats.kv_bytes_used / 2**20)

figure, axes = plt.subplots(figsize=(9, 2.6))
axes.fill_between(range(len(reserved)), reserved, step="post", color="lightgrey", label="reserved")
axes.fill_between(range(len(used)), used, step="post", color="tab:blue", label="holds a token")
axes.set(xlabel="step", ylabel="MiB of K/V")
axes.legend(frameon=False, loc="center")
plt.show()
scheduled = sum(used) / sum(reserved)
context = engine.setup.max_model_len
print(f"blocks of {context} tokens: {scheduled:.1%} of the reserved memory holds a token, {1 - scheduled:.1%} is wasted")
assert scheduled < 0.5
llm.close()

# %% [markdown]
# Ask what that means for the batch: with the same bytes, handed out as they are needed, how many more sequences could run? That is M3.
#
# ## Measure: the switch off and on
#
# The same sixteen requests through four engines in turn, two rounds, so that a moment's disturbance does not hit one of them alone; the
# better round counts. `max_num_seqs` is the switch: 1 is M1's service order on M2's engine.

# %%
contenders = {
    "m1": load("m1"),
    "m2, max_num_seqs=1": load(max_num_seqs=1),
    "m2, max_num_seqs=4": load(max_num_seqs=4),
    "m2, max_num_seqs=16": load(max_num_seqs=16),
}
rows = dict.fromkeys(contenders, 0.0)
for _ in range(2):
    for name, contender in contenders.items():
        outputs, seconds, _ = serve(contender)
        assert tokens(outputs) == EXPECTED
        rows[name] = max(rows[name], sum(LENGTHS) / seconds)
for contender in contenders.values():
    contender.close()
for name, rate in rows.items():
    print(f"{name:22} {rate:7.0f} tokens/s  {rate / rows['m1']:5.2f} x m1")
assert rows["m2, max_num_seqs=16"] > rows["m2, max_num_seqs=1"]

# %% [markdown]
# `folovllm bench throughput --compare m1,m2` measures 64 larger requests; the chapter has its figures.
#
# ## Compare: a padded batch
#
# Before continuous batching, a batch was a rectangle: `transformers`' `generate` pads prompts on the left to the longest and goes on until
# the longest answer is done. The tokens are the same; count what is computed for them.

# %%
hf = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
hf.generation_config.eos_token_id = None  # as with ignore_eos
ids = [prompt for prompt, _ in requests]
width, longest = max(map(len, ids)), max(LENGTHS)
padded = torch.tensor([[0] * (width - len(i)) + i for i in ids])
mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids])
with torch.inference_mode():
    rectangle = hf.generate(padded, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0)
same = [rectangle[i, width : width + n].tolist() == EXPECTED[i] for i, n in enumerate(LENGTHS)]
computed = len(ids) * (width + longest - 1)
useful = sum(map(len, ids)) + sum(LENGTHS) - len(ids)
print(f"{sum(same)} of {len(same)} answers equal; {computed} positions computed, {useful} of them useful: {useful / computed:.0%}")
assert useful == sum(step.num_tokens for step in history), "M2 computes the useful ones, and none besides"

# %% [markdown]
# | | this milestone | nano-vLLM | vLLM (v1) |
# |---|---|---|---|
# | who takes part | `Scheduler.schedule`, anew at every step | `Scheduler.schedule`: a step is all prefill *or* all decode | `Scheduler.schedule`, one token budget for prefill and decode |
# | what a step is | tokens of sequences, decodes first | two kinds of batch, two code paths in the runner | `{request: number of tokens}` |
# | the batch | flat, `query_start_loc` | flat, `cu_seqlens_q` | flat, `query_start_loc` |
# | the cache | one long block a sequence | short blocks | short blocks |
#
# The idea is Orca's (Yu et al., OSDI 2022): *iteration-level scheduling*. vLLM's paper added the short blocks.

# %% [markdown]
# ## Break it
#
# First: what if positions are counted from the share's own start? Prompts still work. Decoding does not.

# %%
reference_flatten = InputBatch.flatten


def positions_from_zero(self, scheduled_seqs):
    arrays = reference_flatten(self, scheduled_seqs)
    arrays.positions = np.concatenate([np.arange(scheduled.num_new_tokens) for scheduled in scheduled_seqs])
    return arrays


with load() as broken:
    with patch.object(InputBatch, "flatten", positions_from_zero):
        wrong = broken.generate(PROMPTS[1], greedy(40), use_tqdm=False)[0].outputs[0]
    right = broken.generate(PROMPTS[1], greedy(40), use_tqdm=False)[0].outputs[0]
print("right:", repr(right.text))
print("wrong:", repr(wrong.text))
assert wrong.token_ids[0] == right.token_ids[0], "the first token comes from the prompt, whose positions were right"
assert wrong.token_ids != right.token_ids

# %% [markdown]
# A, B and C show the second classic. What if slots are counted from the share's own start? The picture says where A's numbers go.

# %%
from folovllm.cache.slot_manager import SlotManager


def from_the_beginning(block_table, block_size, start, end):
    return np.arange(block_table[0] * block_size, block_table[0] * block_size + end - start)


with patch.object(SlotManager, "slots", staticmethod(from_the_beginning)):
    overwritten = play("m2")
for request in example().requests:
    print(request.name, repr(request.answer), "->", repr(llm.tokenizer.decode(overwritten.answers[request.name])))
assert overwritten.answers["A"] != continuous_run.answers["A"]
pictures.step(overwritten, 3)

# %% [markdown]
# Every new token of A lands in slot 0, on top of its first word; the slots behind its prompt are never written, and attention reads them.
#
# Then: a finished sequence leaves the batch and keeps its block. Nothing goes wrong for a while, which is the nasty kind of bug.

# %%
with load(max_num_seqs=4) as leaking:
    for i, prompt in enumerate(PROMPTS):
        leaking.engine.add_request(str(i), prompt, greedy(LENGTHS[i]), stream=False)
    served = 0
    try:
        with patch.object(SlotManager, "free", lambda self, seq: None):
            while leaking.engine.has_unfinished_requests():
                served += len(leaking.engine.step())
    except RuntimeError as error:
        print("the engine says:", error)
    stats = leaking.engine.stats()
print(f"{served} served, {stats.running} running, {stats.waiting} waiting, {stats.kv_blocks_used} of {stats.kv_blocks_total} blocks taken")
assert served == 4 and stats.waiting == 12 and stats.running == 0

# %% [markdown]
# Four requests were served, the other twelve would wait forever with an idle processor, and so the engine gives up. The property test in `tests/m2` looks for exactly
# this: after everything has ended, every block is free.
#
# To try on your own:
#
# - Let short requests overtake a long one that does not fit (`wrong/m2.2_overtakes.py`), under a stream of short ones. When does the
#   long one run?
# - Set `max_num_batched_tokens` to `max_model_len` and send long prompts: how do running users feel it? (M5 cuts prompts into pieces.)
# - Sort `waiting` by answer length, shortest first, as if an oracle told you. Mean latency falls. Who pays?

# %% [markdown]
# ## Beside the exercises: build a scheduler
#
# `python -m milestones build m2` gives you an empty file, the protocol and the tests; the structure is yours, and no exercise needs it. The score
# serves a checked-in trace in virtual time, so the scores are the same on every machine. Once yours is begun, it has a row too.

# %%
from IPython.display import Markdown

from milestones.builders import own_scores

Markdown(own_scores("m2"))
