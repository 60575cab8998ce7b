# %% [markdown]
# # X3: speculative decoding
#
# A step that computes one token reads all weights, and a step that computes five of one sequence reads them once as well. So draft four tokens,
# let the model verify them in one step, and keep those that it would have sampled. Here you see why that is cheap, how often draft tokens are accepted,
# and what breaks if draft tokens are kept unverified.
#
# The [chapter](../docs/x3_speculation.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("x3")

# %%
import inspect
import time
import warnings
from statistics import median
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from folovllm import LLM, SamplingParams
from folovllm.cache.block_manager import BlockManager
from folovllm.models.files import resolve_model
from folovllm.electives.spec_decode.automaton import SuffixAutomaton
from folovllm.electives.spec_decode.choose import best_draft_lengths
from folovllm.electives.spec_decode.ngram import Lookup
from folovllm.electives.spec_decode.oracle import Oracle
from folovllm.electives.spec_decode.proposer import Proposer
from folovllm.electives.spec_decode.verify import accept

disable_progress_bar()
torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
FOLDER = resolve_model("stories-5m")
MODEL = {"model": "stories-5m", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4, "use_tqdm": False}
STORY = "Tell me a story about Lily and a red kite."


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. A step computes one token of a sequence, or eight of them. How many times longer does the second take?
# 2. Each draft token is accepted with probability 0.7 if those before it were. How many tokens does a step with 4 draft tokens give on average? With 100?
# 3. Two models put the probabilities 0.6 and 0.5 on the same token. Both sample with the same noise. Can they agree more often than in one of two samples?
# 4. In which of these does prompt lookup help: a story, a JSON list, a program that is written again with one name changed?
# 5. An engine keeps draft tokens that were wrong. Does it crash?
#
# ## Feel the problem
#
# One token a step. The model's arithmetic for one token is a product of each weight matrix with a single vector: the weights come from memory for it, and
# go unused again. With eight vectors the same weights are read once.

# %%
model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)


def milliseconds(width, rounds=7):
    ids = torch.randint(3, 4000, (1, width))
    times = []
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.process_time()
            model(ids)
            times.append(1e3 * (time.process_time() - start))
    return median(times)


widths = [1, 2, 4, 8, 16]
took = [milliseconds(width) for width in widths]
for width, ms in zip(widths, took, strict=True):
    print(f"{width:3} tokens in a step: {ms:6.2f} ms, {ms / width:5.2f} ms a token")
assert took[3] < 8 * took[0], "eight tokens cost less than eight steps"

# %% [markdown]
# ## The mini: draft, verify, accept
#
# (It has the ideas of x3.1 and x3.2 in it. To find them yourself, read on from "Your turn" and come back.)
#
# No engine: transformers' model, no cache, greedy. All samples of a step come out of one forward pass; those behind the first rejected draft token are thrown away.
#
# The text is a conversation in which the same story is asked for twice: what an edited program or a quoted text is for a larger model.

# %%
def look_up(tokens, k, n=2):
    """What followed the last n tokens the last time."""
    for start in range(len(tokens) - n - 1, -1, -1):
        if tokens[start : start + n] == tokens[-n:]:
            return tokens[start + n : start + n + k]
    return []


@torch.inference_mode()
def write(prompt, count, propose):
    """`count` tokens behind the prompt, and how many came from each step."""
    tokens, steps = list(prompt), []
    while len(tokens) < len(prompt) + count:
        draft = propose(tokens)[: len(prompt) + count - len(tokens) - 1]
        logits = model(torch.tensor([tokens + draft])).logits[0]
        sampled = logits[len(tokens) - 1 :].argmax(-1).tolist()  # one token after the newest, and one after each draft token
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == sampled[num_accepted]:
            num_accepted += 1
        tokens += sampled[: num_accepted + 1]  # the accepted draft tokens, and the bonus
        steps.append(num_accepted + 1)
    return tokens[len(prompt) :], steps


def chat(*turns):
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


once, _ = write(chat(STORY), 130, lambda tokens: [])
prompt = chat(STORY, tokenizer.decode(once[: once.index(2)]), STORY)  # 2 ends an answer
plain, steps_plain = write(prompt, 40, lambda tokens: [])
fast, steps_fast = write(prompt, 40, lambda tokens: look_up(tokens, k=6))
assert fast == plain, "drafts change the speed and never the text"
lines = sum(1 for line in In[-1].splitlines() if line.strip())
assert lines <= 80, lines
print(f"{lines} lines; {len(steps_plain)} steps without drafts, {len(steps_fast)} with: {steps_fast}")

llm = LLM(milestone="m6", **MODEL)
engine_says = list(llm.generate([prompt], greedy(40), use_tqdm=False)[0].outputs[0].token_ids)
assert engine_says == plain, "the engine writes the same text"
llm.close()

# %% [markdown]
# ### Rejection sampling, as others do it
#
# With a temperature above 0 a sample is random, and equality with a draft token is a matter of luck. The classic way (Leviathan et al., Chen et al., both 2023) samples
# anew: the draft model sampled x from its distribution q; accept it with the probability min(1, p(x) / q(x)), and if not, sample from what is left of p,
# max(0, p - q), scaled to 1. The result has exactly the distribution p. The test of it:

# %%
def rejection_step(p, q, rng):
    """One draft token from q, verified against p: (the token, whether the draft token was accepted)."""
    x = rng.choice(len(q), p=q)
    if rng.random() < min(1.0, p[x] / q[x]):
        return x, True
    left = np.maximum(p - q, 0.0)
    return rng.choice(len(p), p=left / left.sum()), False


def shared_noise_step(p, q, rng):
    """Both sample with the same Gumbel noise: (the model's token, whether the draft's was the same)."""
    noise = rng.gumbel(size=len(p))
    token, draft_token = np.argmax(np.log(p) + noise), np.argmax(np.log(q) + noise)
    return token, token == draft_token


p, q = np.array([0.6, 0.25, 0.1, 0.05]), np.array([0.5, 0.2, 0.2, 0.1])
rng, count = np.random.default_rng(0), 20_000
for step in (rejection_step, shared_noise_step):
    tokens, accepted = zip(*(step(p, q, rng) for _ in range(count)), strict=True)
    seen = np.bincount(tokens, minlength=4)
    chi_square = float(((seen - count * p) ** 2 / (count * p)).sum())
    print(f"{step.__name__:18} sampled {seen / count}, accepted {np.mean(accepted):.3f} of the draft tokens, chi-square {chi_square:.1f}")
    assert chi_square < 16.3, "three degrees of freedom: one sample in a thousand of a right sampler lies above"
overlap, least = np.minimum(p, q).sum(), np.minimum(p, q).sum() / np.maximum(p, q).sum()
print(f"no method accepts more than {overlap:.3f} on average; shared noise accepts {least:.3f} at least; two separate samples agree in {(p * q).sum():.3f}")

# %% [markdown]
# Rejection sampling accepts the most that is possible, 1 minus the distance of p and q. Shared noise accepts a little less, and has what rejection has not: with a seed the text is the
# same *token for token* with drafts and without, in any batch, with penalties and grammars. Nothing has to be proven about a second way of sampling, because there is none.
#
# ## Your turn
#
# Six functions, five exercises. In a terminal:
#
# ```
# python -m milestones start x3        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint x3.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
EXERCISES = {
    "x3.1": [Lookup.extend, Lookup.propose],
    "x3.2": [accept],
    "x3.3": [BlockManager.truncate],
    "x3.4": [best_draft_lengths],
    "x3.5": [SuffixAutomaton.follow],
}
for id, functions in EXERCISES.items():
    for f in functions:
        print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def accept{inspect.signature(accept)}:\n")
print(inspect.getdoc(accept))

# %% [markdown]
# ## See it: token by token
#
# The real engine, and a proposer that shows what it is asked. A step's draft tokens are ghosts until the model has verified them: green was accepted, red
# rejected, and blue is the bonus, the token that the model sampled itself.

# %%
class Shown(Proposer):
    """Passes drafts on, and keeps each with the length of the text that it was made for."""

    def __init__(self, inner):
        self.inner, self.made = inner, []

    def propose(self, state, k):
        draft = list(self.inner.propose(state, k))
        self.made.append((len(state.token_ids) - state.num_prompt_tokens, draft))
        return draft


def answer(prompt, proposer, count=60, k=4, **more):
    """The tokens of an answer with drafts, and the speculation's counts."""
    config = {"method": proposer, "num_speculative_tokens": k}
    with LLM(**MODEL, speculative_config=config, **more) as llm:
        tokens = list(llm.generate([prompt], greedy(count), use_tqdm=False)[0].outputs[0].token_ids)
        return tokens, llm.engine.scheduler.speculation


def draw_steps(made, tokens):
    """A row a step: its draft, and what the model sampled."""
    figure, axis = plt.subplots(figsize=(10, 0.34 * min(len(made), 18) + 0.5), layout="constrained")
    for row, (at, draft) in enumerate(made[:18]):
        num_accepted = next((i for i, g in enumerate(draft) if at + i >= len(tokens) or tokens[at + i] != g), len(draft))
        cells = [(g, "#9bd19b" if i < num_accepted else "#e8a0a0") for i, g in enumerate(draft)]
        if at + num_accepted < len(tokens):
            cells.insert(num_accepted, (tokens[at + num_accepted], "#a9c4ee"))
        for column, (token, color) in enumerate(cells):
            word = repr(tokenizer.decode([token]))[1:-1]
            axis.text(column, -row, word, va="center", bbox={"facecolor": color, "edgecolor": "none", "pad": 2})
    axis.set(xlim=(-0.2, 6), ylim=(-min(len(made), 18), 1))
    axis.axis("off")
    plt.show()


from folovllm.electives.spec_decode.ngram import NgramProposer

shown = Shown(NgramProposer(1, 3))
tokens, counts = answer(prompt, shown)
draw_steps(shown.made, tokens)
print(f"{len(tokens)} tokens; {counts.num_accepted} of {counts.num_draft_tokens} draft tokens were accepted")

# %% [markdown]
# And as a film: two requests in M5, and a small model that drafts four tokens for each in every step. Go through it with the arrow keys. In a text the accepted
# draft tokens are underlined, the bonus has a frame, and what was rejected is struck out; in the cache the same tokens stand at the foot of their slots.

# %%
from folovllm.apps.inspector import film, show

DRAFT = {"method": "draft_model", "model": "stories-draft", "num_speculative_tokens": 4, "adaptive": False}
SMALL = {**MODEL, "milestone": "m5", "max_model_len": 96, "num_kv_blocks": 14, "block_size": 8}
with LLM(**SMALL, speculative_config=DRAFT) as drafted, film(drafted, "A small model drafts") as run:
    asks = {"Once upon a time there was a little": greedy(40), "Lily had a red kite. One day": greedy(56)}
    drafted.generate([*asks], [*asks.values()], use_tqdm=False)
assert '"DraftsVerified"' in run.text
show(run, height=480)

# %% [markdown]
# ## Measure: how many tokens to draft
#
# An oracle that knows the answer and errs on purpose, with a chance that we choose: so the acceptance is a number that we turn, and not luck. If each draft token is accepted with probability a where those before
# it were, k of them give 1 + a + ... + a^k tokens a step.

# %%
ids = chat(STORY)
with LLM(**MODEL) as plain_llm:
    text = list(plain_llm.generate([ids], greedy(80), use_tqdm=False)[0].outputs[0].token_ids)

fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for a, color in ((0.5, "tab:red"), (0.8, "tab:green")):
    ks, per_step = [1, 3, 6], []
    for k in ks:
        tokens, counts = answer(ids, Oracle({tuple(ids): text}, a, 4096), count=len(text), k=k)
        assert tokens == text, "an oracle that errs costs time and never changes the text"
        per_step.append(1 + counts.num_accepted / counts.num_drafts)
    expected = [(1 - a ** (k + 1)) / (1 - a) for k in ks]
    axis.plot(ks, expected, "--", color=color, linewidth=1)
    axis.plot(ks, per_step, "o-", color=color, label=f"a = {a}")
    print(f"a = {a}: tokens a step {[round(n, 2) for n in per_step]}, expected {[round(n, 2) for n in expected]}")
axis.set(xlabel="draft tokens a step", ylabel="tokens a step", xticks=ks)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Eighty tokens are few, so chance shows; the curves are the expectation. More draft tokens give more tokens, and cost more. With the costs of this computer, measured above, the best number is the one with the most tokens a second:

# %%
from folovllm.electives.spec_decode.choose import Curve, StepCost

curve = Curve(tuple(map(float, widths)), tuple(np.maximum.accumulate(took)))
for a in (0.1, 0.3, 0.5, 0.7, 0.9):
    (k,) = best_draft_lengths(np.ones(1), np.array([a]), StepCost(curve), 8)
    tokens_a_step = (1 - a ** (k + 1)) / (1 - a)
    gain = tokens_a_step * took[0] / np.interp(k + 1, widths, took)
    print(f"a = {a}: draft {k}; {gain:.2f} times the speed of plain decoding")

# %% [markdown]
# ## The switch, off and on
#
# Two kinds of text with `speculative_config={"method": ...}`: what counts on a CPU are the processor's seconds. `adaptive` is on: where drafts do not pay, the engine stops asking for them.

# %%
JSON = {"type": "array", "minItems": 4, "maxItems": 4, "items": {"type": "object", "additionalProperties": False,
        "properties": {"animal": {"enum": ["dog", "cat", "fox"]}, "is_friendly": {"type": "boolean"}, "color": {"enum": ["red", "blue"]}},
        "required": ["animal", "is_friendly", "color"]}}  # fmt: skip
LIST = SamplingParams(temperature=0, max_tokens=150, structured_outputs={"json": JSON, "disable_any_whitespace": True})
results = {}
for name, config in {"off": None, "ngram": {"method": "ngram", "num_speculative_tokens": 8}}.items():
    with LLM(**MODEL, **({"speculative_config": config} if config else {})) as llm:
        for kind, params in (("a story", greedy(80)), ("a JSON list", LIST)):
            start = time.process_time()
            tokens = list(llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids)
            results[kind, name] = (1e3 * (time.process_time() - start) / len(tokens), tokens)
for kind in ("a story", "a JSON list"):
    (off, plain_text), (on, fast_text) = results[kind, "off"], results[kind, "ngram"]
    print(f"{kind:12} {off:5.2f} ms a token off, {on:5.2f} ms on: {off / on:.2f} x")
    assert plain_text == fast_text

# %% [markdown]
# ## Compare
#
# | | drafts from | accepts | turns itself off |
# |---|---|---|---|
# | this engine | prompt lookup, suffix automaton, a draft model | by equality, noise shared | yes: tokens a second, for each sequence |
# | vLLM | the same, and heads that are trained (Medusa, EAGLE, MTP) | rejection sampling | no: a number of draft tokens is set |
# | nano-vllm | - | - | - |
#
# ## Break it
#
# **Forget the bonus token.** The answer is the same as long as every step accepts a draft token. At the first step without one nothing is added, and the loop never ends: here it is stopped after 200 steps.

# %%
def without_bonus(prompt, count, propose):
    tokens, steps = list(prompt), 0
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count and steps < 200:
            draft = propose(tokens)
            sampled = model(torch.tensor([tokens + draft])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
            tokens += accept(sampled, draft)[:-1]
            steps += 1
    return len(tokens) - len(prompt), steps


written, steps = without_bonus(ids, 40, lambda tokens: look_up(tokens, k=6))
print(f"{written} tokens after {steps} steps")
assert written < 40

# %% [markdown]
# **Keep what was not verified.** An engine that keeps all draft tokens, right or wrong: nothing crashes, and nothing warns. The text is simply the proposer's, with a word of the model here and there.

# %%
from folovllm.electives.spec_decode import verify

with patch.object(verify, "accept", lambda sampled, draft: [*draft, sampled[len(draft)]]):
    wrong, _ = answer(ids, Oracle({tuple(ids): text}, 0.7, 4096), count=60)
print("the model's:", tokenizer.decode(text[:40]))
print("with draft tokens that were kept:", tokenizer.decode(wrong[:40]))
assert wrong != text[:60]

# %% [markdown]
# **Publish a rejected block.** A prefix cache finds blocks by the hash of their tokens. In the miniature below "K/V" is what was written for a token; a block of four gets its name from the tokens that are known.
# A careless engine names a block when it is *full*, draft tokens included. The next request with these tokens adopts it.

# %%
def publish(text_so_far, written_tokens, careful, size=4):
    """Name each full block by its tokens: those of the text, or those that were written, draft tokens included."""
    source = text_so_far if careful else written_tokens
    return {tuple(source[i : i + size]): written_tokens[i : i + size] for i in range(0, len(source) - size + 1, size)}


kept, written = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 9, 9]  # 9 9 were drafted, and rejected; then 7 8 are sampled
cache = publish(kept, written, careful=False)
print("named too early:", cache)
after = {**cache, (5, 6, 7, 8): written[4:8]}  # the text went on with 7 8, and the block got its name without being computed again
print(f"a request with 5 6 7 8 gets the K/V of {after[5, 6, 7, 8]}")
assert (5, 6, 9, 9) in cache and (5, 6, 9, 9) not in publish(kept, written, careful=True)

# %% [markdown]
# In the engine draft tokens are in a step's scheduled sequences and nowhere else: a sequence has only tokens that were sampled, and `num_computed_tokens` counts only these. A block is named when all of its tokens
# are computed *and* sampled, so there is nothing to take back. `tests/x3/test_cut_back.py` checks that no draft token is ever read or found again, with prefix caching and preemption, over random runs.
#
# ## Where you are
#
# ```
# pytest -m x3 --mine
# folovllm generate "..." --speculative-method ngram --num-speculative-tokens 8
# ```
