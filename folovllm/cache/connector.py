"""Where K/V comes from, and goes to, other than by computing it: the hook of transfers (vLLM's KV connector)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from folovllm.cache.block_manager import Block


class KVConnector:
    """Moves K/V between the cache's blocks and another memory, or another engine. Here it moves nothing.

    The scheduler's side, by vLLM's names. The worker's side needs no hook: `Executor.collective_rpc` calls a function on each rank
    behind all steps so far. All transfers are asynchronous: a request whose K/V comes waits and holds its blocks, and
    the others go on (`folovllm.engine.connected_scheduler`). What has arrived is a cached prefix like any other.

    Blocks may be overwritten by the step that is scheduled next. So what leaves them is read by work that `build_connector_meta`
    queues on each rank: it runs before that step. What comes is written behind all steps that are queued so far.
    """

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int | None:
        """How many tokens can be brought behind the first `num_computed_tokens` of `seq`, which are on the device.

        A number of whole blocks, and less than all tokens: one is left to compute. 0: compute the rest. None: it is not known yet, and the
        request waits until it is.
        """
        return 0

    def update_state_after_alloc(self, seq: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        """Note that `block_ids` are reserved for the `num_external_tokens` that were promised: fill them, in this order.

        `get_finished` must name `seq` some time later, whatever happens, unless `request_finished` comes first.
        """

    def build_connector_meta(self, output: SchedulerOutput) -> None:
        """Tell the workers what to read and write before the step `output`, which may be empty. Called once a step."""

    def get_finished(self) -> Mapping[int, int]:
        """Loads that have ended since the last time: by `seq_id` the number of new tokens that came, in whole blocks from the
        first on. The rest is computed.

        No K/V of older weights may count (`reset`, and `PrefixCache.root`).
        """
        return {}

    def block_evicted(self, block: Block) -> None:
        """A cached block is about to be overwritten by the coming step; it still has its hash and its tokens."""

    def request_finished(self, seq: Sequence, block_ids: list[int]) -> None:
        """`seq` has ended, by itself or aborted, and its blocks are about to be freed. If they were to be filled, that must stop here.

        When this returns, nothing may write to `block_ids` that is not queued on the device.
        """

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in this time."""

    def reset(self) -> None:
        """All cached prefixes are forgotten, as after a change of weights: nothing of before may be found again."""

    def close(self) -> None:
        """The engine ends: its executor is still there. Give back what was taken."""
