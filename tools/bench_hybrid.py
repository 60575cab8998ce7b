"""A layer of Gated DeltaNet by itself: `python -m tools.bench_hybrid` on a machine with a CUDA GPU.

Qwen3-Next's geometry: 16 key heads and 32 value heads of 128, a convolution of 4 tokens. For decodes of several batch sizes the
microseconds of the convolution, of the delta rule and of the gated norm in a captured graph, layers in turn so that no state is
found in the L2 cache; beside them the time in which a plain copy moves the states, read and written, and the share of it that
all three reach. For prompts the microseconds of a layer, and tokens a second. `--check` compares each with the torch form.
"""

from __future__ import annotations

import argparse

import torch

from folovllm.hybrid.delta_rule import delta_rule as in_torch
from folovllm.hybrid.delta_rule import l2norm
from folovllm.hybrid.kernels.delta_rule import DeltaHeads, delta_rule
from folovllm.hybrid.kernels.gated_norm import gated_norm
from folovllm.hybrid.kernels.short_conv import short_conv
from tools.bench_attention import copy_bandwidth
from tools.bench_experts import LAYERS, microseconds

HEADS = DeltaHeads(16, 32, 128, 128)
CHANNELS, WIDTH = 2 * 16 * 128 + 32 * 128, 4
BATCHES = (1, 4, 16, 64, 256)
PROMPTS = ((1, 512), (1, 4096), (8, 1024), (1, 16384))  # sequences, tokens of each


class Layers:
    """Inputs of `count` sequences with `tokens` new tokens each, and the states of some layers."""

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
        self.shape, self.tokens = (starts, lens, rows, count if tokens == 1 else 0), tokens
        self.mixed, self.out = self.convolve(0), torch.empty_like(self.z)

    def convolve(self, layer: int) -> torch.Tensor:
        return short_conv(self.x, self.conv[layer], self.weight, *self.shape, self.tokens)

    def delta(self, layer: int) -> torch.Tensor:
        return delta_rule(self.mixed, self.gates, self.state[layer], HEADS, *self.shape)

    def normed(self, layer: int) -> torch.Tensor:
        return gated_norm(self.out, self.z, self.norm, 1e-6)

    def all(self, layer: int) -> None:
        mixed = self.convolve(layer)
        out = delta_rule(mixed, self.gates, self.state[layer], HEADS, *self.shape)
        gated_norm(out, self.z, self.norm, 1e-6)


def decodes(batch: int, bandwidth: float) -> None:
    """A line for a batch of decodes; `bandwidth` in bytes a second."""
    layers = Layers(batch, 1)
    floor = 2 * layers.state[0].nbytes / bandwidth * 1e6
    parts = [microseconds(work) for work in (layers.convolve, layers.delta, layers.normed, layers.all)]
    times = "  ".join(f"{part:8.1f}" for part in parts)
    print(f"{batch:6}  {times}  {floor:8.1f}  {floor / parts[1]:6.0%}  {floor / parts[3]:6.0%}", flush=True)


def prompts(count: int, tokens: int) -> None:
    """A line for a step of prompts."""
    layers = Layers(count, tokens)
    parts = [microseconds(work, 5) for work in (layers.convolve, layers.delta, layers.normed, layers.all)]
    times = "  ".join(f"{part:8.1f}" for part in parts)
    print(f"{count:3} x {tokens:6}  {times}  {count * tokens / parts[3]:6.1f} million tokens/s and layer", flush=True)


def check(tokens: int = 300) -> None:
    """Print how far the kernel for prompts is from the torch form in float32, as a share of the largest output."""
    layers = Layers(1, tokens)
    a, b, A_log, dt_bias = layers.gates
    query, key, value = layers.mixed.float().split([2048, 2048, 4096], 1)
    query, key = (l2norm(x.view(-1, 16, 128)).repeat_interleave(2, 1) for x in (query, key))
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    beta, value = b.float().sigmoid(), value.reshape(-1, 32, 128)
    expected, state = in_torch(torch.zeros_like(layers.state[0, 0]), query * 128**-0.5, key, value, g, beta)
    actual = layers.delta(0).float()
    off = (actual - expected).abs().max() / expected.abs().max()
    off_state = (layers.state[0, 0] - state).abs().max() / state.abs().max()
    print(f"{tokens} tokens in bfloat16: outputs are off by {off:.2e} of the largest, states by {off_state:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the torch form first")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        if arguments.check:
            check()
        bandwidth = 1e12 * copy_bandwidth()
        print(f"{torch.cuda.get_device_name()}, a copy moves {bandwidth / 1e9:,.0f} GB/s; microseconds a layer")
        print(" batch  conv      delta     norm      all       floor     delta   all")
        for batch in BATCHES:
            decodes(batch, bandwidth)
        print("     prompts  conv      delta     norm      all")
        for count, tokens in PROMPTS:
            prompts(count, tokens)


if __name__ == "__main__":
    main()
