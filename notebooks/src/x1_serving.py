# %% [markdown]
# # X1: serving
#
# An engine that steps, and clients that come and go. Here both run in this notebook: the engine in a thread of its own, the clients as coroutines
# beside it. You see continuous batching from outside, a reader that is slow, one that leaves, and a queue that grows until nobody is served in time.
#
# The [chapter](../docs/x1_serving.md) explains at leisure. Here you predict, measure, and break things.

# %%
from milestones.notebooks import running

running("x1")

# %%
import asyncio
import inspect
import logging
import random
import time
import warnings
from statistics import median
from unittest.mock import patch

warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, about widgets that nothing here uses

import matplotlib.pyplot as plt
import torch

from folovllm import LLM, AsyncEngine, RequestOutputKind, SamplingParams
from folovllm.electives.server import engine_loop, sse, stream
from folovllm.electives.server.engine_loop import EngineLoop
from folovllm.electives.server.messages import Frames, Stop, frame

torch.set_num_threads(1)  # so that two runs of this notebook can be compared
plt.rcParams.update({"figure.dpi": 72, "axes.spines.top": False, "axes.spines.right": False, "font.size": 10})
MODEL = {"model": "stories-5m", "max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 1024, "use_tqdm": False}


def greedy(count, kind=RequestOutputKind.DELTA):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=kind)


def prompt_of(length, number):
    return random.Random(number).choices(range(3, 4000), k=length)


# %% [markdown]
# ## Predict
#
# Write your guesses down before you go on; each is measured below.
#
# 1. Four clients come at nearly the same time, and each asks for 40 tokens. One after the other they need four times as long as one. And together?
# 2. A reader sleeps while 60 tokens are sampled for it. How many pieces does it get? How many tokens does another client get meanwhile?
# 3. A client leaves in the middle of its answer. How many steps later does the engine work on it no more?
# 4. A server can answer 25 requests a second, and 45 come. How many a second are answered in time, if it takes them all? If it refuses some?
# 5. The engine's thread raises an exception. What do the clients see?
#
# ## Feel the problem
#
# The synchronous engine, and a second user who comes 20 ms after the first. `generate` returns when all is answered, and nobody can enter before.

# %%
llm = LLM(milestone="m6", **MODEL)
llm.generate(["warm up"], greedy(4), use_tqdm=False)
start = time.perf_counter()
first = llm.generate([prompt_of(8, 0)], greedy(40), use_tqdm=False)
second_begins = time.perf_counter() - start  # she came at 0.02
llm.generate([prompt_of(8, 1)], greedy(40), use_tqdm=False)
both = time.perf_counter() - start
print(f"the second user came at 0.02 s, was let in at {second_begins:.2f} s; all was answered at {both:.2f} s")
assert second_begins > 0.02
llm.close()

# %% [markdown]
# ## The mini: a server's heart in some sixty lines
#
# (It has the ideas of x1.1, x1.3 and x1.4 in it. To find them yourself, read on from "Your turn" and come back.)
#
# No engine yet: "tokens" are numbers, and a step gives each request its next one. What is real is who waits for whom: a loop in a thread, commands
# down, one message a step up, streams without a queue, a client that leaves.

# %%
import queue
import threading


class MiniLoop(threading.Thread):
    """Takes in what arrived, steps, hands out one message: until it is told to stop."""

    def __init__(self, deliver):
        super().__init__(daemon=True)
        self.inbox, self.deliver, self.running, self.num_steps = queue.SimpleQueue(), deliver, {}, 0

    def run(self):
        try:
            while self.turn():
                pass
        except Exception as error:
            self.deliver({"error": error})  # the last word: nobody waits for ever

    def turn(self):
        commands = [] if self.running else [self.inbox.get()]  # without work it sleeps
        while not self.inbox.empty():
            commands.append(self.inbox.get())
        for word, number, count in commands:
            if word == "stop":
                return False
            if word == "add":
                self.running[number] = [0, count]
            else:
                self.running.pop(number, None)
        self.num_steps += 1
        time.sleep(0.001)  # the device
        for request in self.running.values():
            request[0] += 1
        self.deliver({number: at for number, (at, _) in self.running.items()})
        self.running = {n: r for n, r in self.running.items() if r[0] < r[1]}
        return True


class MiniServer:
    """Lives in an event loop; its streams know how far their answers are, and who waits for more."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.streams, self.numbers = {}, iter(range(1_000_000))
        self.engine = MiniLoop(lambda news: loop.call_soon_threadsafe(self.take_in, news))
        self.engine.start()

    def take_in(self, news):
        for number in list(self.streams) if "error" in news else news:
            if state := self.streams.get(number):
                state.update(news if "error" in news else {"at": news[number]})
                state["event"].set()

    async def generate(self, count):
        number, seen = next(self.numbers), 0
        state = self.streams[number] = {"at": 0, "event": asyncio.Event()}
        self.engine.inbox.put(("add", number, count))
        try:
            while seen < count:
                await state["event"].wait()
                state["event"].clear()
                if "error" in state:
                    raise state["error"]
                seen, old = state["at"], seen
                yield list(range(old, seen))  # all that is new: no queue
        finally:
            del self.streams[number]
            self.engine.inbox.put(("abort", number, 0))


# %%
async def mini():
    server = MiniServer()

    async def read(count, pause=0.0, leave_at=None):
        pieces = []
        async for piece in server.generate(count):
            pieces.append(piece)
            if leave_at and sum(map(len, pieces)) >= leave_at:
                break
            await asyncio.sleep(pause)
        return pieces

    quick, slow, gone = await asyncio.gather(read(40), read(40, pause=0.02), read(1_000_000, leave_at=10))
    while server.engine.running:
        await asyncio.sleep(0.001)
    server.engine.inbox.put(("stop", 0, 0))
    return quick, slow, server.engine.num_steps


quick, slow, steps = await mini()
assert sum(quick, []) == sum(slow, []) == list(range(40)), "all of both, in order"
assert len(slow) < len(quick), "and in fewer pieces"
lines = sum(1 for line in In[-2].splitlines() if line.strip())
assert lines <= 80, lines
print(f"{lines} lines; a quick reader got {len(quick)} pieces, a slow one {len(slow)}; {steps} steps, for the third one went")

# %% [markdown]
# ## Your turn
#
# Nine functions, six exercises. In a terminal:
#
# ```
# python -m milestones start x1        # their bodies are cut out of your copy, mine/
# python -m milestones                 # where you are, and the next step
# python -m milestones hint x1.1       # a nudge; twice more: the approach, nearly the code
# ```
#
# `start` puts a copy of this notebook into `mine/`, and there it runs your code. What each function promises:

# %%
from folovllm.electives.server.admission import Admission
from folovllm.electives.structured_output.choice import choice_mask

EXERCISES = {
    "x1.1": [EngineLoop.turn, engine_loop.run_engine],
    "x1.2": [Frames.feed],
    "x1.3": [stream.OutputCollector.put, stream.OutputCollector.get, stream.Stream.feed],
    "x1.4": [sse.unless_gone],
    "x1.5": [Admission.check],
    "x1.6": [choice_mask],
}
for id, functions in EXERCISES.items():
    for f in functions:
        print(f"{id}  {f.__module__}:{f.__qualname__}\n    {inspect.getdoc(f).splitlines()[0]}")

# %% [markdown]
# One of them in full, signature and docstring:

# %%
print(f"def turn{inspect.signature(EngineLoop.turn)}:\n")
print(inspect.getdoc(EngineLoop.turn))

# %% [markdown]
# ## See it: continuous batching from outside
#
# The real engine, in a thread beside this notebook's event loop. Its answer comes in pieces:

# %%
async with AsyncEngine(**MODEL) as storyteller:
    params = SamplingParams(temperature=0.7, seed=7, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    pieces = [output.outputs[0].text async for output in storyteller.generate("Once upon a time, a girl named Lily", params)]
print("|".join(pieces))

# %% [markdown]
# From here on times are measured. So that they do not depend on how busy this computer is, the device is made up: a step takes 10 ms and 0.1 ms a token,
# as it would on a GPU, and its tokens are any. Scheduler, cache, loop and streams stay the real ones.

# %%
import folovllm.build
from folovllm.engine.llm_engine import make_engine as make_any_engine
from folovllm.electives.server.transport import ThreadEngineClient
from folovllm.step.schedule import NothingScheduled, StepResult


class Device:
    """An executor whose steps take time, none of it on the CPU."""

    num_kv_blocks = 4096

    def __init__(self, setup, extension):
        self.free_at = 0.0

    def submit(self, output):
        if not output.scheduled_seqs:
            raise NothingScheduled
        tokens = sum(scheduled.num_new_tokens for scheduled in output.scheduled_seqs)
        self.free_at = max(self.free_at, time.monotonic()) + 0.010 + 0.0001 * tokens
        return Pending([[3] * scheduled.num_samples for scheduled in output.scheduled_seqs], self.free_at)

    def execute_model(self, output):
        return self.submit(output).wait()

    def shutdown(self):
        pass


class Pending:
    def __init__(self, drawn, end):
        self.drawn, self.end = drawn, end

    def wait(self):
        time.sleep(max(0.0, self.end - time.monotonic()))
        return StepResult(self.drawn, {})


def make_engine(config):
    with patch.object(folovllm.build, "make_executor", Device):
        return make_any_engine(config)


engine = AsyncEngine(**MODEL, enable_prefix_caching=False, transport=ThreadEngineClient(make_engine))  # so that no run helps the next
await engine.start()

# %% [markdown]
# Six clients come when they like; the fourth has a prompt of 700 tokens, which comes in chunks. Each mark is something that a client gets.


# %%
async def client(prompt, count, clock, at=0.0, pause=0.0):
    """Ask at a moment, and read; when it asked, and for each piece when it came and how many tokens it had."""
    await asyncio.sleep(at)
    sent, pieces = clock(), []
    async for output in engine.generate(prompt, greedy(count)):
        pieces.append((clock(), len(output.outputs[0].token_ids)))
        if pause:
            await asyncio.sleep(pause)
    return sent, pieces


def clock_from_now():
    began = time.perf_counter()
    return lambda: time.perf_counter() - began


await client(prompt_of(8, 99), 8, time.perf_counter)  # warm up
plan = [(8, 60, 0.0), (8, 45, 0.03), (40, 40, 0.06), (700, 25, 0.1), (8, 15, 0.13), (8, 20, 0.16)]
clock = clock_from_now()
seen = await asyncio.gather(*(client(prompt_of(length, i), count, clock, at) for i, (length, count, at) in enumerate(plan)))
figure, axes = plt.subplots(figsize=(10, 3))
for i, (sent, pieces) in enumerate(seen):
    times = [at for at, _ in pieces]
    axes.plot([sent, times[0]], [-i, -i], color="tab:red", lw=2, label="waits for its first token" if not i else None)
    axes.plot(times, [-i] * len(times), "|", color="tab:blue", ms=13, label="gets something" if not i else None)
axes.set(yticks=range(0, -len(plan), -1), yticklabels=[f"prompt of {n}" for n, *_ in plan], xlabel="seconds")
axes.legend(frameon=False, loc="lower right", fontsize=9)
plt.show()
assert [sum(n for _, n in pieces) for _, pieces in seen] == [count for _, count, _ in plan]

# %% [markdown]
# Marks stand above each other, since one step makes them all. While the long prompt comes, they move apart for everybody. Nobody waits until
# somebody else is done. (Where a mark is missing, a reader got two tokens in one piece.)
#
# Now the first question. One client alone, and four that come 30 ms apart:

# %%
clock = clock_from_now()
await client(prompt_of(8, 10), 40, clock)
alone = clock()
clock = clock_from_now()
await asyncio.gather(*(client(prompt_of(8, 11 + i), 40, clock, at=0.03 * i) for i in range(4)))
print(f"one alone {alone:.2f} s, four together {clock():.2f} s: {clock() / alone:.1f} times as long, for four times the work")

# %% [markdown]
# ## A slow reader
#
# Two clients ask for 60 tokens. One reads at once; the other sleeps after each piece. What does the sleep of one cost the other, and what does it
# cost in memory? Look at the pieces.

# %%
clock = clock_from_now()
(_, quick), (_, slow) = await asyncio.gather(
    client(prompt_of(8, 20), 60, clock), client(prompt_of(8, 21), 60, clock, pause=0.15)
)
for name, pieces in (("quick", quick), ("slow", slow)):
    sizes = [n for _, n in pieces]
    print(f"{name:6} {len(pieces):3} pieces of {min(sizes)} to {max(sizes)} tokens, all of {sum(sizes)}; the last at {pieces[-1][0]:.2f} s")
assert sum(n for _, n in slow) == sum(n for _, n in quick) == 60
assert len(slow) < len(quick)

# %% [markdown]
# Nothing is queued for the slow one: its stream knows the answer so far, and a reader that comes back gets all that is new in one piece.
# Over HTTP a reader is slow when its socket is full; then `await send(...)` does not return, which is the same sleep.
#
# ## A disconnect
#
# A client asks for 700 tokens and leaves after five. What does the engine know of it, step by step?

# %%
loads = []
update = engine._update


def note(step, now):
    loads.append((step.stats.num_running, step.stats.kv_blocks_used))
    return update(step, now)


with patch.object(engine, "_update", note):
    answers = engine.generate(prompt_of(40, 30), greedy(700))
    got = 0
    async for output in answers:
        got += len(output.outputs[0].token_ids)
        if got >= 5:
            break
    left_at = len(loads)
    await answers.aclose()  # what the race of x1.4 does when `http.disconnect` comes
    while engine.stats.num_running:
        await asyncio.sleep(0)
print(f"it left after {got} tokens, in step {left_at}; {len(loads) - left_at} messages later nothing ran and {loads[-1][1]} blocks were held")
assert loads[-1] == (0, 0) and len(loads) - left_at < 100 and engine.num_open == 0

# %% [markdown]
# Closing the generator sends `Abort` to the engine, and the next turn of its loop takes it in before the next step. The blocks are free at once.
#
# ## Measure: TTFT and ITL under load
#
# Requests arrive at random (a Poisson process) at several rates, for a second each; 8 places, prompts of 16 to 80 tokens, answers of 8 to 40.
# First: how many requests a second can this engine do at all?

# %%
def request(rng):
    return prompt_of(rng.randint(16, 80), rng.randrange(1 << 30)), rng.randint(8, 40)


async def closed_loop(num_clients=16, each=4):
    """Clients that ask again as soon as they are answered: the engine is never idle."""
    rng = random.Random(0)

    async def ask():
        for _ in range(each):
            await client(*request(rng), time.perf_counter)

    clock = clock_from_now()
    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return num_clients * each / clock()


capacity = await closed_loop()
print(f"capacity: {capacity:.0f} requests a second")


# %%
async def poisson(rate, seconds=1.0, most=None):
    """What clients see: (TTFT, mean ITL) of each that was served, and how many were refused, where `most` bounds the queue."""
    clock, rng, tasks, at, refused = clock_from_now(), random.Random(1), [], 0.0, 0
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, at - clock()))
        if most is not None and engine.num_queued >= most:
            refused += 1  # 429: this is all of admission control
        else:
            tasks.append(asyncio.create_task(client(*request(rng), clock)))
    served = []
    for sent, pieces in await asyncio.gather(*tasks):
        tokens = sum(n for _, n in pieces[1:])
        served.append((pieces[0][0] - sent, (pieces[-1][0] - pieces[0][0]) / max(1, tokens)))
    return served, refused


scheduled_seqs, results = (0.3, 0.6, 0.9, 1.2, 1.8), {}
for most in (None, 4):
    for scheduled in scheduled_seqs:
        results[most, scheduled] = await poisson(scheduled * capacity, most=most)
bound = 0.2  # seconds: what was promised for the first token
figure, axes = plt.subplots(1, 3, figsize=(12, 3))
goodput = {}
for most, colour, name in ((None, "tab:red", "takes everybody"), (4, "tab:blue", "queue holds 4")):
    runs = [results[most, scheduled] for scheduled in scheduled_seqs]
    goodput[most] = [sum(ttft <= bound for ttft, _ in served) / 1.0 for served, _ in runs]
    axes[0].plot(scheduled_seqs, [1e3 * median(t for t, _ in served) for served, _ in runs], "o-", color=colour, label=name)
    axes[1].plot(scheduled_seqs, [1e3 * median(i for _, i in served) for served, _ in runs], "o-", color=colour)
    axes[2].plot(scheduled_seqs, goodput[most], "o-", color=colour)
axes[0].axhline(1e3 * bound, color="grey", ls=":")
axes[0].set(title="TTFT, median", ylabel="ms", yscale="log")
axes[0].legend(frameon=False, fontsize=8)
axes[1].set(title="ITL, median", ylabel="ms", ylim=0)
axes[2].set(title="requests/s with their first token in time", ylim=0)
for each in axes:
    each.set(xlabel="requests a second, as a share of capacity")
figure.tight_layout()
plt.show()
most_late = goodput[None][-1], goodput[4][-1]
print(f"far beyond capacity, in time: {most_late[0]:.0f} requests a second with an open door, {most_late[1]:.0f} with a queue of 4")
assert median(t for t, _ in results[None, 1.8][0]) > median(t for t, _ in results[4, 1.8][0])

# %% [markdown]
# ITL hardly changes: it is the length of a step, and a step has eight places whatever waits outside. TTFT is the queue. Beyond capacity the queue
# grows as long as the load lasts, and the machine works hard for people who have left. With a bound those who are let in are served in time, and
# the others know at once that they must come again.
#
# ## Compare
#
# | | here | vLLM | mini-sglang |
# |---|---|---|---|
# | server and engine | two processes, or two threads | two processes (API server, engine core) | server, tokenizer, scheduler: three or more |
# | between them | MessagePack over a Unix socket | MessagePack over ZMQ | MessagePack over ZMQ |
# | a slow reader | one longer piece | outputs are merged | a list grows |
# | queue too long | 429, requests and prompt tokens | the same two bounds, off by default | no bound |
#
# ## Break it
#
# Five small changes to the real code, one at a time, with two clients of 12 tokens each. What do they see? Guess before you run.

# %%
logging.getLogger("folovllm").setLevel(logging.CRITICAL)  # the engine's log says what it died of; here it is on purpose
real_turn, real_feed = EngineLoop.turn, stream.Stream.feed


class Changed:
    """A link that receives in another way."""

    def __init__(self, link, receive):
        self.send, self.receive = link.send, receive


def dies(self):
    self.num_turns = getattr(self, "num_turns", 0) + 1
    if self.num_turns == 6:
        raise RuntimeError("the device is on fire")
    return real_turn(self)


def always_waits(self):
    link = self._link
    with patch.object(self, "_link", Changed(link, lambda wait: link.receive(wait=True))):
        return real_turn(self)


def one_command_a_turn(self):
    """Of several that came at once, the others are lost (but for `Stop`: this notebook has to end)."""
    link = self._link

    def first(wait):
        commands = link.receive(wait)
        return commands[:1] + [c for c in commands[1:] if isinstance(c, Stop)]

    with patch.object(self, "_link", Changed(link, first)):
        return real_turn(self)


def wakes_nobody(self, stream):
    self._fresh.append(stream)


def forgets_the_end(self, delta, now):
    if delta.finish_reason is None:
        real_feed(self, delta, now)


async def two_clients():
    """What each of two clients gets within a second."""
    async with AsyncEngine(**MODEL, transport=ThreadEngineClient(make_engine)) as victim:

        async def ask(number):
            got = 0
            try:
                async with asyncio.timeout(1):
                    async for output in victim.generate(prompt_of(8, number), greedy(12)):
                        got += len(output.outputs[0].token_ids)
                return f"{got} tokens"
            except TimeoutError:
                return f"{got} tokens, and then nothing"
            except Exception as error:
                return f"{got} tokens, then {type(error).__name__}: {error}"

        return await asyncio.gather(ask(1), ask(2))


breaks = {
    "as it is": (),
    "a step fails": (EngineLoop, "turn", dies),
    "waits before each step": (EngineLoop, "turn", always_waits),
    "takes one command a turn": (EngineLoop, "turn", one_command_a_turn),
    "news wake nobody": (stream.OutputCollector, "put", wakes_nobody),
    "the end is overlooked": (stream.Stream, "feed", forgets_the_end),
}
said = {}
for name, where in breaks.items():
    if where:
        with patch.object(*where):
            said[name] = await two_clients()
    else:
        said[name] = await two_clients()
    for line in said[name]:
        print(f"{name:26} {line}")

# %%
assert said["as it is"] == ["12 tokens", "12 tokens"]
assert all("EngineDead: RuntimeError: the device is on fire" in line for line in said["a step fails"]), "nobody hangs"
assert all("nothing" in line for line in said["the end is overlooked"])
assert await two_clients() == ["12 tokens", "12 tokens"], "nothing stayed broken"

# %% [markdown]
# Only the first kind of failure is *told*. All others are silence, and silence is the worst answer of a server: a client cannot tell it from a long
# step. That is why the loop's last word is written before anything else, and why tests of servers are full of time limits.
#
# One more: messages over a socket come in pieces that nobody chose.

# %%
messages = [b"one", b"", b"three"]
wire = b"".join(map(frame, messages))
frames, got = Frames(), []
for i in range(0, len(wire), 5):
    got.append([bytes(m).decode() for m in frames.feed(wire[i : i + 5])])
print(f"{len(wire)} bytes in pieces of 5: {got}")
assert sum(got, []) == ["one", "", "three"]

# %%
await engine.close()

# %% [markdown]
# ## Where this leads
#
# `folovllm serve` puts HTTP in front of this: the [page about serving](../docs/reference/serving.md) has its flags. With structured output the engine's
# sampler gets a mask for each step: try `folovllm.electives.structured_output.choice.choice_mask` with a vocabulary of your own.
