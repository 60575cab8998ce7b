"""Keeps K as it is before RoPE, and turns all of a sequence's keys in each step."""

import torch
from blocks import PagedEngine
from model import Model, causal_attention
from sampler import sample


class Late(Model):
    def attend(self, layer, x, positions, attention):
        name = f"model.layers.{layer}.self_attn"
        q, k, v = (self.linear(x, f"{name}.{p}_proj").unflatten(-1, (-1, self.config["head_dim"])) for p in "qkv")
        q = self.rotate(self.norm(q, f"{name}.q_norm"), positions)
        return self.linear(attention(layer, q, self.norm(k, f"{name}.k_norm"), v).flatten(1), f"{name}.o_proj")


class Engine(PagedEngine):
    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        self.model = Late(folder)

    def attend(self, query, keys, values, table, start):
        end = start + len(query)
        key, value = (cache[table].flatten(0, 1)[:end] for cache in (keys, values))
        return causal_attention(query, self.model.rotate(key, torch.arange(end)), value, start)


def make(folder, limits, device):
    return Engine(folder, limits)
