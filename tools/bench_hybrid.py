"""A layer of Gated DeltaNet by itself: `python -m tools.bench_hybrid` on a machine with a CUDA GPU.

Qwen3.5's layer: hidden size 2048, 16 key heads and 32 value heads of 128, a convolution of 4 tokens. Captured graphs
go through several layers in turn, so that no weight and no state is found in the L2 cache.

Microseconds of the convolution, the delta rule, the gated norm, and the whole layer with its projections. For decodes also
the time in which a plain copy moves the states (read and written) and the weights (read), and the share of this floor that
the delta rule and the layer reach; for prompts, million tokens a second of both.
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
from tools.gpu import card_rates, print_row

HEADS, HIDDEN = DeltaHeads(16, 32, 128, 128), 2048
CHANNELS, WIDTH = 2 * 16 * 128 + 32 * 128, 4
BATCHES = (1, 4, 16, 64, 256)
PROMPTS = ((1, 512), (1, 4096), (8, 1024), (1, 16384))  # sequences, tokens of each
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=WIDTH,
)  # fmt: skip


class Layers:
    """Inputs of `count` sequences with `tokens` new tokens each, and some layers with their states."""

    def __init__(self, count: int, tokens: int) -> None:
        total, bf16 = count * tokens, {"dtype": torch.bfloat16}
        with torch.device("cuda"):
            self.x, self.weight = torch.randn(total, CHANNELS, **bf16), torch.randn(CHANNELS, 1, WIDTH, **bf16)
            a, b, self.z = (torch.randn(total, *shape, **bf16) for shape in ((32,), (32,), (32, 128)))
            self.gates, self.norm = (a, b, torch.full((32,), -3.0), torch.zeros(32)), torch.ones(128, **bf16)
            self.conv = torch.zeros(LAYERS, count, WIDTH - 1, CHANNELS, **bf16)
            self.state = torch.zeros(LAYERS, count, 32, 128, 128)
            starts = torch.arange(count + 1, dtype=torch.int32) * tokens
            lens, rows = torch.full((count,), tokens + 100, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
            self.shape = starts, lens, rows, count if tokens == 1 else 0, tokens
            self.hidden = torch.randn(total, HIDDEN, **bf16)
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
        layers = skinny_layers(256).having(hybrid_kernels(256))
        module = layers.make(GatedDeltaNet, CONFIG, layers).bfloat16()
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


@torch.inference_mode()
def main() -> None:
    """Print the lines of decodes and of prompts."""
    torch.manual_seed(0)
    bandwidth = card_rates().copy  # bytes a second, read and written
    titles = "conv", "delta", "norm", "layer"
    print_row("decodes, us a layer", *titles, "states' floor", "floor of all", "delta", "layer")
    for batch in BATCHES:
        layers = Layers(batch, 1)
        states = 2 * layers.state[0].nbytes
        weights = sum(parameter.nbytes for parameter in layers.modules[0].parameters())
        floors, parts = [1e6 * moved / bandwidth for moved in (states, states + weights)], layers.parts(20)
        print_row(f"{batch}", *parts, *floors, f"{floors[0] / parts[1]:.0%}", f"{floors[1] / parts[3]:.0%}")
    print_row("prompts, us a layer", *titles, "delta, Mtok/s", "layer, Mtok/s")
    for count, tokens in PROMPTS:
        parts = Layers(count, tokens).parts(5)
        print_row(f"{count} x {tokens}", *parts, count * tokens / parts[1], count * tokens / parts[3])


if __name__ == "__main__":
    main()
