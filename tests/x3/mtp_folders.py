"""Hybrid checkpoints with a random head for multi-token prediction, as they are published, and the head as a plain loop."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def with_head(folder: Path, target: Path, letters: list[int], seed: int = 0, stacked: bool = False) -> Path:
    """Copy the model in `target` and give it a head; `stacked`: experts in stacks, as Qwen3.5 stores them.

    Only `letters` have logits that are not 0, so that model and head agree now and then. The embedding must not be the head.
    """
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    keep = torch.zeros(config["vocab_size"], 1)
    keep[letters] = 1
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * keep
    torch.manual_seed(seed)
    full = config["layer_types"].index("full_attention")
    own = {name: t for name, t in tensors.items() if name.startswith(f"model.layers.{full}.")}
    hidden = config["hidden_size"]
    shapes = {name.replace(f"model.layers.{full}.", "mtp.layers.0."): t.shape for name, t in own.items()}
    shapes |= {"mtp.fc.weight": torch.Size([hidden, 2 * hidden])}
    shapes |= {f"mtp.{n}.weight": torch.Size([hidden]) for n in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    head = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    save_file(tensors | (in_stacks(head) if stacked else head), folder / "model.safetensors", {"format": "pt"})
    return folder


def in_stacks(head: Tensors) -> Tensors:
    """The same tensors, with [E, 2I, H] and [E, H, I] in the place of each expert's own."""
    experts = "mtp.layers.0.mlp.experts."
    count = len({name.removeprefix(experts).split(".")[0] for name in head if name.startswith(experts)})
    gate, up, down = (
        torch.stack([head[f"{experts}{e}.{part}_proj.weight"] for e in range(count)]) for part in ("gate", "up", "down")
    )
    rest = {name: t for name, t in head.items() if not name.startswith(experts)}
    return rest | {f"{experts}gate_up_proj": torch.cat((gate, up), 1), f"{experts}down_proj": down}


class PlainMtp:
    """The head over one text, with no cache: all pairs are computed anew for each draft."""

    def __init__(self, folder: Path) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")

    def get(self, name: str) -> torch.Tensor:
        return self.w[f"mtp.{name}.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm whose weights are kept around 0."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * (1 + self.get(name))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, n, D]: the first part of each head turned by its position."""
        rope = self.c["rope_parameters"]
        size = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        part, rest = x[..., :size], x[..., size:]
        frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        a, b = part.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, H]: full attention, each head's output times the sigmoid of its gate."""
        attention, d = "layers.0.self_attn.", self.c["head_dim"]
        queries, k, v = (
            (x @ self.get(f"{attention}{part}_proj").T).unflatten(-1, (-1, size)).transpose(0, 1)
            for part, size in (("q", 2 * d), ("k", d), ("v", d))
        )
        q, gate = queries.chunk(2, -1)
        q, k = self.turned(self.norm(q, f"{attention}q_norm")), self.turned(self.norm(k, f"{attention}k_norm"))
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * d**-0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v) * gate.sigmoid()
        return out.transpose(0, 1).flatten(1) @ self.get(f"{attention}o_proj").T

    def mlp(self, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def named_mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.mlp(x, *(self.get(f"{name}.{part}_proj") for part in ("gate", "up", "down")))

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        """The best experts of each token, by softmax over all of them, and the shared one."""
        mlp = "layers.0.mlp."
        if mlp + "gate.weight" not in {name.removeprefix("mtp.") for name in self.w}:
            return self.named_mlp(x, "layers.0.mlp")
        weights, chosen = (x @ self.get(mlp + "gate").T).softmax(-1).topk(self.c["num_experts_per_tok"])
        if self.c.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        out = (x @ self.get(mlp + "shared_expert_gate").T).sigmoid() * self.named_mlp(x, mlp + "shared_expert")
        for t, (own, numbers) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            for weight, e in zip(own, numbers, strict=True):
                out[t] = out[t] + weight * self.expert(x[t : t + 1], e)[0]
        return out

    def expert(self, x: torch.Tensor, e: int) -> torch.Tensor:
        stack = self.w.get("mtp.layers.0.mlp.experts.gate_up_proj")
        if stack is None:
            return self.named_mlp(x, f"layers.0.mlp.experts.{e}")
        return self.mlp(x, *stack[e].chunk(2), self.w["mtp.layers.0.mlp.experts.down_proj"][e])

    def outputs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] and the tokens behind them [n] -> the next hidden states, [n, H]."""
        embedded = self.norm(self.w["model.embed_tokens.weight"][tokens], "pre_fc_norm_embedding")
        x = torch.cat((embedded, self.norm(hidden, "pre_fc_norm_hidden")), -1) @ self.get("fc").T
        x = x + self.attended(self.norm(x, "layers.0.input_layernorm"))
        x = x + self.experts(self.norm(x, "layers.0.post_attention_layernorm"))
        return self.norm(x, "norm")

    def drafts(self, hidden: torch.Tensor, tokens: list[int], k: int) -> tuple[list[int], float]:
        """Greedy drafts behind a text whose first n - 1 tokens have `hidden` [n - 1, H], and the smallest top-2 margin."""
        drafts, margin = list[int](), 1e9
        for _ in range(k):
            output = self.outputs(hidden, torch.tensor([*tokens[1:], *drafts]))[-1]
            best = (output @ self.w["lm_head.weight"].T).topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            drafts.append(int(best.indices[0]))
            hidden = torch.cat((hidden, output[None]))
        return drafts, margin
