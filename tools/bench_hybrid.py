"""A layer of Gated DeltaNet by itself: `python -m tools.bench_hybrid` on a machine with a CUDA GPU.

Qwen3.5's layer: hidden size 2048, 16 key heads and 32 value heads of 128, a convolution of 4 tokens. Captured graphs
go through several layers in turn, so that no weight and no state is found in the L2 cache.

Decodes, for several batch sizes: microseconds of the convolution, the delta rule, the gated norm, and the whole layer with its
projections; beside them the time in which a plain copy moves the states (read and written) and the weights (read), and the
share of this floor that the delta rule and the layer reach. Prompts: microseconds of the parts, and tokens a second.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from folovllm.electives.hybrid.fused import hybrid_kernels
from folovllm.electives.hybrid.gated_delta_net import GatedDeltaNet
from folovllm.electives.hybrid.kernels.delta_rule import DeltaHeads, delta_rule
from folovllm.electives.hybrid.kernels.gated_norm import gated_norm
from folovllm.electives.hybrid.kernels.short_conv import short_conv
from folovllm.models.fused_layer import skinny_layers
from folovllm.step.forward_batch import ForwardBatch
from tools.bench_experts import LAYERS, microseconds_a_layer
from tools.gpu import card_rates

HEADS, HIDDEN = DeltaHeads(16, 32, 128, 128), 2048
CHANNELS, WIDTH = 2 * 16 * 128 + 32 * 128, 4
BATCHES = (1, 4, 16, 64, 256)
PROMPTS = ((1, 512), (1, 4096), (8, 1024), (1, 16384))  # sequences, tokens of each


class Layers:
    """Inputs of `count` sequences with `tokens` new tokens each, and some layers with their states."""

    def __init__(self, count: int, tokens: int) -> None:
        with torch.device("cuda"):
            total = count * tokens
            self.x = torch.randn(total, CHANNELS, dtype=torch.bfloat16)
            self.weight = torch.randn(CHANNELS, 1, WIDTH, dtype=torch.bfloat16)
            self.gates = (
                torch.randn(total, 32, dtype=torch.bfloat16), torch.randn(total, 32, dtype=torch.bfloat16),
                torch.full((32,), -3.0), torch.zeros(32),
            )  # fmt: skip
            self.z, self.norm = torch.randn(total, 32, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
            self.conv = torch.zeros(LAYERS, count, WIDTH - 1, CHANNELS, dtype=torch.bfloat16)
            self.state = torch.zeros(LAYERS, count, 32, 128, 128)
            starts = torch.arange(count + 1, dtype=torch.int32) * tokens
            lens, rows = torch.full((count,), tokens + 100, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
            self.shape = starts, lens, rows, count if tokens == 1 else 0, tokens
            self.hidden = torch.randn(total, HIDDEN, dtype=torch.bfloat16)
            self.modules = [self.module(layer) for layer in range(LAYERS)]
        self.mixed, self.out = self.convolve(0), torch.empty_like(self.z)
        nothing = torch.empty(0)
        self.batch = ForwardBatch(
            nothing, nothing, nothing, starts, lens, nothing, nothing, num_seqs=count, num_decodes=self.shape[3],
            max_query_len=tokens, max_seq_len=tokens + 100, query_lens_host=[tokens] * count,
            seq_lens_host=[tokens + 100] * count, rows=rows,
        )  # fmt: skip

    def module(self, layer: int) -> GatedDeltaNet:
        """A layer with random weights."""
        config = SimpleNamespace(
            hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=WIDTH,
        )  # fmt: skip
        layers = skinny_layers(256).having(hybrid_kernels(256))
        module = layers.make(GatedDeltaNet, config, layers).bfloat16()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        module.A_log.data, module.dt_bias.data = self.gates[2:]
        module.states = self.conv[layer], self.state[layer]
        return module

    def convolve(self, layer: int) -> torch.Tensor:
        return short_conv(self.x, self.conv[layer], self.weight, *self.shape)

    def delta(self, layer: int) -> torch.Tensor:
        return delta_rule(self.mixed, self.gates, self.state[layer], HEADS, *self.shape)

    def normed(self, layer: int) -> torch.Tensor:
        return gated_norm(self.out, self.z, self.norm, 1e-6)

    def whole(self, layer: int) -> torch.Tensor:
        return self.modules[layer](self.hidden, self.batch)

    def parts(self, replays: int) -> list[float]:
        """Microseconds of each."""
        return [microseconds_a_layer(work, replays) for work in (self.convolve, self.delta, self.normed, self.whole)]


def decodes(batch: int, bandwidth: float) -> None:
    """A line for a batch of decodes; `bandwidth` in bytes a second, read and written."""
    layers = Layers(batch, 1)
    states = 2 * layers.state[0].nbytes
    weights = sum(parameter.nbytes for parameter in layers.modules[0].parameters())
    floors = [1e6 * moved / bandwidth for moved in (states, states + weights)]
    parts = layers.parts(20)
    times = "  ".join(f"{part:8.1f}" for part in (*parts, *floors))
    print(f"{batch:6}  {times}  {floors[0] / parts[1]:6.0%}  {floors[1] / parts[3]:6.0%}", flush=True)


def prompts(count: int, tokens: int) -> None:
    """A line for a step of prompts."""
    parts = Layers(count, tokens).parts(5)
    times = "  ".join(f"{part:8.1f}" for part in parts)
    speeds = "  ".join(f"{count * tokens / part:6.1f}" for part in (parts[1], parts[3]))
    print(f"{count:3} x {tokens:6}  {times}  {speeds}", flush=True)


@torch.inference_mode()
def main() -> None:
    """Print the lines of decodes and of prompts."""
    torch.manual_seed(0)
    bandwidth = card_rates().copy
    print("microseconds a layer")
    print(" batch      conv     delta      norm     layer     floors: states, all         delta   layer")
    for batch in BATCHES:
        decodes(batch, bandwidth)
    print("     prompts      conv     delta      norm     layer  million tokens/s: delta, layer")
    for count, tokens in PROMPTS:
        prompts(count, tokens)


if __name__ == "__main__":
    main()
