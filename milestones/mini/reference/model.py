"""Stage 1: the decoder of a Qwen3. It keeps no K and V: whoever calls it brings the attention, with the cache behind it."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

# (layer, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]; it stores the new key and value first
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Model:
    """The weights of a checkpoint, and the forward pass over a flat batch of tokens."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        stored: dict[str, Tensor] = load_file(folder / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in stored.items()}
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        dim = self.config["head_dim"]
        self.frequencies = theta ** (-torch.arange(0, dim, 2) / dim)  # [D/2]

    def __call__(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states [T, H] after tokens `ids` [T], which stand at `positions` [T] of their sequences."""
        x = self.weights["model.embed_tokens.weight"][ids]  # [T, H]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attend(layer, self.norm(x, f"{name}.input_layernorm"), positions, attention)
            x = x + self.mlp(f"{name}.mlp", self.norm(x, f"{name}.post_attention_layernorm"))
        return self.norm(x, "model.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V]; a tied model has no head of its own."""
        tied = self.config["tie_word_embeddings"]
        return self.linear(hidden, "model.embed_tokens" if tied else "lm_head")

    def attend(self, layer: int, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        q, k, v = (self.linear(x, f"{name}.{p}_proj").unflatten(-1, (-1, self.config["head_dim"])) for p in "qkv")
        q = self.rotate(self.norm(q, f"{name}.q_norm"), positions)
        k = self.rotate(self.norm(k, f"{name}.k_norm"), positions)
        return self.linear(attention(layer, q, k, v).flatten(1), f"{name}.o_proj")

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(silu(gate) * up, f"{name}.down_proj")

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE: turn the pairs (i, i + D/2) of each head [T, heads, D] by an angle that grows with the position."""
        angles = positions[:, None, None] * self.frequencies  # [T, 1, D/2]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dimension."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T


def causal_attention(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """Softmax attention of queries [n, Hq, D] at positions `start` and on, over keys [start + n, Hkv, D] of one sequence."""
    n, num_heads, dim = query.shape
    grouped = query.view(n, key.shape[1], -1, dim)  # [n, Hkv, G, D]: G query heads share a KV head
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, key) / dim**0.5
    future = torch.arange(len(key)) > torch.arange(start, start + n)[:, None]  # [n, start + n]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hgnm,mhd->nhgd", weights, value).reshape(n, num_heads, dim)


class GrowingCache:
    """The K/V of one sequence, which grow by concatenation; called as an `Attention`."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        old_key, old_value = self.kv.get(layer, (key[:0], value[:0]))
        key, value = self.kv[layer] = torch.cat((old_key, key)), torch.cat((old_value, value))
        return causal_attention(query, key, value, len(old_key))


def own_model(folder: Path) -> Callable[[], Callable[[list[int]], Tensor]]:
    """`begin` of a `SerialEngine`, for our model: each sequence has a `GrowingCache`."""
    model = Model(folder)

    def begin() -> Callable[[list[int]], Tensor]:
        cache, computed = GrowingCache(), 0

        def next_logits(new: list[int]) -> Tensor:
            nonlocal computed
            positions = torch.arange(computed, computed + len(new))
            computed += len(new)
            return model.logits(model(torch.tensor(new), positions, cache)[-1])

        return next_logits

    return begin
