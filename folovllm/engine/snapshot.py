"""The state of an engine as a value, for a listener that comes in the middle."""

from __future__ import annotations

from collections.abc import Iterable

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.events import RequestAdded, SequenceState, Snapshot
from folovllm.engine.output_processor import RequestState
from folovllm.engine.setup import EngineSetup
from folovllm.request import Sequence, SequenceStatus


def snapshot(
    setup: EngineSetup, kv: KVCacheManager | None, num_steps: int, requests: Iterable[RequestState]
) -> Snapshot:
    """The state that later events change. `kv` is None where the cache is no pool of blocks."""
    return Snapshot(
        num_blocks=0 if kv is None else kv.num_blocks,
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        num_steps=num_steps,
        blocks=() if kv is None else tuple(kv.block_states()),
        sequences=tuple(
            SequenceState(
                added=request_added(seq, request.metrics.arrival_time),
                is_running=seq.status is SequenceStatus.RUNNING,
                num_tokens=seq.num_tokens,
                num_computed_tokens=seq.num_computed_tokens,
                block_table=tuple(seq.block_table),
                token_ids=seq.token_ids.tolist(),
            )
            for request in requests
            for seq in request.seqs
            if not seq.status.is_finished
        ),
    )


def request_added(seq: Sequence, time: float) -> RequestAdded:
    """The arrival of a sequence."""
    asked = seq.request
    return RequestAdded(
        seq.seq_id, asked.request_id, seq.index, asked.prompt_token_ids, asked.max_tokens, asked.priority, time
    )
