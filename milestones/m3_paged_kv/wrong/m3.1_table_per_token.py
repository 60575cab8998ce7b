"""Looks the block up by the offset on it, so the second block is never reached: the two halves of the address are swapped."""

import numpy as np


class BlockManager:
    @staticmethod
    def slots(block_table, block_size, start, end):
        positions = np.arange(start, end)
        blocks = np.asarray(block_table)[positions % block_size % len(block_table)]
        return blocks * block_size + positions // block_size
