# %% [markdown]
# # M1: offline inference
#
# A language model is a function from tokens to a distribution over the next token. Everything else, from the first prompt to the last
# character on the screen, is what this milestone builds: attention, RoPE and RMSNorm inside the function; a sampler, stop
# conditions and a detokenizer around it; and a chain of small classes that calls it once per token.
#
# The [chapter](../docs/1_offline_inference.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("m1")

# %%
import inspect
import json
import statistics
import time
import warnings
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, where Jupyter's widgets are not installed

import matplotlib.pyplot as plt
import torch
import transformers

from folovllm import LLM, SamplingParams
from milestones.pictures import lanes
from milestones.running_example import example, play

MODEL = "stories-5m"  # comes with the package: 5.8 million parameters, and it tells stories
A, B, C = example().requests  # the book follows these three
PROMPT = A.prompt
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # so that two runs of this notebook can be compared
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})


def load(**options):
    return LLM(MODEL, milestone="m1", device="cpu", use_tqdm=False, **options)


llm = load()
print(llm.generate(PROMPT, SamplingParams(temperature=0.8, seed=3, max_tokens=60), use_tqdm=False)[0].outputs[0].text)

# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on. Each is measured below. If this notebook already shows results, they are those of a run of ours:
# *Edit > Clear Outputs of All Cells* hides them.
#
# 1. Without a KV cache, how does the cost of the n-th token grow with n? And with one?
# 2. A prompt of 256 tokens against one of 8: how many times longer does the first token take? 32 times?
# 3. Of the time of one step, what share goes to the model, and what to the rest of the engine?
# 4. Remove RoPE from a trained model. Does the text become nonsense at once, or slightly worse?
# 5. A, B and C below want 10, 6 and 7 tokens, and this engine serves one after the other. In which step does C get its first token?

# %% [markdown]
# ## Feel the problem
#
# The milestone before this one is "call Hugging Face": give the model the whole text, take the most likely next token, append it, repeat.
# That is correct, and it computes every old token again at every step. The engine keeps the keys and values of old tokens (the *KV
# cache*) and computes one token per step. Same model, same tokens:

# %%
N = 192
FOLDER = llm.engine.setup.path
prompt_ids = llm.tokenizer.encode(PROMPT)
hf = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@torch.inference_mode()
def without_cache(ids, count):
    """The tokens, and the seconds that each took."""
    ids, seconds = list(ids), []
    for _ in range(count):
        began = time.perf_counter()
        logits = hf(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        ids.append(int(logits.argmax()))
        seconds.append(time.perf_counter() - began)
    return ids[-count:], seconds


def with_cache(llm, ids, count):
    llm.engine.history = []
    out = llm.generate(ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)[0]
    history, llm.engine.history = llm.engine.history, None
    return out.outputs[0].token_ids, [step.seconds for step in history]


slow_tokens, slow = without_cache(prompt_ids, N)
fast_tokens, fast = with_cache(llm, prompt_ids, N)
same = next((i for i, (a, b) in enumerate(zip(slow_tokens, fast_tokens, strict=True)) if a != b), N)
assert same >= N // 2, f"the two agree on {same} tokens only"

figure, axes = plt.subplots(figsize=(8, 3))
axes.plot([1e3 * s for s in slow], ".", ms=4, color="tab:red", label=f"no cache: {sum(slow):.1f} s in all")
axes.plot([1e3 * s for s in fast], ".", ms=4, color="tab:blue", label=f"KV cache: {sum(fast):.1f} s in all")
axes.set(xlabel="token of the answer", ylabel="ms", title="Cost of each token")
axes.set_ylim(0, 1.3e3 * sorted(slow)[-3])
axes.legend(frameon=False)
plt.show()

early, late = statistics.median(slow[:20]), statistics.median(slow[-20:])
steady = statistics.median(fast[-20:]) / statistics.median(fast[1:21])
print(f"without: the last tokens cost {late / early:.1f} times the first; with: {steady:.1f} times")
assert late > 1.5 * early

# %% [markdown]
# Without the cache the n-th token costs as much as a prompt of n tokens, so an answer of n tokens costs on the order of n² (and the
# attention inside it n³). With the cache a step is one token through the weights. What remains is one pass over the cached keys and
# values, which at this length hardly shows.
#
# ## See it: A, B and C, one at a time
#
# The book follows three requests through all milestones. A and B are there at the start, C comes before step 2. The picture is drawn from
# what the engine did: a number is the tokens that a step computes, dark a prompt, light one token; dashed: the request waits.

# %%
for request in (A, B, C):
    print(f"{request.name} comes before step {request.turn}: {request.prompt!r} -> {request.max_tokens} tokens")
run = play("m1")
assert run.answers == {request.name: request.answer_token_ids for request in (A, B, C)}
lanes(run)

# %%
print("step  who  positions  tokens that go in, and the token that is drawn")
for turn in run.turns[:3] + run.turns[10:12]:
    (scheduled,) = turn.scheduled_seqs
    texts = [example().texts[token] for token in scheduled.token_ids]
    print(f"{turn.number:4}   {scheduled.name}   {f'{scheduled.start} to {scheduled.end - 1}':9}  {''.join(texts)!r} -> {example().texts[turn.drawn[scheduled.name]]!r}")
first = {name: next(turn.number for turn in run.turns if name in turn.drawn) for name in "ABC"}
print("first token in step", first)
assert first == {"A": 0, "B": 10, "C": 16}

# %% [markdown]
# Three steps (0, 10 and 16) compute a whole prompt. Every other step computes one token. While A decodes, B and C wait, though the weights that A's token needs
# would serve theirs as well: that is the subject of [M2](../notebooks/m2_continuous_batching.ipynb).
#
# ## The mini: the whole thing in one cell
#
# (It has the ideas of m1.1 to m1.3 in it. To find them yourself, read on from "Your turn" and come back.)
#
# This is M1 with nothing left over: read the weights, run the decoder with a cache that grows by concatenation, take the argmax. It
# imports nothing of the engine, and it says the same tokens. (To write such an engine yourself, stage by stage: `python -m milestones build mini`.)

# %%
from milestones.mini import harness

adapters = harness.load(harness.REFERENCE)  # the request and the loop around the model, to import from

# %%
# milestones/mini/reference/model.py
"""Stage 1: the decoder of a Qwen3. It keeps no K and V: whoever calls it brings the attention, with the cache behind it."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

# (layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]; it stores the new key and value first
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Model:
    """The weights of a checkpoint, and the forward pass over a flat batch of tokens."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        stored: dict[str, Tensor] = load_file(folder / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in stored.items()}
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        dim = self.config["head_dim"]
        self.frequencies = theta ** (-torch.arange(0, dim, 2) / dim)  # [D/2]

    def __call__(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states [T, H] after tokens `ids` [T], which stand at `positions` [T] of their sequences."""
        x = self.weights["model.embed_tokens.weight"][ids]  # [T, H]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attend(layer, self.norm(x, f"{name}.input_layernorm"), positions, attention)
            x = x + self.mlp(f"{name}.mlp", self.norm(x, f"{name}.post_attention_layernorm"))
        return self.norm(x, "model.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]; a tied model has no head of its own."""
        tied = self.config["tie_word_embeddings"]
        return self.linear(hidden, "model.embed_tokens" if tied else "lm_head")

    def attend(self, layer: int, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        q, k, v = (self.linear(x, f"{name}.{p}_proj").unflatten(-1, (-1, self.config["head_dim"])) for p in "qkv")
        q = self.rotate(self.norm(q, f"{name}.q_norm"), positions)
        k = self.rotate(self.norm(k, f"{name}.k_norm"), positions)
        return self.linear(attention(layer, q, k, v).flatten(1), f"{name}.o_proj")

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(silu(gate) * up, f"{name}.down_proj")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE: turn the pairs (i, i + D/2) of each head [T, heads, D] by an angle that grows with the position."""
        angles = positions[:, None, None] * self.frequencies  # [T, 1, D/2]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T


def causal_attention(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """Softmax attention of queries [n, Hq, D] at positions `start` and on, over keys [start + n, Hkv, D] of one sequence."""
    n, num_heads, dim = query.shape
    grouped = query.view(n, key.shape[1], -1, dim)  # [n, Hkv, G, D]: G query heads share a KV head
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, key) / dim**0.5
    future = torch.arange(len(key)) > torch.arange(start, start + n)[:, None]  # [n, start + n]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hgnm,mhd->nhgd", weights, value).reshape(n, num_heads, dim)


class GrowingCache:
    """The K/V of one sequence, which grow by concatenation; called as an `Attention`."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        old_key, old_value = self.kv.get(layer, (key[:0], value[:0]))
        key, value = self.kv[layer] = torch.cat((old_key, key)), torch.cat((old_value, value))
        return causal_attention(query, key, value, len(old_key))


def own_model(folder: Path) -> Callable[[], Callable[[list[int]], Tensor]]:
    """`begin` of a `SerialEngine`, for our model: each sequence has a `GrowingCache`."""
    model = Model(folder)

    def begin() -> Callable[[list[int]], Tensor]:
        cache, computed = GrowingCache(), 0

        def next_logits(new: list[int]) -> Tensor:
            nonlocal computed
            positions = torch.arange(computed, computed + len(new))
            computed += len(new)
            return model.logits(model(torch.tensor(new), positions, cache)[-1])

        return next_logits

    return begin

# %%
from serial import SerialEngine

[mini_tokens], _ = harness.serve(SerialEngine(own_model(FOLDER)), [(prompt_ids, 48)])
preset_tokens = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
assert mini_tokens == preset_tokens
requests = [(request.prompt_token_ids, request.max_tokens) for request in (A, B, C)]
answers, _ = harness.serve(SerialEngine(own_model(FOLDER)), requests)  # one at a time, as the engine does it
assert answers == [list(request.answer_token_ids) for request in (A, B, C)]
lines = sum(1 for line in In[-2].splitlines() if line.strip())  # the cell above
assert lines <= 80
print(f"{lines} lines, {len(mini_tokens)} tokens, all equal")

# %% [markdown]
# ## Your turn
#
# The engine does the same with eleven functions. You write them, in eight exercises. Type these commands in a terminal. (JupyterLab has one,
# *File > New > Terminal*. It is a new shell, so `source ../.venv/bin/activate` comes first.)
#
# ```
# python -m milestones start m1        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint m1.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. Below is what each function promises; the
# bodies are for you.

# %%
from folovllm.attention import ops
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.stop import check_stop_conditions
from folovllm.layers import rotary_embedding
from folovllm.layers.layernorm import RMSNorm
from folovllm.models.loader import checkpoint_places
from folovllm.sample import filters
from folovllm.sample.sampler import Sampler

EXERCISES = {
    "m1.1": [ops.create_causal_mask, ops.naive_attention],
    "m1.2": [rotary_embedding.rotate],
    "m1.3": [RMSNorm.forward],
    "m1.4": [filters.apply_min_p_filtering, filters.apply_top_k_filtering, filters.apply_top_p_filtering],
    "m1.5": [Sampler.sample_filtered],
    "m1.6": [check_stop_conditions],
    "m1.7": [IncrementalDetokenizer.advance],
    "m1.8": [checkpoint_places],
}
for id, functions in EXERCISES.items():
    for f in functions:
        print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# The first one in full, signature and docstring:

# %%
f = ops.naive_attention
print(f"def {f.__name__}{inspect.signature(f)}:\n".replace("'", ""))
print(inspect.getdoc(f))

# %% [markdown]
# ## See it: one request, step by step through the chain
#
# `LLM.generate` calls `LLMEngine.step` until nothing is left. A step is four calls: the scheduler says what to compute, the executor
# hands it to worker and runner (the model), the sampler samples, the scheduler appends the token. We wrap each of the four in a clock
# and watch one request. The runner calls the sampler, so in the picture the time of `submit` contains the sampler's time. The line
# below the picture subtracts it.

# %%
engine = llm.engine
sampling_rows = engine.executor._worker.runner._sampling_rows
spans = []


def clocked(name, function):
    def call(*args):
        began = time.perf_counter()
        result = function(*args)
        spans.append((name, began, time.perf_counter()))
        return result

    return call


with (
    patch.object(engine.scheduler, "schedule", clocked("schedule", engine.scheduler.schedule)),
    patch.object(engine.executor, "submit", clocked("submit", engine.executor.submit)),
    patch.object(sampling_rows, "_sampler", clocked("sampler", sampling_rows._sampler)),
    patch.object(engine.scheduler, "postprocess", clocked("postprocess", engine.scheduler.postprocess)),
):
    engine.add_request("watched", PROMPT, SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=7))
    deltas = []
    while engine.has_unfinished_requests():
        deltas += [output.outputs[0].delta_text for output in engine.step()]

rows = ["schedule", "submit", "sampler", "postprocess"]
colours = dict(zip(rows, ["tab:green", "tab:blue", "tab:orange", "tab:purple"], strict=True))
zero = spans[0][1]
figure, (axes, panel) = plt.subplots(1, 2, figsize=(12, 2.8), width_ratios=[2, 1])
for name, began, ended in spans:  # a tick for each call, for a call of some microseconds has no width
    axes.barh(rows.index(name), 1e3 * (ended - began), left=1e3 * (began - zero), color=colours[name])
    axes.plot(1e3 * (began - zero), rows.index(name), marker="|", ms=18, mew=2.5, color=colours[name], clip_on=False)
starts = [began for name, began, _ in spans if name == "schedule"]
for delta, began in zip(deltas, starts, strict=True):
    axes.axvline(1e3 * (began - zero), color="0.8", lw=0.8, zorder=0)
    axes.text(1e3 * (began - zero), -0.75, repr(delta)[1:-1], fontsize=9)
axes.set(yticks=range(4), yticklabels=rows, xlabel="ms", ylim=(3.6, -1.1))
axes.set_title("One request: a prefill of the prompt, then a token a step", pad=14)
usual = [1e6 * statistics.median(e - b for n, b, e in spans if n == name) for name in rows]
panel.barh(range(4), usual, color=list(colours.values()))
for row, microseconds in enumerate(usual):
    panel.text(microseconds * 1.2, row, f"{microseconds:,.0f}", va="center", fontsize=9)
panel.set(xscale="log", xlim=(1, 10 * max(usual)), ylim=(3.6, -1.1), yticks=range(4), yticklabels=[], xlabel="µs a call, median")
figure.tight_layout()
plt.show()

scheduled = {name: sum(e - b for n, b, e in spans if n == name) for name in rows}
whole = spans[-1][2] - zero
model_share = (scheduled["submit"] - scheduled["sampler"]) / whole
print(f"model {model_share:.0%}, sampler {scheduled['sampler'] / whole:.0%}, all else {1 - scheduled['submit'] / whole:.0%}")
assert len(deltas) == 7 and model_share > 0

# %% [markdown]
# ## See it: a distribution before and after each filter
#
# We catch the logits of a step at which the model was in moderate doubt (an entropy near 2, as between 7 equal choices), and put them through the sampler's filters in the engine's order:
# temperature, min-p, top-k, top-p. What a filter drops becomes -inf, so the rest is renormalised by the next softmax.

# %%
caught = []


def catching(logits, batch):
    caught.append(logits[0].float())
    return sampler(logits, batch)


sampler = sampling_rows._sampler
with patch.object(sampling_rows, "_sampler", catching):
    llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True), use_tqdm=False)
entropy = [-(p * p.clamp(min=1e-12).log()).sum() for p in (c.softmax(-1) for c in caught)]
logits = caught[int((torch.stack(entropy) - 2).abs().argmin())][None]  # [1, V]

one = lambda value: torch.tensor([value])
stages = {"the model's own": logits, "temperature 0.8": logits / 0.8}
stages["then min_p 0.02"] = filters.apply_min_p_filtering(stages["temperature 0.8"], one(0.02))
stages["then top_k 6"] = filters.apply_top_k_filtering(stages["then min_p 0.02"], one(6))
stages["then top_p 0.8"] = filters.apply_top_p_filtering(stages["then top_k 6"], one(0.8))

top = logits[0].topk(16).indices
figure, panels = plt.subplots(1, 5, figsize=(12, 3.2), sharey=True)
for panel, (title, values) in zip(panels, stages.items(), strict=True):
    probs = values.softmax(-1)[0]
    kept = int(values.isfinite().sum())
    panel.barh(range(16), probs[top], color=["tab:blue" if p > 0 else "0.8" for p in probs[top]])
    panel.set_title(f"{title}\n{kept:,} tokens left", fontsize=10)
    panel.set(yticks=range(16), yticklabels=[repr(llm.tokenizer.decode([int(t)])) for t in top], ylim=(15.6, -0.6))
figure.tight_layout()
plt.show()

left = [set(values[0].isfinite().nonzero().flatten().tolist()) for values in stages.values()]
assert all(after <= before for before, after in zip(left, left[1:])) and int(top[0]) in left[-1]

# %% [markdown]
# ## See it: what RoPE rotates
#
# RoPE takes the dimensions in pairs and turns each pair by position times its own frequency. Below, the engine's own table turns the
# vector (1, 0) in three pairs of a head: the first pair is a clock's second hand, the last an hour hand. To the right, what it
# is for: the score of a fixed query and key depends on how far apart they are, and not on where they are.

# %%
native = load(model_impl="native")
rope = native.engine.executor._worker.runner.model.model.layers[0].self_attn.rope
dim = rope.cos_sin_cache.shape[1]
positions = torch.arange(24)
unit = torch.cat((torch.ones(dim // 2), torch.zeros(dim // 2))).expand(24, 1, dim)
turned, _ = rope(positions, unit, unit)

figure, panels = plt.subplots(1, 4, figsize=(12, 3), gridspec_kw={"width_ratios": [1, 1, 1, 1.6]})
for panel, pair in zip(panels, [0, dim // 8, dim // 4], strict=False):
    x, y = turned[:, 0, pair], turned[:, 0, pair + dim // 2]
    panel.scatter(x, y, c=positions, cmap="viridis", s=24)
    panel.plot([0, x[1]], [0, y[1]], color="0.6", lw=1)
    panel.set(title=f"pair {pair}", xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal", xticks=[], yticks=[])

torch.manual_seed(0)
query, key = torch.randn(1, 1, dim), torch.randn(1, 1, dim)
key = query + 0.5 * key  # alike, so that nearness shows
scores = {}
for origin in (0, 50, 200):
    q, k = query.expand(64, 1, dim), key.expand(64, 1, dim)
    turned_q, _ = rope(origin + torch.arange(64), q, q)
    turned_k, _ = rope(torch.full((64,), origin), k, k)
    scores[origin] = (turned_q * turned_k).sum(-1).flatten() / dim**0.5
    panels[3].plot(scores[origin], lw=5 - 2 * len(scores) + 2, alpha=0.7, label=f"key at {origin}")
panels[3].set(title="score of one query and one key", xlabel="distance")
panels[3].legend(frameon=False)
figure.tight_layout()
plt.show()
assert torch.allclose(scores[0], scores[200], atol=1e-3)

# %% [markdown]
# ## Measure: prefill against decode
#
# A step of T tokens does about 2 · P · T floating-point operations (P parameters, a multiplication and an addition each) and reads the
# weights once, 4 · P bytes in float32. So its *arithmetic intensity* is T / 2 operations per byte: one number that says whether
# arithmetic or memory is the limit. We measure both limits of this machine, reading as many bytes as the model has, and then
# the engine's prefill at several lengths.

# %%
def best(function, repeat=7):
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


model = native.engine.executor._worker.runner.model
layers = sum(p.numel() for p in model.model.layers.parameters())
head = model.lm_head.weight.numel()  # used for the last token alone
params = layers + head
big, vector = torch.randn(params // 1024, 1024), torch.randn(1024)
square = torch.randn(1024, 1024)
bandwidth = 4 * big.numel() / best(lambda: big @ vector)
peak = 2 * 1024**3 / best(lambda: square @ square, 4)

lengths, rates = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], []
for T in lengths:
    ids = (torch.arange(T) % 200 + 20).tolist()
    seconds = best(lambda ids=ids: native.generate(ids, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False), 4)
    rates.append((2 * (layers * T + head), 4 * params, seconds))
decode = statistics.median(with_cache(native, prompt_ids, 48)[1][1:])

figure, axes = plt.subplots(figsize=(7.5, 3.6))
intensity = torch.logspace(-1, 3, 100)
axes.loglog(intensity, torch.minimum(intensity * bandwidth, torch.tensor(peak)) / 1e9, color="0.5", label="this machine's roof")
axes.loglog([f / b for f, b, _ in rates], [f / s / 1e9 for f, _, s in rates], "o-", color="tab:red", label="prefill of T tokens")
axes.loglog([0.5], [2 * params / decode / 1e9], "s", color="tab:blue", ms=8, label="decode, one token a step")
for T, (f, b, s) in zip(lengths, rates, strict=True):
    axes.annotate(str(T), (f / b, f / s / 1e9), textcoords="offset points", xytext=(5, -11), fontsize=8)
axes.set(xlabel="floating-point operations per byte of weights", ylabel="Gflop/s", title="Prefill and decode on a roofline")
axes.legend(frameon=False, loc="lower right")
plt.show()
print(f"reads {bandwidth / 1e9:.1f} GB/s, multiplies {peak / 1e9:.0f} Gflop/s: the roof bends at T = {2 * peak / bandwidth:.0f}")
print(f"first token after 8 tokens {1e3 * rates[3][2]:.1f} ms, after 256 {1e3 * rates[8][2]:.1f} ms: {rates[8][2] / rates[3][2]:.1f} times")
print(f"decode: {1e3 * decode:.2f} ms a token; the weights alone take {4e3 * params / bandwidth:.2f} ms to read")
assert rates[-1][0] / rates[-1][2] > 3 * rates[0][0] / rates[0][2], "long prompts use the machine better"

# %% [markdown]
# Decode sits at the far left: one token for one whole pass over the weights. Prefill climbs to the right, because T tokens share
# that pass. The gap below the roof is Python and the dispatch of some hundred small operations, which at this size weighs more than
# the memory. On a GPU with a real model the same picture holds with a roof that bends at some hundreds of tokens. Nearly everything
# that follows in this course is about moving decode to the right (M2: several sequences share the pass) and closing the gap (M4, M6).
#
# ## Measure: Hugging Face's model against ours
#
# `model_impl` is one switch. With our layers the tokens are the same; with a cache that grows by `torch.cat` they are not meant to be fast yet.

# %%
params_of = {"hf": llm, "native": native}
results = {}
for name, one_llm in params_of.items():
    outputs = [one_llm.generate(PROMPT, GREEDY, use_tqdm=False)[0] for _ in range(3)]
    results[name] = outputs[0]["token_ids"]
    ttft = min(o.metrics.ttft for o in outputs)
    tpot = min(o.metrics.tpot for o in outputs)
    print(f"{name:7}  TTFT {1e3 * ttft:5.1f} ms   TPOT {1e3 * tpot:5.2f} ms   {1 / tpot:5.0f} tokens/s")
assert results["hf"] == results["native"]

# %% [markdown]
# ## Compare
#
# | | this milestone | nano-vLLM | vLLM |
# |---|---|---|---|
# | model | Hugging Face's, or ours (`native`) | own Qwen3 | own, some hundred architectures |
# | step | one sequence | prefill *or* decode, many sequences | many sequences, prefill and decode mixed |
# | KV cache | grows by concatenation | in blocks | in blocks |
# | sampling | filters, Gumbel-max with Philox noise | temperature; exponential noise, `argmax` | filters; exponential noise, `argmax`; FlashInfer kernels |
# | seed per request | yes, the same text in any batch | no | yes, a generator a request |
# | text | incremental, whole characters | decoded at the end | incremental, whole characters |
#
# The names are the same on purpose: who has read `LLMEngine`, `Scheduler`, `ModelRunner` and `Sequence` here finds them there.
#
# ## Break it
#
# Three small mistakes, each in one function that you write. Guess which is visible at the first word.

# %%
import folovllm.attention.backends.torch_cat as torch_cat

true_attention, true_mask = torch_cat.naive_attention, torch_cat.create_causal_mask
no_mask = lambda new, total, device=None: torch.ones(new, total, dtype=torch.bool)
no_scale = lambda q, k, v, scale, mask=None: true_attention(q, k, v, 1.0, mask)
no_turn = lambda x, cos, sin: x

breaks = {
    "as it is": [],
    "no causal mask": [patch.object(torch_cat, "create_causal_mask", no_mask)],
    "no scale": [patch.object(torch_cat, "naive_attention", no_scale)],
    "no RoPE": [patch.object(rotary_embedding, "rotate", no_turn)],
}
said = {}


def log_p(answer):
    """Log-probability of the first token: `logprobs` has a dictionary a token, by token id."""
    return answer.logprobs[0][answer.token_ids[0]].logprob


for name, patches in breaks.items():
    for p in patches:
        p.start()
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=0)
    said[name] = native.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    for p in patches:
        p.stop()
    print(f"{name} (log p of the first token {log_p(said[name]):.3f})\n{said[name].text!r}\n")
assert said["as it is"].token_ids == preset_tokens
assert all(said[name].token_ids != preset_tokens for name in ("no scale", "no RoPE"))
first = {name: log_p(answer) for name, answer in said.items()}
assert abs(first["no causal mask"] - first["as it is"]) > 1e-3, "wrong numbers, whatever the text looks like"
assert native.generate(PROMPT, GREEDY, use_tqdm=False)[0]["token_ids"] == preset_tokens, "nothing stayed broken"

# %% [markdown]
# The scale and RoPE are visible within a sentence: words and grammar survive for a while, the thread is lost. The missing mask is the
# treacherous one. A decoding step has one token and no future to hide, so only the prompt was computed wrongly, and the story may
# come out as good as before. Its numbers are wrong all the same. That is why the tests of this course compare logits with a
# reference, and do not read the text.
#
# And a stop string in the middle of tokens. The text must be cut exactly there, and what streams must never show a character
# that is taken back later:

# %%
whole = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["text"]
stop = whole[30:35]
engine.add_request("stop", PROMPT, SamplingParams(temperature=0, max_tokens=48, stop=[stop]))
shown = ""
while engine.has_unfinished_requests():
    for output in engine.step():
        shown += output.outputs[0].delta_text
print(f"stop at {stop!r}: {shown!r}, finish_reason {output.outputs[0].finish_reason!r}")
assert shown == whole[: whole.index(stop)] == output.outputs[0].text

# %% [markdown]
# ## Your predictions

# %%
print(f"1. no cache: from {1e3 * early:.0f} ms for an early token to {1e3 * late:.0f} ms for a late one; with the cache {steady:.1f} times")
print(f"2. 256 tokens of prompt against 8: {rates[8][2] / rates[3][2]:.1f} times the wait, not 32")
print(f"3. the model takes {model_share:.0%} of a step")
print(f"4. without RoPE: {said['no RoPE'].text[:80]!r}...")
print(f"5. C gets its first token in step {next(turn.number for turn in run.turns if 'C' in turn.drawn)}")

# %% [markdown]
# ## What the next milestone is for
#
# Four requests at once, and each waits for all before it:

# %%
outputs = llm.generate([PROMPT] * 4, GREEDY, use_tqdm=False)
waits = [o.metrics.ttft for o in outputs]
print("TTFT:", ", ".join(f"{1e3 * w:.0f} ms" for w in waits))
assert waits == sorted(waits) and waits[3] > 2 * waits[0]

# %% [markdown]
# Arithmetic is not the bottleneck: each step reads all weights to serve one token of one request. [M2](../notebooks/m2_continuous_batching.ipynb)
# lets the requests share that pass.

# %% [markdown]
# ## Beside the exercises: build a decode loop with a cache of its own
#
# `python -m milestones build m1` gives you an empty file, the protocol and the tests; the structure is yours, and no exercise needs it. The score
# counts the bytes that the caches move: by concatenation each token copies all that was there. *Of the least* is that number over the smallest possible one: each K and V written once and read once.
# It decides the medal: bronze up to 10, silver up to 2, gold up to 1.1. Once yours is begun, it has a row too.

# %%
from IPython.display import Markdown

from milestones.builders import own_scores

Markdown(own_scores("m1"))
