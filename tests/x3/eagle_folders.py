"""Folders of random EAGLE-3 heads, as they are published, and the head's definition as a plain loop."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def write_head(folder: Path, target: Path, seed: int = 0, **given: Any) -> Path:
    """Write a head for the model in `target`. `given` are fields of its configuration; a value of None leaves one out."""
    model = json.loads((target / "config.json").read_text())
    hidden = model["hidden_size"]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "num_hidden_layers": 1,
        "vocab_size": model["vocab_size"], "draft_vocab_size": model["vocab_size"], "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, **given,
    }  # fmt: skip
    fields = {name: value for name, value in fields.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(random_tensors(fields, hidden, seed), folder / "model.safetensors")
    return folder


def random_tensors(fields: dict[str, Any], target_hidden: int, seed: int) -> Tensors:
    """All tensors of a head with this configuration."""
    torch.manual_seed(seed)
    hidden, inner = fields["hidden_size"], fields["intermediate_size"]
    heads, kv_heads, d = fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"]
    states = len(fields.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", (0, 0, 0)))
    shapes = {
        "fc": (hidden, states * target_hidden), "norm": (hidden,), "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,), "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (heads * d, 2 * hidden), "midlayer.self_attn.k_proj": (kv_heads * d, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * d, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, heads * d),
        "midlayer.mlp.gate_proj": (inner, hidden), "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner), "lm_head": (fields["draft_vocab_size"], hidden),
    }  # fmt: skip
    if fields.get("norm_before_fc"):
        shapes["input_norm"] = (states * target_hidden,)
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{i}": (target_hidden,) for i in range(states)}
    if fields.get("own_embedding") or hidden != target_hidden:
        shapes["embed_tokens"] = (fields["vocab_size"], hidden)
    if fields["model_type"] == "qwen3":
        shapes |= {"midlayer.self_attn.q_norm": (d,), "midlayer.self_attn.k_norm": (d,)}
    tensors = {f"{name}.weight": torch.randn(shape) * (0.3 if len(shape) > 1 else 1) for name, shape in shapes.items()}
    if fields["draft_vocab_size"] < fields["vocab_size"]:
        ids = torch.randperm(fields["vocab_size"])[: fields["draft_vocab_size"]].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(fields["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return tensors


class PlainHead:
    """A published head over one text, with no cache: `logits` computes all pairs anew."""

    def __init__(self, folder: Path, target: Path, embedding: torch.Tensor) -> None:
        fields = json.loads((folder / "config.json").read_text())
        layer = fields.get("transformer_layer_config", {})
        self.c: dict[str, Any] = {"norm_before_residual": bool(layer), **layer, **fields}
        stored = load_file(folder / "model.safetensors")
        self.w = {name.removesuffix(".weight").replace("layers.0", "midlayer"): t for name, t in stored.items()}
        self.embedding = self.w.get("embed_tokens", embedding)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.w[name]

    def heads(self, x: torch.Tensor, part: str, norm: str | None = None) -> torch.Tensor:
        """One of queries, keys and values, [heads, n, D]; queries and keys turned by their positions."""
        x = (x @ self.w[f"midlayer.self_attn.{part}_proj"].T).unflatten(-1, (-1, self.c["head_dim"])).transpose(0, 1)
        if f"midlayer.self_attn.{part}_norm" in self.w:
            x = self.norm(x, f"midlayer.self_attn.{part}_norm")
        if part == "v":
            return x
        d, n = x.shape[-1], x.shape[1]
        angles = torch.outer(torch.arange(n).float(), self.c["rope_theta"] ** (-torch.arange(0, d, 2).float() / d))
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """[n, 3, H of the target] -> [n, H]."""
        if self.c.get("norm_before_fc"):
            states = self.norm(states.flatten(1), "input_norm").view_as(states)
        if self.c.get("fc_norm"):
            states = torch.stack([self.norm(states[:, i], f"fc_norm.{i}") for i in range(states.shape[1])], 1)
        return states.flatten(1) @ self.w["fc"].T

    def outputs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, H] and the tokens behind them [n] -> what goes on, [n, H]."""
        normed = self.norm(hidden, "midlayer.hidden_norm")
        residual = normed if self.c["norm_before_residual"] else hidden
        x = torch.cat((self.norm(self.embedding[tokens], "midlayer.input_layernorm"), normed), -1)
        q, k, v = (self.heads(x, part) for part in "qkv")
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) * self.c["head_dim"] ** -0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        x = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.w["midlayer.self_attn.o_proj"].T + residual
        y, mlp = self.norm(x, "midlayer.post_attention_layernorm"), "midlayer.mlp."
        gate = torch.nn.functional.silu(y @ self.w[mlp + "gate_proj"].T) * (y @ self.w[mlp + "up_proj"].T)
        x = x + gate @ self.w[mlp + "down_proj"].T
        return self.norm(x, "norm") if self.c.get("norm_output") else x

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """What goes on [H] -> logits over the target's vocabulary; -inf where the head knows no token."""
        own = (output if self.c.get("norm_output") else self.norm(output, "norm")) @ self.w["lm_head"].T
        ids = torch.arange(len(own)) + self.w.get("d2t", torch.zeros(len(own), dtype=torch.int64))
        return torch.full((len(self.embedding),), -torch.inf).index_copy(0, ids, own)

    def drafts(self, states: torch.Tensor, tokens: list[int], k: int) -> tuple[list[int], float]:
        """Greedy drafts behind a text whose first n - 1 tokens have `states` [n - 1, 3, H], and the smallest top-2 margin."""
        hidden, drafts, margin = self.combine(states), list[int](), 1e9
        for _ in range(k):
            known = torch.tensor([*tokens[1:], *drafts])
            output = self.outputs(hidden, known)[-1]
            best = self.logits(output).topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            drafts.append(int(best.indices[0]))
            hidden = torch.cat((hidden, output[None]))
        return drafts, margin
