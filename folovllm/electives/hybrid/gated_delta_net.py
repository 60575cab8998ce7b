"""Gated DeltaNet, a layer of linear attention, in the place of attention (Yang et al. 2024; as Qwen3-Next and Qwen3.5 have it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.electives.hybrid.delta_rule import delta_rule, delta_rule_step, l2norm
from folovllm.electives.hybrid.short_conv import convolve
from folovllm.electives.hybrid.state_layer import Shape, StateLayer, lacks_initial_state
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from folovllm.models.model_config import UnsupportedModel
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Tokens = Sequence[
    torch.Tensor
]  # inputs of the convolution [n, C], and `beta` and `g` before their functions, [n, Hv] each


class GatedRMSNorm(nn.Module):
    """RMSNorm of each head, times silu of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Two [T, Hv, Dv] -> [T, Hv, Dv] in the dtype of `gate`, rounded where transformers rounds."""
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(gate.dtype) * self.weight
        return (normed * F.silu(gate.float())).to(gate.dtype)


class GatedDeltaNet(StateLayer):
    """Projections, short convolution, gated delta rule, gated norm, projection.

    Each key head serves Hv / Hk neighbouring value heads. The state of a sequence has a fixed size: the last K - 1 inputs
    of the convolution, C = 2 Hk Dk + Hv Dv channels each, and a matrix [Dk, Dv] in float32 for each value head.

    Where a step may sample several tokens of a sequence (`LayerSet.most_samples`), its few new tokens may be rejected after the
    step. No state forgets a token. So the state stays as it was before them, their inputs are kept, and the next step, which
    knows by its start how many were accepted, applies these first. So each step reads and writes one state, as without drafts.
    """

    def __init__(self, config: PretrainedConfig, layers: LayerSet, is_one_tensor: bool = False) -> None:
        """`is_one_tensor`: whether each input projection is one tensor in the checkpoint."""
        super().__init__()
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"hidden_act {config.hidden_act!r} is not supported: only 'silu' is")
        self.is_one_tensor = is_one_tensor
        self.most_kept = layers.most_samples if layers.most_samples > 1 else 0  # inputs of a sequence
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.k_dim, self.v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim
        self.sizes = [keys, keys, values]  # of queries, keys and values of all heads
        channels, hidden = sum(self.sizes), config.hidden_size

        def projection(name: str, *sizes: int) -> MergedColumnParallelLinear:
            parts, method = [sum(sizes)] if is_one_tensor else sizes, layers.linear_method_of(f"self_attn.{name}")
            return layers.make(MergedColumnParallelLinear, hidden, parts, False, method)

        self.in_proj_qkvz = projection("in_proj_qkvz", channels, values)
        self.in_proj_ba = projection("in_proj_ba", self.num_v_heads, self.num_v_heads)
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.norm = layers.make(GatedRMSNorm, self.v_dim, config.rms_norm_eps)
        method = layers.linear_method_of("self_attn.out_proj")
        self.out_proj = layers.make(RowParallelLinear, values, hidden, False, method)

    def state_shapes(self) -> tuple[Shape, ...]:
        """The convolution's last inputs [K - 1, C], and the matrices [Hv, Dk, Dv].

        Behind them kept inputs [most_kept, C + 2 Hv], if a step may keep some, and [1], how many tokens the others have seen.
        """
        (channels, _, width), dtype = self.conv1d.weight.shape, self.conv1d.weight.dtype
        matrices: Shape = (self.num_v_heads, self.k_dim, self.v_dim), torch.float32
        kept: Shape = (self.most_kept, channels + 2 * self.num_v_heads), dtype
        return ((width - 1, channels), dtype), matrices, *((kept, ((1,), torch.int32)) if self.most_kept else ())

    @property
    def state_flops(self) -> int:
        """Those of the convolution; and two a number of S for each of k S, the outer product that is added, and q S."""
        return 2 * self.conv1d.weight.numel() + 6 * self.num_v_heads * self.k_dim * self.v_dim

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]. Updates the states of the batch's sequences in place."""
        qkv, z, b, a = self.project(x)
        out = self.norm(self.forward_core(qkv, b, a, batch), z)
        return self.out_proj(out.flatten(1))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> inputs of the convolution [T, C], output gate [T, Hv, Dv], and `beta` and `g` before their functions, [T, Hv]."""
        qkv, z = self.in_proj_qkvz(x).split([sum(self.sizes), self.sizes[2]], dim=1)
        ba = self.in_proj_ba(x)
        if self.is_one_tensor:  # key head by key head: codes of so few rows cannot be put in order when they are read
            ba = ba.unflatten(1, (self.num_k_heads, 2, -1)).transpose(1, 2).flatten(1)
        b, a = ba.chunk(2, dim=1)
        return qkv, z.unflatten(1, (self.num_v_heads, self.v_dim)), b, a

    def forward_core(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Convolve and apply the delta rule, sequence by sequence, decodes all at once: [T, C] -> [T, Hv, Dv] float32.

        The one step here that kernels replace.
        """
        assert batch.rows is not None
        rows, n = batch.rows.long(), batch.num_decodes
        for states in self.states[:2]:  # a slot may hold NaN, so nothing multiplies it by 0
            states[rows[lacks_initial_state(batch)]] = 0.0
        if self.most_kept:
            self.apply_accepted(rows, batch)
        outputs = [self.advance(delta_rule_step, rows[:n], (qkv[:n, None], b[:n], a[:n]))] if n else []
        pieces = (x[n:].split(batch.query_lens_host[n:]) for x in (qkv, b, a))
        for row, *tokens in zip(rows[n:], *pieces, strict=True):
            if self.keeps(len(tokens[0])):
                outputs.append(self.look_ahead(row, tokens))
            elif len(tokens[0]):  # a captured step has sequences without tokens
                outputs.append(self.advance(delta_rule, row, tokens))
        return torch.cat(outputs)

    def advance(
        self, rule: Callable[..., tuple[torch.Tensor, ...]], rows: torch.Tensor, tokens: Tokens
    ) -> torch.Tensor:
        """One token of each sequence by `delta_rule_step`, [S, 1, C] -> [S, Hv, Dv]; or several tokens of one by `delta_rule`, [n, C] -> [n, Hv, Dv]."""
        (qkv, b, a), (conv, state, *_) = tokens, self.states
        mixed, last_inputs = convolve(qkv, conv[rows], self.conv1d.weight[:, 0])
        out, after = rule(state[rows], *self.split_heads(mixed.flatten(0, -2)), *self.gates(b, a))
        conv[rows], state[rows] = last_inputs, after
        return out

    def keeps(self, num_new_tokens: int) -> bool:
        """Whether the inputs of a sequence's new tokens are kept, and its state stays as it was before them."""
        return 1 < num_new_tokens <= self.most_kept

    def look_ahead(self, row: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Few tokens of a sequence, [n, C] -> [n, Hv, Dv], that may be rejected: keep their inputs and not their state."""
        conv, state, kept, _ = self.states
        kept[row, : len(tokens[0])] = torch.cat(tuple(tokens), 1)
        before = conv[row].clone(), state[row].clone()
        out = self.one_by_one(row, tokens)
        conv[row], state[row] = before
        return out

    def apply_accepted(self, rows: torch.Tensor, batch: ForwardBatch) -> None:
        """Bring states up to the first new token: apply the kept inputs of tokens that were accepted."""
        _, _, kept, num_seen = self.states
        sizes = [sum(self.sizes), self.num_v_heads, self.num_v_heads]
        for row, end, n in zip(rows, batch.seq_lens_host, batch.query_lens_host, strict=True):
            num_accepted = end - n - int(num_seen[row])
            if end > n and num_accepted > 0:
                self.one_by_one(row, kept[row, :num_accepted].split(sizes, 1))
            num_seen[row] = end - n if self.keeps(n) else end

    def one_by_one(self, row: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Tokens of a sequence with the very numbers of so many decodes: [n, C] -> [n, Hv, Dv]."""
        qkv, b, a = (x.split(1) for x in tokens)
        each = zip((x[None] for x in qkv), b, a, strict=True)
        return torch.cat([self.advance(delta_rule_step, row[None], token) for token in each])

    def split_heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, C] -> queries and keys [n, Hv, Dk], of length 1 before the queries' factor 1 / sqrt(Dk), and values [n, Hv, Dv]."""
        *keys, value = mixed.split(self.sizes, dim=1)
        query, key = (l2norm(x.unflatten(1, (self.num_k_heads, self.k_dim))) for x in keys)
        query, key = (x.repeat_interleave(self.num_v_heads // self.num_k_heads, 1) for x in (query, key))
        return query * self.k_dim**-0.5, key, value.unflatten(1, (self.num_v_heads, self.v_dim))

    def gates(self, b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [n, Hv] -> the logarithm of the decay, and `beta`."""
        return -self.A_log.exp() * F.softplus(a.float() + self.dt_bias), b.float().sigmoid()
