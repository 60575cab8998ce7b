# %% [markdown]
# # X3: speculative decoding
#
# A step that computes one token reads all weights, and a step that computes five of one sequence reads them once as well. So guess four tokens,
# let the model check them in one step, and keep those that it would have drawn. Here you see why that is cheap, how often guesses are right, and
# what breaks if a guess is taken for a fact.
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
from folovllm.spec_decode.automaton import SuffixAutomaton
from folovllm.spec_decode.choose import best_depths
from folovllm.spec_decode.ngram import Lookup
from folovllm.spec_decode.oracle import Oracle
from folovllm.spec_decode.proposer import Proposer
from folovllm.spec_decode.verify import accept

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
# 2. Each guess is right with probability 0.7 if those before it were. How many tokens does a step with 4 guesses give on average? With 100?
# 3. Two models put the probabilities 0.6 and 0.5 on the same token. Both draw with the same noise. Can they agree more often than in one draw of two?
# 4. In which of these does prompt lookup help: a story, a JSON list, a program that is written again with one name changed?
# 5. An engine keeps guesses that were wrong. Does it crash?
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
# ## The mini: guess, check, keep
#
# (It has the ideas of x3.1 and x3.2 in it. To find them yourself, read on from "Your turn" and come back.)
#
# No engine: transformers' model, no cache, greedy. All draws of a step come out of one forward pass; those behind the first wrong guess are thrown away.
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
def write(prompt, count, guess):
    """`count` tokens behind the prompt, and how many came from each step."""
    tokens, steps = list(prompt), []
    while len(tokens) < len(prompt) + count:
        guesses = guess(tokens)[: len(prompt) + count - len(tokens) - 1]
        logits = model(torch.tensor([tokens + guesses])).logits[0]
        drawn = logits[len(tokens) - 1 :].argmax(-1).tolist()  # one draw after the newest token, and after each guess
        right = 0
        while right < len(guesses) and guesses[right] == drawn[right]:
            right += 1
        tokens += drawn[: right + 1]  # what was guessed, and the bonus
        steps.append(right + 1)
    return tokens[len(prompt) :], steps


def chat(*turns):
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


once, _ = write(chat(STORY), 130, lambda tokens: [])
prompt = chat(STORY, tokenizer.decode(once[: once.index(2)]), STORY)  # 2 ends an answer
plain, steps_plain = write(prompt, 40, lambda tokens: [])
fast, steps_fast = write(prompt, 40, lambda tokens: look_up(tokens, k=6))
assert fast == plain, "guesses change the speed and never the text"
lines = sum(1 for line in In[-1].splitlines() if line.strip())
assert lines <= 80, lines
print(f"{lines} lines; {len(steps_plain)} steps without guesses, {len(steps_fast)} with: {steps_fast}")

llm = LLM(milestone="m6", **MODEL)
engine_says = list(llm.generate([prompt], greedy(40), use_tqdm=False)[0].outputs[0].token_ids)
assert engine_says == plain, "the engine writes the same text"
llm.close()

# %% [markdown]
# ### Rejection sampling, as others do it
#
# With a temperature above 0 a draw is random, and equality with a guess is a matter of luck. The classic way (Leviathan et al., Chen et al., both 2023) makes
# the draw anew: the draft drew x from its distribution q; keep it with the probability min(1, p(x) / q(x)), and if not, draw from what is left of p,
# max(0, p - q), scaled to 1. The result has exactly the distribution p. The test of it:

# %%
def rejection_step(p, q, rng):
    """One guess from q, checked against p: (the token, whether the guess was kept)."""
    x = rng.choice(len(q), p=q)
    if rng.random() < min(1.0, p[x] / q[x]):
        return x, True
    left = np.maximum(p - q, 0.0)
    return rng.choice(len(p), p=left / left.sum()), False


def shared_noise_step(p, q, rng):
    """Both draw with the same Gumbel noise: (the model's token, whether the draft's was the same)."""
    noise = rng.gumbel(size=len(p))
    mine, guess = np.argmax(np.log(p) + noise), np.argmax(np.log(q) + noise)
    return mine, mine == guess


p, q = np.array([0.6, 0.25, 0.1, 0.05]), np.array([0.5, 0.2, 0.2, 0.1])
rng, count = np.random.default_rng(0), 20_000
for step in (rejection_step, shared_noise_step):
    tokens, kept = zip(*(step(p, q, rng) for _ in range(count)), strict=True)
    seen = np.bincount(tokens, minlength=4)
    chi_square = float(((seen - count * p) ** 2 / (count * p)).sum())
    print(f"{step.__name__:18} drew {seen / count}, kept {np.mean(kept):.3f} of the guesses, chi-square {chi_square:.1f}")
    assert chi_square < 16.3, "three degrees of freedom: one sample in a thousand of a right sampler lies above"
overlap, least = np.minimum(p, q).sum(), np.minimum(p, q).sum() / np.maximum(p, q).sum()
print(f"no method keeps more than {overlap:.3f} on average; shared noise keeps {least:.3f} at least; two separate draws agree in {(p * q).sum():.3f}")

# %% [markdown]
# Rejection sampling keeps the most that is possible, 1 minus the distance of p and q. Shared noise keeps a little less, and has what rejection has not: with a seed the text is the
# same *token for token* with guesses and without, in any batch, with penalties and grammars. Nothing has to be proven about a second kind of draw, because there is none.
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
    "x3.1": [Lookup.extend, Lookup.guess],
    "x3.2": [accept],
    "x3.3": [BlockManager.truncate],
    "x3.4": [best_depths],
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
# The real engine, and a proposer that shows what it is asked. A step's guesses are ghosts until the model has looked at them: green was accepted, red
# rejected, and blue is the bonus, the token that the model drew itself.

# %%
class Shown(Proposer):
    """Passes guesses on, and keeps each with the length of the text that it was made for."""

    def __init__(self, inner):
        self.inner, self.made = inner, []

    def propose(self, state, k):
        guesses = list(self.inner.propose(state, k))
        self.made.append((len(state.token_ids) - state.num_prompt_tokens, guesses))
        return guesses


def answer(prompt, proposer, count=60, k=4, **more):
    """The tokens of an answer with guesses, and the speculation's counts."""
    config = {"method": proposer, "num_speculative_tokens": k}
    with LLM(**MODEL, speculative_config=config, **more) as llm:
        tokens = list(llm.generate([prompt], greedy(count), use_tqdm=False)[0].outputs[0].token_ids)
        return tokens, llm.engine.scheduler.speculation


def draw_steps(made, tokens):
    """A row a step: its guesses, and what the model drew."""
    figure, axis = plt.subplots(figsize=(10, 0.34 * min(len(made), 18) + 0.5), layout="constrained")
    for row, (at, guesses) in enumerate(made[:18]):
        right = next((i for i, g in enumerate(guesses) if at + i >= len(tokens) or tokens[at + i] != g), len(guesses))
        cells = [(g, "#9bd19b" if i < right else "#e8a0a0") for i, g in enumerate(guesses)]
        if at + right < len(tokens):
            cells.insert(right, (tokens[at + right], "#a9c4ee"))
        for column, (token, color) in enumerate(cells):
            word = repr(tokenizer.decode([token]))[1:-1]
            axis.text(column, -row, word, va="center", bbox={"facecolor": color, "edgecolor": "none", "pad": 2})
    axis.set(xlim=(-0.2, 6), ylim=(-min(len(made), 18), 1))
    axis.axis("off")
    plt.show()


from folovllm.spec_decode.ngram import NgramProposer

shown = Shown(NgramProposer(1, 3))
tokens, counts = answer(prompt, shown)
draw_steps(shown.made, tokens)
print(f"{len(tokens)} tokens; {counts.num_accepted} of {counts.num_draft_tokens} guesses were right")

# %% [markdown]
# And as a film: two requests in M5, and a small model that guesses four tokens for each in every step. Go through it with the arrow keys. In a text the accepted
# guesses are underlined, the bonus has a frame, and what was rejected is struck out; in the cache the same tokens stand at the foot of their slots.

# %%
from folovllm.inspector import film, show

DRAFT = {"method": "draft_model", "model": "stories-draft", "num_speculative_tokens": 4, "adaptive": False}
SMALL = {**MODEL, "milestone": "m5", "max_model_len": 96, "num_kv_blocks": 14, "block_size": 8}
with LLM(**SMALL, speculative_config=DRAFT) as drafted, film(drafted, "A small model guesses") as run:
    asks = {"Once upon a time there was a little": greedy(40), "Lily had a red kite. One day": greedy(56)}
    drafted.generate([*asks], [*asks.values()], use_tqdm=False)
assert '"guess"' in run.text
show(run, height=480)

# %% [markdown]
# ## Measure: how far to guess
#
# An oracle that knows the answer and errs on purpose, with a chance that we choose: so the acceptance is a number that we turn, and not luck. If each guess is right with probability a where those before
# it were, k guesses give 1 + a + ... + a^k tokens a step.

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
axis.set(xlabel="guesses a step", ylabel="tokens a step", xticks=ks)
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Eighty tokens are few, so chance shows; the curves are the expectation. More guesses give more tokens, and cost more. With the costs of this computer, measured above, the best number is the one with the most tokens a second:

# %%
from folovllm.spec_decode.choose import Curve, StepCost

curve = Curve(tuple(map(float, widths)), tuple(np.maximum.accumulate(took)))
for a in (0.1, 0.3, 0.5, 0.7, 0.9):
    (k,) = best_depths(np.ones(1), np.array([a]), StepCost(curve, curve), 8)
    tokens_a_step = (1 - a ** (k + 1)) / (1 - a)
    gain = tokens_a_step * took[0] / np.interp(k + 1, widths, took)
    print(f"a = {a}: guess {k}; {gain:.2f} times the speed of plain decoding")

# %% [markdown]
# ## The switch, off and on
#
# Two kinds of text with `speculative_config={"method": ...}`: what counts on a CPU are the processor's seconds. `adaptive` is on: where guesses do not pay, the engine stops asking for them.

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
# | | guesses from | accepts | turns itself off |
# |---|---|---|---|
# | this engine | prompt lookup, suffix automaton, a draft model | by equality, noise shared | yes: tokens a second, for each sequence |
# | vLLM | the same, and heads that are trained (Medusa, EAGLE, MTP) | rejection sampling | no: a number of guesses is set |
# | nano-vllm | - | - | - |
#
# ## Break it
#
# **Forget the bonus token.** The answer is the same as long as every step has a right guess. At the first step without one nothing is added, and the loop never ends: here it is stopped after 200 steps.

# %%
def without_bonus(prompt, count, guess):
    tokens, steps = list(prompt), 0
    with torch.inference_mode():
        while len(tokens) < len(prompt) + count and steps < 200:
            guesses = guess(tokens)
            drawn = model(torch.tensor([tokens + guesses])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
            tokens += accept(drawn, guesses)[:-1]
            steps += 1
    return len(tokens) - len(prompt), steps


written, steps = without_bonus(ids, 40, lambda tokens: look_up(tokens, k=6))
print(f"{written} tokens after {steps} steps")
assert written < 40

# %% [markdown]
# **Take a guess for a fact.** An engine that keeps all guesses, right or wrong: nothing crashes, and nothing warns. The text is simply the proposer's, with a word of the model here and there.

# %%
import folovllm.spec_decode.verifier as checking

with patch.object(checking, "accept", lambda drawn, guesses: [*guesses, drawn[len(guesses)]]):
    wrong, _ = answer(ids, Oracle({tuple(ids): text}, 0.7, 4096), count=60)
print("the model's:", tokenizer.decode(text[:40]))
print("with guesses that were kept:", tokenizer.decode(wrong[:40]))
assert wrong != text[:60]

# %% [markdown]
# **Publish a rejected block.** A prefix cache finds blocks by the hash of their tokens. In the miniature below "K/V" is what was written for a token; a block of four gets its name from the tokens that are known.
# A careless engine names a block when it is *full*, guesses included. The next request with these tokens adopts it.

# %%
def publish(text_so_far, written_tokens, careful, size=4):
    """Name each full block by its tokens: those of the text, or those that were written, guesses included."""
    source = text_so_far if careful else written_tokens
    return {tuple(source[i : i + size]): written_tokens[i : i + size] for i in range(0, len(source) - size + 1, size)}


kept, written = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 9, 9]  # 9 9 were guessed, and wrong; then 7 8 are drawn
cache = publish(kept, written, careful=False)
print("named too early:", cache)
after = {**cache, (5, 6, 7, 8): written[4:8]}  # the text went on with 7 8, and the block got its name without being computed again
print(f"a request with 5 6 7 8 gets the K/V of {after[5, 6, 7, 8]}")
assert (5, 6, 9, 9) in cache and (5, 6, 9, 9) not in publish(kept, written, careful=True)

# %% [markdown]
# In the engine guesses are in a step's shares and nowhere else: a sequence has only tokens that were drawn, and `num_computed_tokens` counts only these. A block is named when all of its tokens
# are computed *and* drawn, so there is nothing to take back. `tests/x3/test_cut_back.py` checks that no guess is ever read or found again, with prefix caching and preemption, over random runs.
#
# ## Where you are
#
# ```
# pytest -m x3 --mine
# folovllm generate "..." --speculative-method ngram --num-speculative-tokens 8
# ```
