"""A scheduler that serves short prompts first, and lets nobody be overtaken for ever."""

from __future__ import annotations

from collections.abc import Iterable

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.scheduler import BatchRows, StepBuilder, TokensOfStep
from folovllm.engine.stop import check_stop_conditions
from folovllm.request import Sequence, SequenceOutput, SequenceStatus
from folovllm.step.schedule import SchedulerOutput

PATIENCE = 50  # so often a request may be overtaken; then it goes first


class Scheduler:
    """Continuous batching; of those that wait, the shortest prompt comes in first.

    Invariants: a sequence is in exactly one of `waiting` and `running`, or finished; only running sequences hold cache.
    """

    def __init__(
        self, kv: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int, tokens_of_step: TokensOfStep
    ) -> None:
        self.kv = kv
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._overtaken: dict[Sequence, int] = {}  # of those that wait: how often
        self._rows = BatchRows(max_num_seqs, kv, lambda: self.waiting)
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._tokens_of_step = tokens_of_step

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._overtaken[seq] = 0
        self.waiting.append(seq)

    def abort(self, *seqs: Sequence) -> None:
        """End sequences at once and give back what they hold."""
        gone = set(seqs)
        self.waiting = [seq for seq in self.waiting if seq not in gone]
        self.running = [seq for seq in self.running if seq not in gone]
        for seq in seqs:
            self._overtaken.pop(seq, None)
            seq.finish(SequenceStatus.FINISHED_ABORTED)
            self.kv.free(seq)

    def schedule(self) -> SchedulerOutput:
        """Decodes first, then the rest of prompts that have begun, then newcomers."""
        builder = StepBuilder(self._rows, self.running, self._budget)
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1):
            n = self._tokens_of_step(seq, builder.budget)
            if n and self.kv.allocate_slots(seq, n):
                builder.add(seq, n)
        self.waiting.sort(key=self._rank)
        while self.waiting and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            n = self._tokens_of_step(seq, builder.budget)
            if n == 0 or not self.kv.allocate_slots(seq, n):
                break
            self._start(seq)
            builder.add(seq, n)
        return builder.output()

    def _rank(self, seq: Sequence) -> tuple[bool, int, int]:
        """Who goes first: the smaller."""
        is_patient = self._overtaken[seq] < PATIENCE
        return is_patient, seq.num_tokens if is_patient else 0, seq.seq_id

    def _start(self, seq: Sequence) -> None:
        """The first of those that wait runs from here on; those that came earlier were overtaken."""
        self.waiting.pop(0)
        del self._overtaken[seq]
        for other in self.waiting:
            self._overtaken[other] += other.seq_id < seq.seq_id
        seq.start()
        self.running.append(seq)

    def sequences(self, output: SchedulerOutput) -> list[Sequence]:
        """Whose the shares of the step are that was decided last, in their order."""
        return self._rows.owners(output)

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        """Append the sampled tokens; who ends gives its cache back at once. Returns what each sequence got, and how it ended."""
        outputs = []
        for seq, token_ids in sampled:
            self.kv.cache_blocks(seq)
            new_token_ids, status = list[int](), None
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                new_token_ids.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if new_token_ids:
                outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs
