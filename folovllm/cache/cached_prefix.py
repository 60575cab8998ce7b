"""What the prefix cache counts, and its state for one sequence, which carries it; only the prefix cache uses it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CachedPrefix:
    """What the prefix cache knows of a sequence's blocks."""

    root: int | None = None  # what stands before the first block, None: the cache's root when a hash is first needed
    hashes: list[int] = field(default_factory=list)  # of the full blocks, as far as they were needed
    tokens: list[bytes] = field(default_factory=list)  # of the same blocks
    serials: list[int] = field(default_factory=list)  # of the blocks that are published, while they are held
    num_hit_tokens: int | None = None  # found at the first admission


@dataclass(slots=True)
class PrefixCacheStats:
    """Counted at admission, so that a request which waits is not counted at each step."""

    requests: int = 0
    requests_hit: int = 0
    tokens: int = 0  # asked for
    tokens_hit: int = 0  # found
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the admitted tokens that were not computed again."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0
