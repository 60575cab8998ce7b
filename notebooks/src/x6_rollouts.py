# %% [markdown]
# # X6: rollouts for reinforcement learning
#
# An engine answers for a trainer: it samples, the trainer learns, the new weights go back. Here you see why engine and trainer usually disagree in the last bits, make them agree,
# change weights while the engine runs, find a stale prefix, and watch a reward rise.
#
# The [chapter](../docs/x6_rollouts.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("x6")

# %%
import inspect
import time
import warnings
from itertools import islice
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from folovllm import LLM, SamplingParams
from folovllm.models.files import resolve_model
from folovllm.models.registry import PLAIN_LAYERS
from folovllm.electives.rollouts import demo, weights
from folovllm.electives.rollouts.attention import attend_in_tiles
from folovllm.electives.rollouts.demo_options import Options
from folovllm.electives.rollouts.generation import generation_root
from folovllm.electives.rollouts.grpo import group_advantages, importance_ratio
from folovllm.electives.rollouts.trainer import Policy

disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
MODEL = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 32, "num_kv_blocks": 400, "use_tqdm": False}

# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. The same row, the same weights: once in a product of 1 row, once in a product of 64. Are the results the same bits?
# 2. In which share of sampled tokens do engine and trainer report the same log-probability, in float32? In bfloat16?
# 3. What does it cost, in time a step, to make that share 100%: for one sequence, and for 32?
# 4. The weights change and the prefix cache stays. Does the next answer look wrong?
#
# ## Feel the problem
#
# One row in products of several sizes.

# %%
x, w = torch.randn(256, 256), torch.randn(768, 256)
whole = F.linear(x, w)
for rows in (1, 2, 3, 4, 8, 16, 32, 64):
    parts = torch.cat([F.linear(part, w) for part in x.split(rows)])
    place = torch.cat([F.linear(part, w) for part in x.flip(0).split(rows)]).flip(0)
    print(f"{rows:3} rows: as in a product of 256: {torch.equal(parts, whole)!s:5}   wherever the row stands: {torch.equal(parts, place)}")

# %% [markdown]
# The first column depends on the library and the processor. The second is what we build on: in a product of *one* shape, a row's result does not depend on its place or its neighbours.
#
# ## The mini: a loop of GRPO
#
# (It has the ideas of x6.1 and x6.4 in it. To find them yourself, read on from "Your turn" and come back.)
#
# No engine: transformers' model rolls out, and learns. The reward is how often the answer names the colour. It is slow, for it computes every token's whole context again.

# %%
FOLDER = resolve_model("stories-5m")
tokenizer, policy = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), 3e-4, weight_decay=0.0)
ask = [{"role": "user", "content": "Tell me a story about a blue kite."}]
prompt = torch.tensor([tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_dict=False)])


@torch.no_grad()
def roll_out(n, count):
    ids = prompt.repeat(n, 1)
    for _ in range(count):
        ids = torch.cat([ids, policy(ids).logits[:, -1].softmax(-1).multinomial(1)], dim=1)
    return ids


def logprobs_of(ids):
    logits = policy(ids).logits[:, prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, prompt.shape[1] :, None])[..., 0]  # [n, count]


for iteration in range(3):
    ids = roll_out(8, 16)
    texts = tokenizer.batch_decode(ids[:, prompt.shape[1] :])
    rewards = torch.tensor([float(text.count("blue")) for text in texts])
    advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 0.1)
    sampled = logprobs_of(ids).detach()
    ratio = (logprobs_of(ids) - sampled).exp()
    loss = -(ratio * advantages[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iteration {iteration}: mean reward {rewards.mean():.2f}")

lines = sum(1 for line in In[-1].splitlines() if line.strip())
assert lines <= 80, lines
print(f"{lines} lines")

# %% [markdown]
# ## Your turn
#
# Four functions, four exercises. In a terminal:
#
# ```
# python -m milestones start x6        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint x6.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
EXERCISES = {"x6.1": group_advantages, "x6.2": generation_root, "x6.3": attend_in_tiles, "x6.4": importance_ratio}
for id, f in EXERCISES.items():
    print(f"{id}  {f.__module__}:{f.__name__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def group_advantages{inspect.signature(group_advantages)}:\n")
print(inspect.getdoc(group_advantages))

# %% [markdown]
# ## See it: two numbers that should be one
#
# The engine samples and reports each token's log-probability. The trainer computes it again. How far is their quotient from 1?

# %%
PROMPTS = ["Once upon a time", "The red kite flew", "A dog ran to", "Tom was sad because"]
SAMPLED = SamplingParams(n=4, temperature=1.0, max_tokens=24, logprobs=0, seed=0, ignore_eos=True)


def distances(dtype, batch_invariant):
    """|ratio - 1| of each sampled token."""
    with LLM(dtype=dtype, batch_invariant=batch_invariant, **MODEL) as llm:
        outputs = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
        pairs = [(output, answer) for output in outputs for answer in output.outputs]
        trainer = Policy(llm, None if batch_invariant else PLAIN_LAYERS)
        sequences = [[*output.prompt_token_ids, *answer.token_ids] for output, answer in pairs]
        with torch.no_grad():
            found = torch.cat(trainer.logprobs(sequences, [len(output.prompt_token_ids) for output, _ in pairs]))
        engine = torch.cat([demo.engine_logprobs(answer) for _, answer in pairs])
        return (importance_ratio(found, engine) - 1).abs()


gaps = {(d, b): distances(d, b) for d in ("float32", "bfloat16") for b in (False, True)}
for (dtype, batch_invariant), gap in gaps.items():
    print(f"{dtype:8} {'batch-invariant' if batch_invariant else 'plain':15}  equal {(gap == 0).float().mean():4.0%}   largest distance of a ratio from 1: {gap.max():.1e}")
assert not gaps["float32", True].any(), "not one bit differs"

fig, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
for dtype in ("float32", "bfloat16"):
    axis.plot(gaps[dtype, False].clamp(min=1e-8).sort().values, label=f"{dtype}, plain")
axis.set(yscale="log", xlabel="sampled tokens, sorted", ylabel="|ratio - 1|")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# With `batch_invariant=True` there is nothing to draw: all are 0.
#
# ## Measure: the switch, off and on
#
# Processor time of a decode step.

# %%
def milliseconds(batch_invariant, n, count=12):
    """Of a decode step of n sequences."""
    params = SamplingParams(n=n, temperature=1.0, max_tokens=count, seed=0, ignore_eos=True)
    with LLM(batch_invariant=batch_invariant, **MODEL) as llm:
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
        start = time.process_time()
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
        return 1e3 * (time.process_time() - start) / count


for n in (1, 32):
    off, on = milliseconds(False, n), milliseconds(True, n)
    print(f"{n:2} sequences: {off:5.1f} ms, batch-invariant {on:5.1f} ms: {on / off:.1f} times as long")

# %% [markdown]
# ## See it: a reward that rises
#
# The loop of the chapter, a few iterations of it (`folovllm rl demo` takes minutes). The last column is the largest distance of a ratio from 1, before *and after* weights went back.

# %%
with LLM(batch_invariant=True, **MODEL) as llm:
    curve = []
    for each in islice(demo.train(llm, Options(answers=4)), 3):
        curve.append(each)
        print(f"reward {each.reward:.2f}   colour {each.colour:.2f}, length {each.length:.2f}   {each.words:.0f} words   off-policy {each.off_policy}")
assert all(each.off_policy == 0 for each in curve)

# %% [markdown]
# ## Break it
#
# **A stale prefix.** The weights change, and the generation does not. The prompt's K/V are found in the cache, and belong to the old model.

# %%
def first_logprobs(llm):
    """Of the first tokens behind a long prompt."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    text = "Once upon a time there was a little girl named Lily. She had a red kite. One day the kite flew away."
    return demo.engine_logprobs(llm.generate([text], params, use_tqdm=False)[0].outputs[0])


with LLM(batch_invariant=True, **MODEL) as llm:
    others = {name: w + 0.02 * w.std() * torch.randn_like(w) for name, w in llm.get_weights().items() if w.dim() == 2}
    others = {**llm.get_weights(), **others}
    first_logprobs(llm)
    llm.update_weights(others)
    right = first_logprobs(llm)

with LLM(batch_invariant=True, **MODEL) as llm, patch.object(weights, "next_generation", lambda engine: None):
    first_logprobs(llm)
    llm.update_weights(others)
    stale = first_logprobs(llm)
print("right:", [f"{value:.4f}" for value in right.tolist()])
print("stale:", [f"{value:.4f}" for value in stale.tolist()])
assert not torch.equal(right, stale)

# %% [markdown]
# The text would look fine. Only somebody who compares the numbers notices.
#
# **No mean.** All rewards are positive. Without the group's mean everything that was sampled becomes likelier, good or bad.

# %%
rewards = torch.tensor([[0.9, 1.0, 1.1, 1.0]])
print("with the mean:   ", [round(a, 2) for a in group_advantages(rewards)[0].tolist()])
print("without the mean:", [round(a, 2) for a in (rewards / rewards.std(correction=0))[0].tolist()])

# %% [markdown]
# **Sleep.** Level 2 drops the weights. What is left of the model, and is it the same afterwards?

# %%
with LLM(batch_invariant=True, **MODEL) as llm:
    before = first_logprobs(llm)
    tensors = llm.get_weights().values()
    held = sum(w.nbytes for w in tensors)
    llm.sleep(2)
    asleep = sum(w.untyped_storage().nbytes() for w in tensors)
    llm.wake_up()
    print(f"weights: {held:,} bytes, asleep {asleep:,}; the same afterwards: {torch.equal(first_logprobs(llm), before)}")
assert asleep == 0

# %% [markdown]
# ## Compare
#
# | | this engine | vLLM |
# |---|---|---|
# | batch invariance | tiles of one size, in torch | kernels of its own |
# | stale prefixes | a generation in the hash | the cache is emptied at a pause |
# | sleep | storages are freed, graphs captured again | memory is unmapped, graphs survive |
#
# ## Where you are
#
# ```
# pytest -m x6 --mine
# folovllm rl demo
# ```
#
# What an update and a night's sleep take on a GPU, `tools/measure_rollouts.py` measures.
