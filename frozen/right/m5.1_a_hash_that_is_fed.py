"""Feeds a hash object; a `while` over blocks."""

def compute_hash(token_ids, prefix):
    hashed = xxhash.xxh64()
    hashed.update(int(prefix).to_bytes(8, "little"))
    hashed.update(token_ids.tobytes())
    return hashed.intdigest()

class PrefixCache:
    def longest_cached_prefix(self, seq):
        found, parent, most = [], ROOT, (seq.num_tokens - 1) // self._block_size
        while len(found) < most:
            i = len(found)
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or block.parent != parent or block.token_ids != self._tokens(seq, i):
                return found
            found.append(block)
            parent = block.serial
        return found
