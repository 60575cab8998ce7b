"""A list comprehension with divmod."""

class BlockManager:
    def slots(block_table, block_size, start, end):
        pairs = (divmod(p, block_size) for p in range(start, end))
        return np.array([block_table[i] * block_size + offset for i, offset in pairs], dtype=np.int64)
