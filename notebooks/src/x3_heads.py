# %% [markdown]
# # X3: draft heads
#
# A draft head is one layer that reads the hidden states of a large model and drafts what the model will write next. Here you see what a hidden state
# knows about later tokens, run a chain of drafts in plain PyTorch, and break it in three ways that never change the text.
#
# The [chapter](../docs/x3_heads.md) explains at leisure. Everything here runs on a CPU, with the heads that come with the package.

# %%
from milestones.notebooks import running

running("x3")

# %%
import inspect
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from folovllm import LLM, SamplingParams
from folovllm.electives.spec_decode.heads import KeptStates, chain_places, head_inputs
from folovllm.models.files import resolve_model

disable_progress_bar()
torch.set_num_threads(1)
torch.set_grad_enabled(False)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
MODEL = {"model": "stories-5m", "device": "cpu", "max_model_len": 256, "max_num_seqs": 16, "use_tqdm": False}
EAGLE3 = {"method": "eagle3", "model": "stories-eagle3", "adaptive": False}
PROMPTS = [
    f"Tell me a story about {hero} and a {thing}."
    for hero in ("Lily", "Tom", "Mia", "Ben")
    for thing in ("red kite", "small boat", "shy dog", "drum")
]


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. A straight line (a linear map) reads the hidden state of token t. How often does it name token t + 2: hardly ever, one time in three, nearly always?
# 2. A head drafts three tokens a step, and most are right. How many tokens does a step give at most?
# 3. A head gets each token with the token's *own* hidden state, one place off. Does the text change?
# 4. Three drafts were rejected. Which of the four hidden states that the step computed does the next chain begin with?
# 5. For an 8B model one layer costs about 3% of a step. What does a step with three drafts cost at least: 1.03, 1.15 or 3 plain steps?
#
# ## Feel the problem
#
# Lookup costs nothing, but a new story repeats little of what was written before. Look at the tokens a step: 1 is what a step gives without drafts.

# %%
chat = AutoTokenizer.from_pretrained(resolve_model("stories-5m"))


def ids_of(prompt):
    text = chat.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    return chat.encode(text, add_special_tokens=False)


def write_stories(config, prompts, count=48):
    """The texts, and how many tokens a step with drafts gave."""
    with LLM(**MODEL, **({"speculative_config": config} if config else {})) as llm:
        found = llm.generate([ids_of(prompt) for prompt in prompts], greedy(count), use_tqdm=False)
        texts = [list(one.outputs[0].token_ids) for one in found]
        counts = llm.engine.scheduler.speculation if config else None
        return texts, 1 + counts.num_accepted / max(1, counts.num_drafts) if config else 1.0


stories, _ = write_stories(None, PROMPTS)
texts, per_step = write_stories({"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}, PROMPTS[:4])
assert texts == stories[:4]
print(f"ngram: {per_step:.2f} tokens a step, of at most 4")

# %% [markdown]
# ## What a hidden state knows
#
# Sixteen stories, and the model's last hidden state at each token. A linear map is fitted on twelve stories to name the token at a distance, and is asked about the other four. Beside it the same map on
# the token's *embedding*, which knows the token and nothing else. Look at the distances 2 and 3: what the hidden state knows beyond the embedding is what a head can use.

# %%
model = AutoModelForCausalLM.from_pretrained(resolve_model("stories-5m"), dtype=torch.float32).eval()
embed = model.model.embed_tokens.weight


def last_hidden(story, prompt):
    ids = ids_of(prompt)
    return model.model(torch.tensor([ids + story])).last_hidden_state[0, len(ids) :]


states = [last_hidden(story, prompt) for story, prompt in zip(stories, PROMPTS, strict=True)]


def hits(inputs, distance, train=12):
    """How often the map names the token at a distance, on stories that it was not fitted on."""
    pairs = [(x[:-distance], torch.tensor(story[distance:])) for x, story in zip(inputs, stories, strict=True)]
    x, y = (torch.cat([pair[i] for pair in pairs[:train]]) for i in (0, 1))
    wanted = F.one_hot(y, len(embed)).float()
    fitted = torch.linalg.solve(x.T @ x + 0.1 * len(x) * x.square().mean() * torch.eye(x.shape[1]), x.T @ wanted)
    x, y = (torch.cat([pair[i] for pair in pairs[train:]]) for i in (0, 1))
    return float(((x @ fitted).argmax(-1) == y).float().mean())


embedded = [embed[story] for story in stories]
for distance in (1, 2, 3):
    known, blind = hits(states, distance), hits(embedded, distance)
    print(
        f"token t + {distance}: named in {known:.0%} of the cases by the hidden state of token t, in {blind:.0%} by its embedding"
    )
assert hits(states, 2) > hits(embedded, 2), "the hidden state knows more than the word"

# %% [markdown]
# A few hundred tokens and a straight line are a poor teacher. Still the hidden state says more about token t + 2 than the word does. A head has a layer with attention, and was trained on millions of tokens.
#
# ## The mini: a chain of drafts
#
# (It has the ideas of x3.6 to x3.8 in it. To find them yourself, read on from "Your turn" and come back.)
#
# No engine and no cache: transformers' model, and the EAGLE-3 head's tensors as they are in its folder. The head computes all pairs anew each time. Read `chain` first, then the line of `write` that cuts
# `states`: this is what survives a rejection. The cell prints how many steps it took, and the tokens of a step with drafts, of at most 4.

# %%
w = {
    name: value.float() if value.is_floating_point() else value
    for name, value in load_file(resolve_model("stories-eagle3") / "model.safetensors").items()
}


def norm(x, name):
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-6)


def rope(x, positions):
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :32], x[..., 32:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def head(tokens, hidden):
    """Pairs of tokens and hidden states [n, 256] -> what a chain carries [n, 256]."""
    n, positions = len(tokens), torch.arange(len(tokens))
    both = torch.cat((norm(embed[tokens], "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")), -1)
    q, k, v = ((both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(n, -1, 64) for name in "qkv")
    q, k = rope(q, positions), rope(k, positions)
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    x = hidden + attended @ w["midlayer.self_attn.o_proj.weight"].T
    y = norm(x, "midlayer.post_attention_layernorm")
    gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T


def chain(tokens, states, k):
    """k drafts behind `tokens`, whose hidden states but the newest one's are `states`."""
    given, hidden, draft = tokens[1:], states, []  # token 1 goes with state 0: each with the state before it
    for _ in range(k):
        carried = head(given, hidden)[-1:]
        own = int((norm(carried, "norm") @ w["lm_head.weight"].T).argmax())
        draft.append(own + int(w["d2t"][own]))  # the head's id, and how far the model's lies behind it
        given, hidden = [*given, draft[-1]], torch.cat((hidden, carried))
    return draft


def write(prompt, count, k, draft_by=chain):
    """`count` tokens behind the prompt, and (draft, accepted) of each step."""
    tokens, states, steps = list(prompt), None, []
    while len(tokens) < len(prompt) + count:
        draft = [] if states is None else draft_by(tokens, states, k)
        out = model(torch.tensor([tokens + draft]), output_hidden_states=True)
        sampled = out.logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == sampled[accepted]:
            accepted += 1
        tokens += sampled[: accepted + 1]
        states = torch.cat([out.hidden_states[i][0] for i in (1, 3, 5)], -1) @ w["fc.weight"].T
        states = states[: len(tokens) - 1]  # what survives: those of rejected drafts go
        steps.append((draft, accepted))
    return tokens[len(prompt) :][:count], steps


prompt = ids_of(PROMPTS[0])
text, steps = write(prompt, 48, k=3)
assert text == stories[0], "drafts change the speed and never the text"
lines = sum(1 for line in In[-1].splitlines() if line.strip())
assert lines <= 80, lines
mini_per_step = 1 + sum(n for _, n in steps[1:]) / len(steps[1:])
print(f"{lines} lines; {len(steps)} steps for {len(text)} tokens, {mini_per_step:.2f} tokens a step with drafts")

# %% [markdown]
# The engine with the same head does the same. Compare the two numbers: the text is the same, and a step gives about as many tokens.

# %%
texts, per_step = write_stories(EAGLE3 | {"num_speculative_tokens": 3}, PROMPTS[:1])
assert texts == stories[:1]
print(f"engine: {per_step:.2f} tokens a step, mini: {mini_per_step:.2f}")
assert abs(per_step - mini_per_step) < 0.4

# %% [markdown]
# ## Your turn
#
# Four functions, three exercises. In a terminal:
#
# ```
# python -m milestones start x3        # their bodies are cut out of your copy, mine/
# python -m milestones test x3.6
# python -m milestones hint x3.6       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
EXERCISES = {"x3.6": [head_inputs], "x3.7": [chain_places], "x3.8": [KeptStates.keep, KeptStates.before]}
for id, functions in EXERCISES.items():
    for f in functions:
        print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def head_inputs{inspect.signature(head_inputs)}:\n")
print(inspect.getdoc(head_inputs))

# %% [markdown]
# ## See it: accepted and cut
#
# The mini's steps, one a line: of four stories the one with the most rejected drafts. Green was accepted, red was rejected, and blue is the token that the model sampled itself. Look for a line with red: the next
# line goes on behind its blue token.

# %%
told = [write(ids_of(each), 48, k=3) for each in PROMPTS[:4]]
text, steps = min(told, key=lambda story: sum(n for _, n in story[1][1:]) / len(story[1][1:]))
assert any(n < len(draft) for draft, n in steps), "some draft was rejected"
figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
at = 0
for row, (draft, accepted) in enumerate(steps[:14]):
    cells = [(token, "#9bd19b" if i < accepted else "#e8a0a0") for i, token in enumerate(draft)]
    if at + accepted < len(text):
        cells.insert(accepted, (text[at + accepted], "#a9c4ee"))
    for column, (token, color) in enumerate(cells):
        axis.text(
            column,
            -row,
            repr(chat.decode([token]))[1:-1],
            va="center",
            bbox={"facecolor": color, "edgecolor": "none", "pad": 2},
        )
    at += accepted + 1
axis.set(xlim=(-0.2, 5), ylim=(-14, 1))
axis.axis("off")
plt.show()

# %% [markdown]
# And as a recording of the engine: two requests, and chains of four drafts. Step through it, and look for a step in which a chain is cut at its first draft.

# %%
from folovllm.apps.inspector import film, show

SMALL = MODEL | {"milestone": "m5", "max_model_len": 96, "num_kv_blocks": 14, "block_size": 8, "max_num_seqs": 4}
with (
    LLM(**SMALL, speculative_config=EAGLE3 | {"num_speculative_tokens": 4}) as drafted,
    film(drafted, "A head drafts") as run,
):
    asks = {"Once upon a time there was a little": greedy(40), "Lily had a red kite. One day": greedy(56)}
    drafted.generate([*asks], [*asks.values()], use_tqdm=False)
assert "DraftsVerified" in run.text
show(run, height=480)

# %% [markdown]
# ## Measure: tokens a step, and what a step costs
#
# How far does a chain carry? The longer it is, the more of its hidden states are the head's own estimates. Look at the distance from k + 1, the most that a step can give.

# %%
for k in (1, 2, 3, 5):
    texts, per_step = write_stories(EAGLE3 | {"num_speculative_tokens": k}, PROMPTS[:4])
    assert texts == stories[:4]
    print(f"k = {k}: {per_step:.2f} tokens a step, of at most {k + 1}")

# %% [markdown]
# And the cost: the bytes that a step reads at least, in plain steps. All three of the head's parts come from its shapes: a layer whose attention reads 2 H numbers (EAGLE-3), or H numbers and a joining matrix (MTP); the
# product with its vocabulary; and what is read once a step. Compare the two vocabularies, and look for a gain below 1.

# %%
H, MLP = 4096, 3 * 4096 * 12288  # of both models
GEOMETRIES = {  # weights: of a plain step, a draft's layer, its vocabulary, once a step
    "8B, EAGLE-3": (36 * (2 * H * H + 2 * H * 1024 + MLP) + 151936 * H, 2 * H * (H + 2048) + H * H + MLP, 32000 * H, 3 * H * H + 2 * H * 2048),
    "9B, MTP": (
        8 * (2 * H * H + 2 * H * 1024 + H * H + MLP) + 24 * (H * 8192 + 2 * H * H + 64 * H + MLP) + 248320 * H,
        2 * H * H + 2 * H * 1024 + H * H + MLP + 2 * H * H, 248320 * H, 2 * H * H + 2 * H * 1024,
    ),
}  # fmt: skip
for name, (plain, layer, vocabulary, once) in GEOMETRIES.items():
    floors = {k: 1 + (k * (layer + vocabulary) + once) / plain for k in (1, 3, 5)}
    print(
        f"{name}: plain step {2e-9 * plain:.2f} GB, layer {2e-9 * layer:.2f}, vocabulary {2e-9 * vocabulary:.2f}; floors "
        + ", ".join(f"k = {k}: {cost:.2f}" for k, cost in floors.items())
    )
    print(
        "   gain at best, k = 3: "
        + ", ".join(f"a = {a}: {sum(a**j for j in range(4)) / floors[3]:.2f}" for a in (0.3, 0.5, 0.7, 0.9))
    )

# %% [markdown]
# With a = 0.3, the MTP head loses at its own floor: 1.42 tokens for 1.48 steps. And this floor counts reading memory alone: no arithmetic, and no work of the host.
#
# ## Compare
#
# | | reads | vocabulary | where it comes from |
# |---|---|---|---|
# | EAGLE-3 | hidden states of three layers | a part | trained afterwards, a folder of its own |
# | MTP | the last hidden state | all | trained with the model, in its checkpoint |
# | a draft model | the text | all | another model |
#
# vLLM runs both kinds of head and verifies with rejection sampling; nano-vllm has none.
#
# ## Break it
#
# In all three cases the text stays what it is. What suffers is the number of accepted drafts, and no test of the text would notice. Look at the tokens a step, beside those of the right `chain`:
#
# - `one_place_off`: each token goes with its own hidden state.
# - `rejected_states`: the newest hidden state is that of another token, as if a rejected draft's was kept.
# - `no_choice`: the head does not see which tokens were sampled.


# %%
def one_place_off(tokens, states, k):
    """Token t with state t; the newest token's state is not there, so the one before stands in."""
    return chain(tokens, torch.cat((states[1:], states[-1:])), k)


def rejected_states(tokens, states, k):
    """A head that kept the newest hidden state of all, a rejected draft's: here, of a token that is not in the text."""
    return chain(tokens, torch.cat((states[:-1], states[:1])), k)


def no_choice(tokens, states, k):
    """A head that reads hidden states alone: it does not know which token was sampled."""
    return chain([tokens[0]] * len(tokens), states, k)


found = {}
for broken in (chain, one_place_off, rejected_states, no_choice):
    got, steps = write(prompt, 32, 3, broken)
    assert got == stories[0][:32], "the text never changes"
    found[broken.__name__] = 1 + sum(n for _, n in steps[1:]) / len(steps[1:])
    print(f"{broken.__name__:16} {found[broken.__name__]:.2f} tokens a step")
assert found["chain"] > max(found[name] for name in found if name != "chain")

# %% [markdown]
# So a head must be tested by its acceptance, or against another computation of the same head. `tests/x3/test_eagle3.py` does the latter: a loop in plain PyTorch, over random small configurations.
#
# ## Where you are
#
# ```
# python -m milestones test x3.8
# folovllm generate "..." --speculative-config '{"method": "eagle3", "model": "stories-eagle3", "num_speculative_tokens": 3}'
# ```
