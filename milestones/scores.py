"""What a builder's component is worth: policies in virtual time, kernels and caches by the bytes that they move.

Each scorer takes a component and returns numbers by the head of their column. None of them looks at a real clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch

from folovllm.attention.backends.torch_cat import GrowingKVCache
from folovllm.cache.block_manager import BlockManager
from folovllm.cache.manager import KVCacheManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.cache.slot_manager import SlotManager
from folovllm.engine.scheduler import Scheduler, chunk, preempt, wait, whole_prompt
from folovllm.engine.serial_scheduler import SerialScheduler
from folovllm.learn.loop_runner import TokenLoop
from folovllm.step.packed import Field, choose_bucket
from folovllm.step.schedule import SchedulerOutput
from folovllm.worker.step_graph import AllGraphs, StepGraph
from milestones.counting import ToyModel, count_kernel
from milestones.virtual import Costs, Run, load_trace, serve

Score = dict[str, float]
SLOT = 2048  # tokens of a sequence at most, prompt and answer
# Qwen3-8B, where to compute a token again is dearer: 3.9 ms is measured, a token's time goes with the parameters.
OF_8B = Costs(fixed=3.9e-3, per_token=3.1e-5, kv_bytes=147_456)
ROUNDS = 10
CAPTURE = 0.03  # seconds for a graph: 20 took 0.6 s (docs/performance_log.md, "Two recordings of each width")


def times(run: Run) -> Score:
    """What every policy is measured by."""
    ttft = np.array([*run.first_token.values()]) * 1e3
    found = {"TTFT mean, ms": float(ttft.mean()), "TTFT p95, ms": float(np.percentile(ttft, 95))}
    return {"answer tokens/s": run.throughput, **found}


def decode_loop(component: Any) -> Score:
    """A prompt of 64 tokens and an answer of 448, over two layers with 2 heads of 16 in float32."""
    model = ToyModel(num_layers=2)
    answer = component(model, 2, 512).answer(list(range(64)), lambda logits: 1)
    for _ in itertools.islice(answer, 448):
        pass
    least = 511 * model.bytes_per_token  # the last token is drawn and never computed
    return {
        "tokens computed": model.num_tokens,
        "pairs of query and key": model.num_pairs,
        "bytes moved by the caches": model.moved.total,
        "of the least": model.moved.total / (2 * least),  # each K and V read once and written once
    }


def scheduler(component: Any) -> Score:
    """The trace `chat`: 16 slots of 1,024 tokens, 4,096 tokens a step, whole prompts."""
    kv = SlotManager(16, SLOT)
    return times(serve(component(kv, 16, 4096, whole_prompt), load_trace("chat")))


def block_manager(component: Any) -> Score:
    """The trace `documents` for a model of 8B: 448 blocks of 16 tokens, 64 sequences at most, 4,096 tokens a step, whole prompts."""
    run = serve(Scheduler(component(448, 16), 64, 4096, whole_prompt, preempt), load_trace("documents"), OF_8B)
    return {**times(run), "preemptions": run.preemptions}


def prefix_cache(component: Any) -> Score:
    """The trace `turns`: 224 blocks of 16 tokens, 32 sequences at most, 512 tokens a step, prompts in chunks."""
    kv: KVCacheManager = component(224, 16)
    run = serve(Scheduler(kv, 32, 512, chunk, preempt), load_trace("turns"))
    stats = kv.stats
    return {**times(run), "prompt tokens found, %": 100 * stats.hit_rate, "preemptions": run.preemptions}


def prefill(component: Any) -> Score:
    """Two sequences, 96 new tokens and 40 behind 56 cached ones, 4 query heads on 2 KV heads of 32, blocks of 16."""
    score = count_kernel(component, lens=[96, 96], new=[96, 40])
    return {**score, "bytes x FLOPs": score["of the least"] * score["of those needed"]}


def graph_cache(component: Any) -> Score:
    """The trace `waves` ten times over, 256 sequences at most: a decode step is padded to one of the widths, a capture takes time."""
    graphs = component(256)
    asked, padded, captured, most = list[int](), 0, 0, 0

    def capture() -> StepGraph:
        nonlocal captured
        captured += 1
        return cast(StepGraph, object())  # nobody replays it

    def watch(output: SchedulerOutput) -> int:
        nonlocal padded, most
        rows = len(output.scheduled_seqs)
        if output.num_tokens > rows:  # with a prompt in it a step is not replayed
            return 0
        width = choose_bucket(rows, graphs.widths)
        graphs.get(width, "plain", capture)
        asked.append(width)
        padded, most = padded + width - rows, max(most, len(graphs))
        return width

    kv = BlockManager(8192, 16)
    run = serve(Scheduler(kv, 256, 4096, whole_prompt, preempt), load_trace("waves"), Costs(), watch)
    first = captured
    for width in asked:  # what the second round captures, the others capture as well
        graphs.get(width, "plain", capture)
    captured += (ROUNDS - 2) * (captured - first)
    run.seconds += captured * CAPTURE / ROUNDS
    return {
        "answer tokens/s": run.throughput,
        "padding, % of the rows": 100 * padded / sum(asked),
        "widths": len(graphs.widths),
        "captured": captured,
        "kept at most": most,
        "their inputs, bytes": 4 * len(Field) * sum(sorted(graphs.widths)[-most:]),  # a row of int32 for each field
    }


class CatLoop(TokenLoop):
    """The engine's own way in M1: caches that grow by concatenation."""

    def __init__(self, forward: Any, num_layers: int, max_model_len: int) -> None:
        self._forward, self._num_layers = forward, num_layers

    def answer(self, prompt: list[int], draw: Callable[[torch.Tensor], int]) -> Iterator[int]:
        caches: list[Any] = [GrowingKVCache() for _ in range(self._num_layers)]
        token_ids, start = prompt, 0
        while True:
            logits = self._forward(token_ids, start, caches)
            start, token_ids = start + len(token_ids), [draw(logits)]
            yield token_ids[0]


class NoCacheLoop(CatLoop):
    """All tokens, every time."""

    def answer(self, prompt: list[int], draw: Callable[[torch.Tensor], int]) -> Iterator[int]:
        token_ids = list(prompt)
        while True:
            caches = [GrowingKVCache() for _ in range(self._num_layers)]
            token_ids.append(draw(self._forward(token_ids, 0, caches)))
            yield token_ids[-1]


def with_widths(widths: Callable[[int], list[int]]) -> type[AllGraphs]:
    """The engine's own cache of graphs, with another ladder of widths."""

    class Graphs(AllGraphs):
        def __init__(self, max_num_seqs: int) -> None:
            super().__init__(max_num_seqs)
            self.widths = widths(max_num_seqs)

    return Graphs


def own_prefill(*arguments: Any) -> None:
    """The engine's kernel; Triton is imported when it runs."""
    from folovllm.kernels.prefill import prefill

    prefill(*arguments)


OURS: dict[str, dict[str, Any]] = {  # what a learner's component is compared with, beside the reference
    "decode_loop": {"no cache": NoCacheLoop, "the engine's, by concatenation": CatLoop},
    "scheduler": {
        "M1's, one at a time": lambda kv, *_: SerialScheduler(kv.events),
        "the engine's, first come first served": lambda kv, seqs, budget, tokens: Scheduler(
            kv, seqs, budget, tokens, wait
        ),
    },
    "block_manager": {"M2's slots": lambda n, size: SlotManager(n * size // SLOT, SLOT), "the engine's": BlockManager},
    "prefill": {"the engine's": own_prefill},
    "prefix_cache": {"no cache of prefixes": BlockManager, "the engine's": PrefixCachingBlockManager},
    "graph_cache": {
        "the engine's": AllGraphs,
        "powers of two": with_widths(lambda n: sorted({*(2**i for i in range(n.bit_length())), n})),
        "every width": with_widths(lambda n: list(range(1, n + 1))),
    },
}
