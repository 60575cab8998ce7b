"""Multiplies in int32, and converts what has overflowed: block 2^28 of 16 tokens begins at 2^32, which becomes 0."""


class BlockManager:
    def slots(block_table, block_size, start, end):
        at = np.arange(start, end)
        blocks = np.array(block_table, np.int32)[at // block_size]
        return (blocks * block_size).astype(np.int64) + at % block_size
