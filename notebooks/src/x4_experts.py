# %% [markdown]
# # X4: mixture of experts
#
# A larger MLP knows more, and every token pays for all of it. A mixture of experts has many MLPs and asks a few of them for each token. Here you see which expert
# answers for which word, what that saves at batch 1, what is left of it in a large batch, how evenly the work falls on two ranks, and what breaks.
#
# The [chapter](../docs/x4_experts.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("x4")

# %%
import inspect
import json
import time
import warnings
from collections import Counter
from statistics import median
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from folovllm import LLM, SamplingParams
from folovllm.kernels.grouped_tiles import find_tile
from folovllm.electives.moe.kernels.grouped_linear import grouped_linear, multiply_tile
from folovllm.electives.moe.kernels.route import combine_kernel
from folovllm.electives.moe import layers as moe
from folovllm.electives.moe.experts import Experts
from folovllm.electives.moe.layers import combine, route, sort_by_expert
from folovllm.models.files import resolve_model
from milestones import expert_pictures
from milestones.routing import expected, read_by, routing_of, routings

disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
FOLDER = resolve_model("stories-moe")
MODEL = {"model": "stories-moe", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "use_tqdm": False}
CALIBRATION = resolve_model("stories-5m") / "calibration.jsonl"
STORIES = [json.loads(line)["text"] for line in CALIBRATION.read_text("utf-8").splitlines()[:64]]


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. A layer has 32 MLPs. One token asks all of them, or 2 of them. How many times longer does the first take?
# 2. 8 experts, each token asks 2. Two tokens run in one step. How many experts are read? Eight tokens? Sixty-four?
# 3. Does an expert know about *things* (animals, weather), or about *kinds of words* (names, commas)?
# 4. Two ranks hold four experts each. By how much does the busier one have more to do than half?
# 5. Each token's two weights are not divided by their sum. Does the text change? And if pairs are not sorted by expert?
#
# ## Feel the problem
#
# A made-up layer of 32 MLPs. Dense: every token goes through all of them. Sparse: through 2, chosen at random.

# %%
NUM, ASKED, HIDDEN, INNER = 32, 2, 384, 768
gate_up, down = torch.randn(NUM, 2 * INNER, HIDDEN) / HIDDEN**0.5, torch.randn(NUM, HIDDEN, INNER) / INNER**0.5


def mlp(e, x):
    gate, up = (x @ gate_up[e].T).chunk(2, -1)
    return (F.silu(gate) * up) @ down[e].T


def milliseconds(work, rounds=16):
    """The processor's time, the median over rounds that each choose anew: what was read a moment ago would still be in the cache."""
    times = []
    for number in range(rounds):
        start = time.thread_time()
        work(number)
        times.append(1e3 * (time.thread_time() - start))
    return median(times)


megabytes = 4 * 3 * HIDDEN * INNER / 1e6
one, pairs = torch.randn(1, HIDDEN), torch.randperm(NUM).view(-1, ASKED).tolist()
dense = milliseconds(lambda _: [mlp(e, one) for e in range(NUM)], rounds=5)
sparse = milliseconds(lambda number: [mlp(e, one) for e in pairs[number % len(pairs)]])
print(f"dense:  {NUM * megabytes:5.0f} MB of weights are read, {dense:6.2f} ms")
print(f"sparse: {ASKED * megabytes:5.0f} MB of weights are read, {sparse:6.2f} ms, {dense / sparse:.0f} times faster")
assert dense > 4 * sparse, "two experts are read in less time than all thirty-two"

# %% [markdown]
# The sparse layer has all the weights and reads a sixteenth of them. Somebody has to say *which*: the router, a matrix with one row for each expert.
#
# ## The mini: a mixture of experts in thirty lines
#
# (It has the ideas of x4.1, x4.2 and x4.4 in it. To find them yourself, read on from "Your turn" and come back.)
#
# No engine: transformers' model, in which each layer's MLP is replaced by our own. The weights come from the file by their names.

# %%
class MiniMoE(torch.nn.Module):
    """Router, experts, and the loop over experts."""

    def __init__(self, weights, layer, top_k):
        super().__init__()
        name = f"model.layers.{layer}.mlp."
        self.router, self.top_k, self.normalise = weights[name + "gate.weight"].float(), top_k, True
        parts = ("gate_proj", "up_proj", "down_proj")
        self.experts = []
        while f"{name}experts.{len(self.experts)}.up_proj.weight" in weights:
            e = f"{name}experts.{len(self.experts)}."
            self.experts.append([weights[f"{e}{part}.weight"].float() for part in parts])

    def forward(self, x):
        tokens = x.flatten(0, -2)  # [T, H]
        weight, asked = (tokens @ self.router.T).softmax(-1).topk(self.top_k)  # [T, k] each
        if self.normalise:
            weight = weight / weight.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        for number, (gate, up, down) in enumerate(self.experts):
            token, choice = (asked == number).nonzero(as_tuple=True)  # whose choice it is: all at once
            rows = tokens[token]
            answer = (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
            result.index_add_(0, token, weight[token, choice, None] * answer)
        return result.view_as(x)


model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(resolve_model("stories-5m"))  # the same
weights = load_file(FOLDER / "model.safetensors")
for number, layer in enumerate(model.model.layers):
    layer.mlp = MiniMoE(weights, number, model.config.num_experts_per_tok)


@torch.inference_mode()
def write(text, count):
    ids = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


lines = sum(1 for line in In[-1].splitlines() if line.strip())
assert lines <= 80, lines
PROMPT = "Once upon a time there was a little girl named Lily. She had a red kite."
said = write(PROMPT, 40)
print(f"{lines} lines\n{tokenizer.decode(said)}")

with LLM(milestone="m6", **MODEL) as llm:
    engine_says = list(llm.generate([PROMPT], greedy(40), use_tqdm=False)[0].outputs[0].token_ids)
assert engine_says == said, "the engine writes the same text"

# %% [markdown]
# `nonzero` asks the device how many tokens an expert has, and the host waits for the answer: once for each expert of each layer of each step. On a GPU this alone would take longer
# than the products. That is why the engine *sorts*.
#
# ## Your turn
#
# Six functions, four exercises. In a terminal:
#
# ```
# python -m milestones start x4        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint x4.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
EXERCISES = {
    "x4.1": [route],
    "x4.2": [sort_by_expert],
    "x4.3": [find_tile, multiply_tile],
    "x4.4": [combine, combine_kernel],
}
for id, functions in EXERCISES.items():
    for f in functions:
        f = getattr(f, "fn", f)  # what Triton has wrapped
        print(f"{id}  {f.__module__}:{f.__name__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def route{inspect.signature(route)}:\n")
print(inspect.getdoc(route))

# %% [markdown]
# ## See it: which expert for which word
#
# The real engine, and what its router says (`milestones.routing` listens to `route`). A column is a token, a row a layer. The cell has the color of the token's first expert, the strip
# below it that of the second. Put a text of your own in.

# %%
routing = routing_of("Tom and his dog ran to the park. It was a hot day, so they sat under a big tree. \"Look, a bird!\" said Tom.")
expert_pictures.words(routing)

# %% [markdown]
# Is there a rule? Over 64 stories: the tokens that most often ask each expert of a layer *first*, beside how common they are anyway.

# %%
stories = routings(STORIES, most=100)
NUM_EXPERTS, TOP_K = stories[0].num_experts, stories[0].experts.shape[-1]
NUM_LAYERS = len(stories[0].experts)


def typical(layer, count=9):
    """Of each expert, the tokens that ask it first more often than chance would have them."""
    pairs = [(piece.strip() or " ", int(e)) for s in stories for piece, e in zip(s.pieces, s.experts[layer, :, 0], strict=True)]
    words, each, both = Counter(w for w, _ in pairs), Counter(e for _, e in pairs), Counter(pairs)
    for e in range(NUM_EXPERTS):
        surplus = {w: both[w, e] - words[w] * each[e] / len(pairs) for w in words}
        best = sorted(surplus, key=surplus.get, reverse=True)[:count]
        print(f"  expert {e} ({100 * each[e] / len(pairs):3.0f}% of all tokens): {'  '.join(best)}")


for layer in (0, NUM_LAYERS // 2, NUM_LAYERS - 1):
    print(f"layer {layer}")
    typical(layer)

# %% [markdown]
# How even is the work? Each row is a layer, each part an expert's share of all pairs (token, expert). Dashed: where the parts would end if all were equal.

# %%
counts = np.sum([s.counts() for s in stories], axis=0)  # [L, E]
expert_pictures.load(counts)

# %% [markdown]
# ## Measure: a batch against bytes
#
# A decode step of n sequences: token t of n stories, side by side. How many different experts do they ask in a layer? Counted from the routing above, beside the formula for experts that are all
# equally likely, E (1 - (1 - k/E)^n).

# %%
SIZES = [1, 2, 4, 8, 16, 32, 64]
span = range(8, min(len(s.pieces) for s in stories))
asked = np.stack([s.experts[:, span.start : span.stop] for s in stories])  # [stories, L, T, k]
layers, places = range(NUM_LAYERS), range(len(span))
read = {n: read_by(asked[i : i + n, l, t] for i in range(0, 64, n) for l in layers for t in places) for n in SIZES}
expert_bytes = 2 * sum(w.numel() for name, w in weights.items() if ".layers.0.mlp.experts.0." in name)
for n, experts in read.items():
    said_by_formula = expected(NUM_EXPERTS, TOP_K, n)
    print(f"{n:3} tokens: {experts:4.1f} experts ({said_by_formula:4.1f} by the formula), {experts * expert_bytes / 1e6:5.2f} MB a layer in bf16, {experts * expert_bytes / n / 1e3:6.1f} kB a token")
assert read[1] == TOP_K and read[64] > 0.9 * NUM_EXPERTS
expert_pictures.batch(read, NUM_EXPERTS, TOP_K)

# %% [markdown]
# The counts lie below the formula, because experts are not equally likely, and because neighbours in a batch ask alike.
#
# Does it show in time? The tiny model's experts fit into a processor's cache, so take the made-up layer with its 32, and a router that is fair.

# %%
experts = Experts(range(NUM), NUM, HIDDEN, INNER)
experts.gate_ups.weight.data.copy_(gate_up.flatten(0, 1))
experts.downs.weight.data.copy_(down.flatten(0, 1))
took, seen = [], []
for n in SIZES:
    x = torch.randn(n, HIDDEN)
    steps = [torch.rand(n, NUM).topk(ASKED).indices for _ in range(12)]
    ready = [sort_by_expert(chosen, NUM) for chosen in steps]
    seen.append(float(np.mean([len(chosen.unique()) for chosen in steps])))
    with torch.inference_mode():
        took.append(milliseconds(lambda number: experts(x, *ready[number]), rounds=len(ready)))
    print(f"{n:3} tokens: {seen[-1]:4.1f} of {NUM} experts, {took[-1]:6.2f} ms, {took[-1] / n:5.2f} ms a token")

fig, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
axis.plot(SIZES, [t / took[0] for t in took], "o-", label="time")
axis.plot(SIZES, [s / seen[0] for s in seen], "s--", label="experts that are read")
axis.plot(SIZES, SIZES, ":", color="gray", label="as many as tokens")
axis.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel="times as much as 1 token", xticks=SIZES, xticklabels=SIZES)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Up to a few tokens each brings experts of its own: a second sequence in the batch is *not* nearly free, as it is in a dense model. Once all experts are read, more tokens cost little, until
# arithmetic counts.
#
# ## See it: tiles
#
# What the sort gives the kernel: the pairs of each expert are neighbours. The kernel cuts them into tiles, and starts a program for every tile that there *could* be, since the host does not know the counts.

# %%
TILE = 4
chosen = torch.from_numpy(asked[:12, NUM_LAYERS // 2, 0])  # a layer, 12 sequences
order, starts = sort_by_expert(chosen, NUM_EXPERTS)
print("pairs, expert by expert:")
for e in range(NUM_EXPERTS):
    pairs = order[starts[e] : starts[e + 1]].tolist()
    print(f"  expert {e}: " + (" | ".join(str(pairs[i : i + TILE]) for i in range(0, len(pairs), TILE)) or "-"))
sizes = starts.diff().tolist()
busy, started = sum(-(-n // TILE) for n in sizes), (len(order) + min(NUM_EXPERTS, len(order)) * (TILE - 1)) // TILE
print(f"{len(order)} pairs; {busy} tiles of {TILE} have work, {started} programs are started for each column of outputs; {busy * TILE - len(order)} places are empty")

x, weight = torch.randn(12, 40), torch.randn(NUM_EXPERTS, 48, 40)
by_kernel = grouped_linear(x, weight, order, starts)
by_loop = torch.stack([weight[e] @ x[p // TOP_K] for p, e in enumerate(chosen.flatten().tolist())])
print(f"the kernel and a loop over pairs differ by at most {(by_kernel - by_loop).abs().max():.1e}")
assert torch.allclose(by_kernel, by_loop, atol=1e-4)

# %% [markdown]
# ## The switch: two ranks
#
# `enable_expert_parallel` gives each rank half of the experts, whole. All tokens are on both ranks; each rank answers the pairs that are its own, and the all-reduce that a dense MLP needs as well adds the two parts up.

# %%
with LLM(tensor_parallel_size=2, enable_expert_parallel=True, count_experts=True, **MODEL) as llm:
    asks = [" ".join(story.split()[:12]) for story in STORIES[:4]]
    two_ranks = list(llm.generate([PROMPT, *asks], greedy(16), use_tqdm=False)[0].outputs[0].token_ids)
    live = np.array(llm.engine.expert_load())  # [L, E], counted by the engine
print(f"two ranks write: {tokenizer.decode(two_ranks)}\n")
assert two_ranks == said[:16], "shared-out experts say the same"

HALF = NUM_EXPERTS // 2
print("layer   pairs of rank 0   of rank 1   the busier has")
for layer, row in enumerate(live):
    ranks = row.reshape(2, HALF).sum(-1)
    print(f"{layer:5} {ranks[0]:15} {ranks[1]:13} {ranks.max() / ranks.mean():12.2f} x its half")

steps = [asked[i : i + 8, :, t] for i in range(0, 64, 8) for t in places]  # decode steps of 8 sequences, [8, L, k] each
each = [(step.shape[0] * TOP_K, (step < HALF).sum((0, 2))) for step in steps]
wait = np.mean([np.maximum(on_0, pairs - on_0).mean() / (pairs / 2) for pairs, on_0 in each])
print(f"\nover a whole run some of it evens out. In a single decode step of 8 sequences the busier rank has {wait:.2f} x its half")

# %% [markdown]
# A layer is done when its slowest rank is. A rank waits at every layer anew, so imbalance of single layers does not cancel out.
#
# ## Compare
#
# | | this engine | vLLM | nano-vllm |
# |---|---|---|---|
# | sort | by torch; in one kernel with the choice for few pairs | a kernel of its own (`moe_align_block_size`) | - |
# | whose tile | each program searches the experts' borders | a table that the sort writes | - |
# | expert parallelism | the all-reduce of tensor parallelism | that, or all-to-alls with data-parallel attention | - |
# | an expert that is too busy | is slow | copies of it on several ranks (EPLB) | - |
#
# ## Break it
#
# **A router that does not normalise.** This model was trained with weights that sum to 1. Left as they are, every layer's answer is too small, by a factor that depends on the token. Nothing crashes. What is the loss of a story?

# %%
@torch.inference_mode()
def loss(texts=STORIES[:6]):
    ids = [torch.tensor([tokenizer.encode(text, add_special_tokens=False)[:100]]) for text in texts]
    return float(np.mean([model(i, labels=i).loss for i in ids]))


def set_all(**fields):
    for layer in model.model.layers:
        for name, value in fields.items():
            setattr(layer.mlp, name, value)


print(f"as trained:         loss {(trained := loss()):.3f}")
set_all(normalise=False)
print(f"without the sum:    loss {(unnormalised := loss()):.3f}   {tokenizer.decode(write(PROMPT, 20))!r}")
set_all(normalise=True, top_k=1)
print(f"one expert a token: loss {loss():.3f}   {tokenizer.decode(write(PROMPT, 20))!r}")
set_all(top_k=TOP_K)
print(f"as trained:                     {tokenizer.decode(said[:20])!r}")
assert unnormalised > trained

# %% [markdown]
# **Pairs that are not sorted.** The borders are right, the order is not: every expert answers as many pairs as it should, of tokens that never asked it.

# %%
def unsorted(experts, num_experts):
    order, starts = sort_by_expert(experts, num_experts)
    return torch.arange(len(order)), starts


with patch.object(moe, "sort_by_expert", unsorted), LLM(milestone="m3", **MODEL) as llm:
    wrong = list(llm.generate([PROMPT], greedy(20), use_tqdm=False)[0].outputs[0].token_ids)
print(repr(tokenizer.decode(wrong)))
assert wrong != said[:20]

# %% [markdown]
# **An expert that is gone.** Silence one expert of one layer, as a rank that dies would. How much does each matter?

# %%
layer = NUM_LAYERS // 2
mini = model.model.layers[layer].mlp
share = counts[layer] / counts[layer].sum()
for e, parts in enumerate(mini.experts):
    kept, parts[2] = parts[2], torch.zeros_like(parts[2])
    print(f"layer {layer} without expert {e}: loss {loss() - trained:+.3f}, it had {100 * share[e]:.0f}% of the work")
    parts[2] = kept

# %% [markdown]
# ## Where you are
#
# ```
# pytest -m x4 --mine
# folovllm generate "..." --model stories-moe
# ```
#
# The kernels of this elective were compiled for GPUs and run by Triton's interpreter. How fast they are on a GPU has not been measured yet.
