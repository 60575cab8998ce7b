"""Packs both numbers at once."""

def generation_root(salt, generation):
    import struct

    if not generation:
        return salt
    return xxhash.xxh64(struct.pack("<QQ", generation, salt)).intdigest()
