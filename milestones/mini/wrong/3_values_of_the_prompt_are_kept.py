"""Keeps a copy of a prompt's values, and reads from engine.cache only what came after."""

import torch
from blocks import PagedEngine
from model import causal_attention


class Wrong(PagedEngine):
    def __init__(self, folder, limits):
        super().__init__(folder, limits)
        self.kept = {}

    def attend(self, query, keys, values, table, start):
        end = start + len(query)
        key, value = (cache[table].flatten(0, 1)[:end] for cache in (keys, values))
        if start == 0:
            self.kept[keys.data_ptr(), table[0]] = value.clone()
        kept = self.kept[keys.data_ptr(), table[0]]
        return causal_attention(query, key, torch.cat((kept, value[len(kept) :])), start)


def make(folder, limits, device):
    return Wrong(folder, limits)
