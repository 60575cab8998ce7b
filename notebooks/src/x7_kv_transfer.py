# %% [markdown]
# # X7: moving K/V
#
# The device has no room for a prefix any more. Here you let it leave for host memory and for a disk, and bring it back. You measure when that is faster than computing, watch a copy hide behind other
# requests' steps, and break the names, the checksum and the rule that decides.
#
# The [chapter](../docs/x7_kv_transfer.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("x7")

# %%
import hashlib
import inspect
import shutil
import tempfile
import time
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from folovllm import LLM, SamplingParams
from folovllm.models.files import resolve_model
from folovllm.electives.kv_transfer import disk, offload
from folovllm.electives.kv_transfer.plan import block_key, blocks_to_load, requests_to_recompute
from folovllm.engine.events import BlocksMoved, PrefixHit, StepEnded

disable_progress_bar()
torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
SMALL = {"milestone": "m5", "device": "cpu", "block_size": 16, "max_num_seqs": 4, "use_tqdm": False}
GREEDY, ONE = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 1))
LONG = "Once upon a time, in a small house near the sea, there lived a girl named Lily. She had a red kite and a little dog. "
PROMPT = LONG * 12 + "One day,"
OTHERS = [f"{word} " + "liked to draw. He drew a cat, and a house, and a big tree. " * 16 for word in ("Tom", "Sam", "Ben", "Mia")]

# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. How many bytes of K/V does a token of the embedded model have (6 layers, 2 KV heads of 64 numbers, float32)?
# 2. A prefix of some 400 tokens was evicted. What is faster on your machine: to compute it again, to copy it from host memory, or to read it from a file? By what factor?
# 3. Answers get their tokens one by one, and a prompt of 400 tokens arrives. How much longer is the longest gap between two tokens?
# 4. Two models share a folder, and the names of their blocks do not say which model. Does the second one crash?
#
# ## Feel the problem
#
# A cache with room for one long prompt and a bit. The prompt comes, four others come, and the prompt comes again.


# %%
def rounds(num_kv_blocks=64, **options):
    """Serve the prompt, the others, and the prompt again; what the last one computed, and how long its first token took."""
    with LLM(num_kv_blocks=num_kv_blocks, max_model_len=1024, max_num_batched_tokens=1024, **SMALL, **options) as llm:
        first = llm.generate([PROMPT], GREEDY)[0]
        for other in OTHERS:
            llm.generate([other], ONE)
        hits = []
        llm.engine.subscribe(lambda events: hits.extend(e for e in events if isinstance(e, PrefixHit)))
        begin = time.perf_counter()
        again = llm.generate([PROMPT], ONE)[0]
        seconds = time.perf_counter() - begin
        assert again.outputs[0].token_ids == first.outputs[0].token_ids[:1]
        return len(first.prompt_token_ids), hits[0].num_tokens if hits else 0, seconds


rounds()  # the first run of a process is slower
prompt, hit, seconds = rounds()
print(f"{prompt} tokens of prompt, {hit} of them in the cache: first token after {1e3 * seconds:.0f} ms")
prompt, hit, in_cache = rounds(num_kv_blocks=400)
print(f"{prompt} tokens of prompt, {hit} of them in the cache: first token after {1e3 * in_cache:.0f} ms, where the cache has room for all")

# %% [markdown]
# ## The mini: a block that leaves and returns
#
# (It has the idea of x7.1 in it. To find it yourself, read on from "Your turn" and come back.)
#
# No engine: transformers' model, a dictionary for the device with room for 12 blocks, and another one for host memory. A block is *one* tensor of all layers: it is gathered once, moved in one piece, and scattered.

# %%
FOLDER, B, MOST = resolve_model("stories-5m"), 8, 12  # tokens a block, blocks on the device
tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
device, host = OrderedDict(), {}  # by name: K/V [L, 2, Hkv, B, D]; the least recently used first


def names_of(ids):
    """The name of each full block: a hash over the model, all blocks before, and its own tokens."""
    name, names = hashlib.sha256(str(FOLDER).encode()).digest(), []
    for i in range(0, len(ids) - len(ids) % B, B):
        name = hashlib.sha256(name + np.array(ids[i : i + B], np.int32).tobytes()).digest()
        names.append(name)
    return names


def keep(name, block):
    """Put a block on the device. The least recently used one leaves for the host."""
    device[name] = block
    device.move_to_end(name)
    if len(device) > MOST:
        old, evicted = device.popitem(last=False)
        host[old] = evicted.clone()


@torch.no_grad()
def answer(ids, count):
    """Greedy tokens, and where the blocks of the prompt were."""
    cache, found = DynamicCache(), []
    for name in names_of(ids[:-1]):
        if name not in device and name not in host:
            break
        found.append("device" if name in device else "host")
        block = device[name] if name in device else host[name].clone()
        keep(name, block)
        for layer, (k, v) in enumerate(block):  # scattered
            cache.update(k[None], v[None], layer)
    out, new = list(ids), ids[len(found) * B :]
    for _ in range(count):
        positions = torch.arange(len(out) - len(new), len(out))[None]
        logits = model(torch.tensor([new]), past_key_values=cache, position_ids=positions).logits
        new = [int(logits[0, -1].argmax())]
        out += new
    for i, name in reversed([*enumerate(names_of(out[:-1]))]):  # the beginning is the most recently used
        pieces = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        keep(name, torch.stack(pieces)[:, :, :, i * B : i * B + B])  # gathered
    return out[len(ids) :], found


A = tokenizer.encode(LONG * 2)
first, _ = answer(A, 8)
print(f"A came: {len(device)} blocks on the device, {len(host)} in host memory")
for text in ("Tom liked to draw. He drew a cat. ", "The frog sat in the garden. "):
    answer(tokenizer.encode(text * 9), 8)
where = [("device" if name in device else "host" if name in host else "nowhere") for name in names_of(A)]
print(f"others came: A's blocks are in {', '.join(f'{place} {where.count(place)}' for place in ('device', 'host', 'nowhere'))}")
again, found = answer(A, 8)
print(f"A came again: {found.count('host')} blocks from the host, the same tokens: {again == first}")
assert again == first and "host" in found

lines = sum(1 for line in In[-1].splitlines() if line.strip())
assert lines <= 80, lines
print(f"{lines} lines")

# %% [markdown]
# ## Your turn
#
# Three functions, three exercises. In a terminal:
#
# ```
# python -m milestones start x7        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint x7.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
EXERCISES = {"x7.1": block_key, "x7.2": blocks_to_load, "x7.3": requests_to_recompute}
for id, f in EXERCISES.items():
    print(f"{id}  {f.__module__}:{f.__name__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def blocks_to_load{inspect.signature(blocks_to_load)}:\n")
print(inspect.getdoc(blocks_to_load))

# %% [markdown]
# ## See it: a prefix leaves and returns
#
# The engine, with 16 MiB of host memory for what its cache evicts. Each dot is a block that moved.

# %%
begin, moved = 0.0, []
with LLM(num_kv_blocks=64, max_model_len=1024, max_num_batched_tokens=1024, kv_offload="16MiB", **SMALL) as llm:
    llm.engine.subscribe(lambda events: moved.extend((time.perf_counter() - begin, e) for e in events if isinstance(e, BlocksMoved)))
    begin, asked = time.perf_counter(), []
    for text in [PROMPT, *OTHERS, PROMPT]:
        asked.append(time.perf_counter() - begin)
        llm.generate([text], GREEDY)
    totals = {what: sum(e.num_blocks for _, e in moved if e.what == what) for what in ("offloaded", "loaded", "lost")}
    block_bytes = moved[0][1].num_bytes // moved[0][1].num_blocks
print(f"a block has {block_bytes:,} bytes, a token {block_bytes // 16:,}; blocks: {totals}")
assert totals["loaded"] > 0

fig, axis = plt.subplots(figsize=(8, 2.4), layout="constrained")
for what, sign, colour in (("offloaded", 1, "#b36b00"), ("loaded", -1, "#0068a3")):
    points = [(at, e) for at, e in moved if e.what == what]
    counts = np.cumsum([sign * e.num_blocks for _, e in points])
    axis.step([at for at, _ in points], counts, where="post", color=colour, marker=".", label=f"{what} (blocks so far)")
for at, name in zip(asked, ["A", "B", "C", "D", "E", "A again"], strict=True):
    axis.axvline(at, color="#999", lw=0.7)
    axis.text(at, axis.get_ylim()[1], f" {name}", va="top", fontsize=9)
axis.axhline(0, color="#444", lw=0.7)
axis.set(xlabel="seconds", ylabel="to the host (up),\nback (down)")
axis.legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# ## Measure: the switch, off and on
#
# The time to the first token of the returning prompt: computed again, from host memory, from a file, and never evicted.

# %%
folder = Path(tempfile.mkdtemp())
STORE = {"kv_offload": "16MiB", "kv_offload_dir": str(folder)}
NEW = (f"Frog number {i} sat by the sea. " * 60 for i in range(100))  # texts that no folder has


def restarted(**options):
    """Seconds to the first token of the prompt in a new engine, and which of its blocks came or were lost."""
    with LLM(num_kv_blocks=64, max_model_len=1024, max_num_batched_tokens=1024, **SMALL, **options) as llm:
        llm.generate([next(NEW)], ONE)  # so it knows how fast it computes
        moved = Counter()
        llm.engine.subscribe(lambda events: moved.update({f"{e.what} {e.place}": e.num_blocks for e in events if isinstance(e, BlocksMoved) and e.what != "offloaded"}))
        begin = time.perf_counter()
        llm.generate([PROMPT], ONE)
        return time.perf_counter() - begin, moved


times = {"computed again": seconds}
_, hit, times["from host memory"] = rounds(**STORE)
times["from files, after a restart"], moved = restarted(**STORE)
times["never evicted"] = in_cache
for name, value in times.items():
    print(f"{name:28} {1e3 * value:6.1f} ms   {seconds / value:4.1f} times as fast as computing")
print(f"from host memory {hit} of {prompt} tokens; after the restart, blocks: {dict(moved)}")
assert hit and moved["loaded disk"]

# %% [markdown]
# What you see is a laptop: the model is tiny, host memory *is* the device's memory, and a file that was just written lies in the operating system's cache. The chapter has the rates of a server. The second
# engine had computed nothing of this prompt: a restarted server finds its prefixes in the folder.
#
# ## See it: a copy beside the steps of others
#
# A slow disk: 30 ms for each block. Two requests decode. A third one arrives, whose prefix is on the disk. Who waits?

# %%
read = disk.BlockFiles.read


def after(delay):
    """A read that takes so many seconds longer."""

    def slow_read(self, *arguments):
        time.sleep(delay)
        return read(self, *arguments)

    return patch.object(disk.BlockFiles, "read", slow_read)


steps, first_token, came_at = [], {}, []
with LLM(num_kv_blocks=400, max_model_len=1024, **SMALL, **STORE) as llm, after(0.03):

    def watch(events):
        for e in events:
            if isinstance(e, StepEnded):
                steps.append((e.start, e.end, len(e.output.scheduled_seqs)))
                for seq_id, _ in e.sampled:
                    first_token.setdefault(seq_id, e.end)
            if isinstance(e, BlocksMoved) and e.what == "loaded":
                came_at.append((time.monotonic(), e.num_blocks))

    llm.engine.subscribe(watch)
    long = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    for i, text in enumerate(("The sea was", "One day, a bird")):
        llm.engine.add_request(f"answer {i}", text, long)
    for _ in range(10):
        llm.engine.step()
    arrived = time.monotonic()
    llm.engine.add_request("from the disk", PROMPT, GREEDY)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
ended, num_blocks = came_at[0]
during = [end for _, end, _ in steps if arrived < end < ended]
print(f"{num_blocks} blocks took {1e3 * (ended - arrived):.0f} ms to come; meanwhile {len(during)} steps gave tokens to the others")
assert len(during) > 1

fig, axis = plt.subplots(figsize=(8, 1.9), layout="constrained")
for start, end, _ in steps:
    axis.barh(1, end - start, left=start - arrived, height=0.5, color="#0068a3", edgecolor="white", lw=0.3)
axis.barh(0, ended - arrived, height=0.5, color="#b36b00")
axis.axvline(max(first_token.values()) - arrived, color="#444", lw=0.8, ls=":")
axis.set(yticks=[0, 1], yticklabels=["blocks on their way", "steps of the engine"], xlabel="seconds after the request came (dotted: its first token)", xlim=(-0.05, ended - arrived + 0.1))
plt.show()

# %% [markdown]
# ## See it: what a prompt does to others' tokens
#
# Why prefill moves to an engine of its own. Two answers get their tokens; after 20 steps a prompt of some 400 tokens arrives. The gaps between two tokens of the first answer:


# %%
def gaps(budget):
    """Milliseconds between two tokens of an answer while a long prompt comes, with so many tokens a step at most."""
    times = []
    with LLM(num_kv_blocks=400, max_model_len=1024, max_num_batched_tokens=budget, **SMALL) as llm:
        llm.engine.add_request("answer", "The sea was", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        for step in range(100):
            if step == 20:
                llm.engine.add_request("prompt", PROMPT, GREEDY)
            if not llm.engine.has_unfinished_requests():
                break
            llm.engine.step()
            times.append(time.perf_counter())
    return 1e3 * np.diff(times)[:58]


fig, axis = plt.subplots(figsize=(8, 2.4), layout="constrained")
for budget in (1024, 64):
    values = gaps(budget)
    axis.plot(values, label=f"{budget} tokens a step")
    print(f"{budget:5} tokens a step: usual gap {np.median(values):5.1f} ms, longest {values.max():6.1f} ms")
axis.set(xlabel="token of the answer", ylabel="ms since the token before")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Chunks cut the gap into several smaller ones. Only an engine that computes no prompts has none of them:
#
# ```
# folovllm serve --role prefill --peer 127.0.0.1:9001 --port 8001
# folovllm serve --role decode --peer 127.0.0.1:9001 --port 8002
# ```
#
# ## Break it
#
# **A name that does not say which model.** A second model, with the shapes and the tokenizer of the first and slightly other weights. The digest is the same for both, so it finds the first one's blocks.

# %%
other_model = Path(tempfile.mkdtemp()) / "finetuned"
shutil.copytree(FOLDER, other_model)
weights = load_file(FOLDER / "model.safetensors")
torch.manual_seed(0)
save_file({name: (w + 0.1 * w.float().std() * torch.randn(w.shape)).to(w.dtype) if w.dim() == 2 else w for name, w in weights.items()}, other_model / "model.safetensors", metadata={"format": "pt"})


def logprobs(**options):
    """Of the first tokens behind the prompt, by the second model."""
    with LLM(str(other_model), num_kv_blocks=64, max_model_len=1024, **SMALL, **options) as llm:
        answer = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0))[0].outputs[0]
        return [round(next(iter(at.values())).logprob, 4) for at in answer.logprobs]


right = logprobs()
shared = Path(tempfile.mkdtemp())
with patch.object(offload, "model_digest", lambda setup: b"some model"):
    rounds(kv_offload="16MiB", kv_offload_dir=str(shared))  # the first model fills the folder
    stale = logprobs(kv_offload="16MiB", kv_offload_dir=str(shared))
named = logprobs(**STORE)  # a folder of the first model, with its real name
print("without a store:         ", right)
print("a name without the model:", stale)
print("a name with the model:   ", named)
assert named == right and stale != right

# %% [markdown]
# Nothing crashed, and the text looks fine.
#
# **A flipped bit.** One bit of every file is wrong. The checksum notices: blocks count as lost, and are computed.

# %%
whole = Path(shutil.copytree(folder, Path(tempfile.mkdtemp()) / "whole"))
for file in folder.rglob("*.kv"):
    data = bytearray(file.read_bytes())
    data[-100] ^= 0x40
    file.write_bytes(data)
_, moved = restarted(**STORE)
print("blocks:", dict(moved))
assert moved["lost disk"] and not moved["loaded disk"]

# %% [markdown]
# **Bring back everything.** An even slower disk, and a rule that brings whatever is stored, in place of yours.

# %%
def whatever_is_stored(places, first, *_):
    """Up to the first gap."""
    return range(first, next((i for i in range(first, len(places)) if places[i] is None), len(places)))


def time_of(rule):
    """Milliseconds to the first token where four threads read a block each in 100 ms, and the engine knows it."""
    with patch.object(offload, "blocks_to_load", rule), patch.object(offload, "DISK_RATE", 4 * block_bytes / 0.1), after(0.1):
        return 1e3 * restarted(kv_offload="16MiB", kv_offload_dir=str(whole))[0]


print(f"whatever is stored: {time_of(whatever_is_stored):6.0f} ms")
print(f"what is worth it:   {time_of(blocks_to_load):6.0f} ms")
print(f"no store at all:    {1e3 * restarted()[0]:6.0f} ms")

# %% [markdown]
# ## Compare
#
# | | this engine | vLLM 0.26 |
# |---|---|---|
# | what leaves | a block, when it is evicted | with the offloading connector a block, when it is computed |
# | name on disk | chained hash with a digest of weights, dtype and block size | chained hash, in a folder named by the model's name and the layout |
# | bring back or compute | whatever is faster | what is stored is loaded |
#
# ## Where you are
#
# ```
# pytest -m x7 --mine
# folovllm serve --kv-offload 1GiB --kv-offload-dir ~/kv
# ```
