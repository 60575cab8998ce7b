"""The state of an engine: for a new listener, and as numbers."""

from __future__ import annotations

from collections.abc import Iterable

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.metrics import EngineStats
from folovllm.engine.output_processor import RequestState
from folovllm.engine.scheduler import SchedulerLike
from folovllm.events import RequestAdded, SequenceState, Snapshot
from folovllm.request import Sequence, SequenceStatus
from folovllm.setup import EngineSetup


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
        blocks=() if kv is None else tuple(kv.states()),
        sequences=tuple(
            SequenceState(
                added=added(seq, request.metrics.arrival_time),
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


def added(seq: Sequence, time: float) -> RequestAdded:
    """The arrival of a sequence."""
    asked = seq.request
    return RequestAdded(
        seq.seq_id, asked.request_id, seq.index, asked.prompt_token_ids, asked.max_tokens, asked.priority, time
    )


def engine_stats(setup: EngineSetup, scheduler: SchedulerLike, num_steps: int, num_preemptions: int) -> EngineStats:
    """Requests and KV cache as they are now. A cache that is no pool of blocks counts as 0 blocks."""
    kv, running = scheduler.kv, scheduler.running
    num_blocks, num_used = (0, 0) if kv is None else (kv.num_blocks, kv.num_used)
    bytes_per_token = setup.kv_bytes_per_token
    bytes_per_block = setup.block_size * bytes_per_token
    num_shared = sum(len(seq.block_table) for seq in running) - num_used  # blocks are full before they are shared
    stored = sum(seq.num_computed_tokens for seq in running) - num_shared * setup.block_size
    return EngineStats(
        waiting=len(scheduler.waiting),
        running=len(running),
        steps=num_steps,
        preemptions=num_preemptions,
        kv_blocks_total=num_blocks,
        kv_blocks_used=num_used,
        kv_tokens_stored=stored,
        kv_bytes_total=num_blocks * bytes_per_block,
        kv_bytes_reserved=num_used * bytes_per_block,
        kv_bytes_used=stored * bytes_per_token,
    )
