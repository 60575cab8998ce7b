"""Names all full blocks of the prompt when the first chunk is computed: others find blocks that hold nothing yet."""

from attention import attend
from prefix import ChunkedEngine, PrefixBlocks
from sampler import sample


class Early(PrefixBlocks):
    def allocate(self, request, end):
        return super().allocate(request, len(request.tokens))

    def publish(self, request, end):
        super().publish(request, len(request.tokens))


class Wrong(ChunkedEngine):
    memory_type = Early


def make(folder, limits, device):
    return Wrong(folder, limits)
