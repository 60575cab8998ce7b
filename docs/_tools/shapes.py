"""One request with every shape: a prefill and two decode steps through every module, on the `meta` device.

Hooks record what the plain layers are given and give back. There are no numbers on `meta`, so that a model of any size
takes no memory. The shapes in letters stand here, and are compared with those recorded. `excerpts.py` writes the pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from anatomy import LARGE, SMALL, letters, skeleton, table
from answer import prompt_ids, watched
from torch import nn

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.torch_paged import TorchPagedBackend, gather_blocks
from folovllm.cache.block_manager import BlockManager
from folovllm.layers.attention import attention_layers
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import SamplingSpec, ScheduledSequence
from folovllm.worker.input_batch import InputBatch

BLOCK_SIZE, BLOCKS = 16, (5, 2)  # B, and the blocks that the request is given: the second with the first decode
STEPS = ("prefill", "first decode", "second decode")

# module: what happens, and its shapes in letters, inputs and outputs. T new tokens, n tokens in the cache after the step.
ROWS = {
    "model.embed_tokens": ("a row for each id", "[T]", "[T, H]"),
    "model.layers.0.input_layernorm": ("norm", "[T, H]", "[T, H]"),
    "model.layers.0.self_attn.qkv_proj": ("queries, keys and values in one product", "[T, H]", "[T, (Hq+2*Hkv)*D]"),
    "model.layers.0.self_attn.q_norm": ("heads apart (a view); norm of queries", "[T, Hq, D]", "[T, Hq, D]"),
    "model.layers.0.self_attn.k_norm": ("norm of keys", "[T, Hkv, D]", "[T, Hkv, D]"),
    "model.layers.0.self_attn.rope": ("rotation by position", "[T] [T, Hq, D] [T, Hkv, D]", "[T, Hq, D] [T, Hkv, D]"),
    "store": ("keys and values to their slots", "[T, Hkv, D] [T, Hkv, D]", "[2, N, B, Hkv, D]"),
    "gather": ("the request's blocks, in order", "[2, N, B, Hkv, D]", "[n, Hkv, D] [n, Hkv, D]"),
    "scores": ("each query with all keys so far", "[T, Hq, D] [n, Hkv, D]", "[Hq, T, n]"),
    "model.layers.0.self_attn.attn": ("weighted sum of values", "[T, Hq, D]", "[T, Hq, D]"),
    "model.layers.0.self_attn.o_proj": ("heads side by side, and back to H", "[T, Hq*D]", "[T, H]"),
    "model.layers.0.post_attention_layernorm": ("added to the stream, then norm", "[T, H] [T, H]", "[T, H] [T, H]"),
    "model.layers.0.mlp.gate_up_proj": ("gate and up in one product", "[T, H]", "[T, 2*I]"),
    "model.layers.0.mlp.act_fn": ("silu(gate) times up", "[T, 2*I]", "[T, I]"),
    "model.layers.0.mlp.down_proj": ("back to H", "[T, I]", "[T, H]"),
    "model.layers.1.input_layernorm": (
        "the next layer: added to the stream, then norm",
        "[T, H] [T, H]",
        "[T, H] [T, H]",
    ),
    "model.norm": ("after the last layer", "[T, H] [T, H]", "[T, H] [T, H]"),
    "lm_head": ("of the last token alone", "[S, H]", "[S, V]"),
}


@dataclass
class Recorder:
    """What each module was given and gave back, in order of its beginning."""

    shapes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def note(self, name: str, inputs: Any, outputs: Any) -> None:
        self.shapes[name] = (shapes_in(inputs), shapes_in(outputs))

    def watch(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.note(name, inputs, output)


def shapes_in(value: Any) -> str:
    """The shapes of all tensors in a value: "[17, 256] [17, 256]"."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return " ".join(filter(None, map(shapes_in, value))) if isinstance(value, tuple | list) else ""


class WatchedBackend(TorchPagedBackend):
    """Stores nothing, for there is nothing to store on `meta`; attends as ever, and says what it reads."""

    recorder: Recorder

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.recorder.note("store", (key, value), kv_cache)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        key, value = gather_blocks(kv_cache, batch.block_tables[0], batch.seq_lens_host[0])
        scores = query.transpose(0, 1) @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).permute(1, 2, 0)
        self.recorder.note("gather", kv_cache, (key, value))
        self.recorder.note("scores", (query, key), scores)
        return super().forward(query, kv_cache, batch)


@cache
def batches() -> list[ForwardBatch]:
    """The request's three steps, as the engine builds them, with the tokens that the embedded model draws."""
    builder, prompt = InputBatch(BlockManager.slots, BLOCK_SIZE, torch.device("cpu")), prompt_ids()
    drawn = [token for token, _ in watched()[0]]
    pieces, start, given, built = [prompt, drawn[:1], drawn[1:2]], 0, 0, []
    for step, ids in enumerate(pieces):
        need = -(-(start + len(ids)) // BLOCK_SIZE)
        draw = None if step else SamplingSpec()
        blocks = BLOCKS[given:need]
        scheduled = ScheduledSequence(0, 0, start, start + len(ids), np.array(ids, np.int32), blocks, given, 1, draw)
        built.append(builder.build([scheduled]))
        start, given = start + len(ids), max(given, need)
    return built


@cache
def recorded(model: str) -> list[dict[str, tuple[str, str]]]:
    """The shapes of each step. ValueError where one is not what the letters say."""
    net, n, recorder = skeleton(model), letters(model), Recorder()
    meta = torch.device("meta")
    backend = WatchedBackend(AttentionConfig(n["Hq"], n["Hkv"], n["D"], torch.bfloat16, meta, BLOCK_SIZE, 1))
    backend.recorder = recorder
    cache_shape = (2, 8, n["Hkv"], BLOCK_SIZE, n["D"])
    for layer in attention_layers(net):
        layer.backend, layer.kv_cache = (
            backend,
            torch.empty(cache_shape, dtype=torch.bfloat16, device=meta).transpose(2, 3),
        )  # [2, N, B, Hkv, D]
    hooks = [
        module.register_forward_hook(partial(recorder.watch, name)) for name, module in net.named_modules() if name
    ]
    steps = []
    for batch in batches():
        recorder.shapes.clear()
        on_meta = ForwardBatch(**{f.name: _to_meta(getattr(batch, f.name)) for f in fields(batch)})
        net.compute_logits(net(on_meta), on_meta)
        steps.append({name: recorder.shapes[name] for name in ROWS})
        _compare(
            steps[-1],
            n | {"T": sum(batch.query_lens_host), "n": batch.seq_lens_host[0], "S": 1, "N": 8, "B": BLOCK_SIZE},
        )
    for hook in hooks:
        hook.remove()
    return steps


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _compare(shapes: dict[str, tuple[str, str]], sizes: dict[str, int]) -> None:
    for name, (_, *said) in ROWS.items():
        for in_letters, found in zip(said, shapes[name], strict=True):
            worked_out = re.sub(r"[^\[\], ]+", lambda term: str(eval(term[0], {}, sizes)), in_letters)
            if worked_out != found:
                raise ValueError(f"{name} has shapes {found}, and {in_letters} would be {worked_out}")


def batch_table() -> str:
    """The fields of the three batches, with their values."""
    names = ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables", "logits_indices")
    rows = [(f"`{name}`", *(_values(getattr(batch, name)) for batch in batches())) for name in names]
    return table(" | ".join(["", *STEPS]), *rows)


def _values(tensor: torch.Tensor) -> str:
    flat = [str(value) for value in tensor.flatten().tolist()]
    shown = flat if len(flat) <= 6 else [*flat[:3], "...", *flat[-2:]]
    return f"{', '.join(shown)}: `{list(tensor.shape)}`"


def step_table(step: int) -> str:
    """What goes in and comes out of every module in one step, of both models."""
    rows = []
    for name, (what, *said) in ROWS.items():
        in_letters, *sizes = (
            _arrow(*pair) for pair in (said, *(recorded(model)[step][name] for model in (SMALL, LARGE)))
        )
        rows.append((f"`{name.removeprefix('model.')}`", what, in_letters.replace("*", "·"), *sizes))
    return table(f"module | what happens | in letters | {SMALL} | {LARGE}", *rows)


def _arrow(given: str, back: str) -> str:
    """As code: two pairs of brackets side by side would be a link."""
    return f"`{given}` → `{back}`"
