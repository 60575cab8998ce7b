"""The state of the prefix cache for one sequence. The sequence carries it; only the prefix cache uses it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CachedPrefix:
    """What the prefix cache knows of a sequence's blocks."""

    root: int | None = None  # what stands before the first block, None: the cache's root when a hash is first needed
    hashes: list[int] = field(default_factory=list)  # of the full blocks, as far as they were needed
    tokens: list[bytes] = field(default_factory=list)  # of the same blocks
    serials: list[int] = field(default_factory=list)  # of the blocks that are published, while they are held
    num_hit_tokens: int | None = None  # found at the first admission
