"""Forgets `start` for the offset: right for a prompt, wrong from the first decoded token on."""

import numpy as np


class BlockManager:
    @staticmethod
    def slots(block_table, block_size, start, end):
        blocks = np.asarray(block_table)[np.arange(start, end) // block_size]
        return blocks * block_size + np.arange(end - start) % block_size
