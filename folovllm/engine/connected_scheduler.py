"""A scheduler whose requests may get K/V from elsewhere (`folovllm.cache.connector`): those that wait for it hold up nobody."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from folovllm.cache.connector import KVConnector
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.engine.scheduler import Scheduler
from folovllm.request import Sequence, SequenceOutput
from folovllm.step.schedule import SchedulerOutput

COMING = "kv_transfer"  # in the extras of an empty step: requests wait for K/V that is on its way
PAUSE = 2e-4  # seconds between two looks where there is nothing else to do


class ConnectedScheduler:
    """Puts the requests whose K/V is on its way aside, so that the scheduler inside sees only those that can be computed.

    A request that waits for K/V holds blocks for it. When it has come, the blocks get their hashes and are free: the request waits again
    and finds them as it finds any prefix. So nothing depends on what has not arrived, and cache pressure costs
    at most what was brought. A request is asked about once, and again after a preemption.
    """

    def __init__(self, scheduler: Scheduler, connector: KVConnector) -> None:
        assert isinstance(scheduler.kv, PrefixCachingBlockManager)
        self.inner, self.connector, self.kv = scheduler, connector, scheduler.kv
        self.kv.connector = connector
        self.events = scheduler.events
        self._loading: dict[int, Sequence] = {}  # by seq_id
        self._undecided: list[Sequence] = []  # the connector does not know yet whether K/V comes
        self._asked: set[int] = set()  # by seq_id: requests that wait and need not be asked about again
        self._begun: deque[tuple[int, float]] = deque()  # of steps in flight: tokens and when they were scheduled
        self._arrived = 0.0  # when a step's tokens came last

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """Sequences that are not served yet: first those whose K/V is on its way."""
        aside = [*self._loading.values(), *self._undecided]
        return [*aside, *self.inner.waiting] if aside else self.inner.waiting

    @property
    def running(self) -> SequenceOf[Sequence]:
        return self.inner.running

    @property
    def has_preempted(self) -> bool:
        """Whether an empty step is no error: a sequence gave way, or K/V is on its way."""
        return self.inner.has_preempted or bool(self._loading or self._undecided)

    def must_wait(self) -> bool:
        return self.inner.must_wait()

    def add(self, seq: Sequence) -> None:
        self.inner.add(seq)

    def abort(self, *seqs: Sequence) -> None:
        """End sequences at once, also while their K/V is on its way."""
        for seq in seqs:
            self._asked.discard(seq.seq_id)
            self._loading.pop(seq.seq_id, None)
        self._undecided = [seq for seq in self._undecided if seq not in seqs]
        self.inner.abort(*seqs)

    def schedule(self) -> SchedulerOutput:
        """Take in what has arrived, put aside what can come, and decide the next step with the rest."""
        self._queue_loaded()
        self._start_loads()
        output = self.inner.schedule()
        self._asked.difference_update(output.preempted)
        self.connector.build_connector_meta(output)
        if output.scheduled_seqs:
            self._begun.append((output.num_tokens, time.monotonic()))
        elif self._loading or self._undecided:
            if not self.inner.running:
                time.sleep(PAUSE)
            return replace(output, extras={COMING: np.array([[-1, len(self._loading)]], np.int32)})
        return output

    def sequences(self, output: SchedulerOutput) -> list[Sequence]:
        return self.inner.sequences(output)

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        """Do what `Scheduler.postprocess` does. The connector gets the time since scheduling or the last arrival (the later)."""
        num_tokens, start = self._begun.popleft()
        now = time.monotonic()
        self.connector.observe_step(num_tokens, now - max(start, self._arrived))
        self._arrived = now
        return self.inner.postprocess(sampled)

    def _queue_loaded(self) -> None:
        """Let requests wait again whose K/V has come, as far as it did."""
        for seq_id, num_tokens in self.connector.get_finished().items():
            if (seq := self._loading.pop(seq_id, None)) is not None:  # else it was aborted
                seq.num_computed_tokens += num_tokens
                self.kv.cache_blocks(seq)
                self.kv.free(seq)
                self.inner.add(seq)

    def _start_loads(self) -> None:
        """Reserve blocks for what can come of the requests that wait, in their order, as far as there is room."""
        undecided, self._undecided = self._undecided, []
        for seq in undecided:
            self.inner.add(seq)
        for seq in [seq for seq in self.inner.waiting if seq.seq_id not in self._asked]:
            if not self._ask(seq):
                return

    def _ask(self, seq: Sequence) -> bool:
        """Ask whether K/V of `seq` can come, and put it aside if so. False: there is no room for it, and none for those behind it."""
        self.kv.get_computed_blocks(seq)  # none, if its prompt needs scores: then all is computed
        wanted: int | None = 0
        if not seq.num_unscored_tokens:
            wanted = self.connector.get_num_new_matched_tokens(seq, seq.num_computed_tokens)
        if wanted and self.kv.can_allocate(seq, wanted):
            num_cached = len(seq.block_table)
            self.kv.allocate(seq, wanted)
            self._loading[seq.seq_id] = seq
            self.connector.update_state_after_alloc(seq, seq.block_table[num_cached:], wanted)
        else:
            self.kv.free(seq)
            if wanted:
                return False
        if wanted is None:
            self._undecided.append(seq)
        else:
            self._asked.add(seq.seq_id)
        if wanted != 0:
            self.inner.waiting.remove(seq)
        return True
