"""The first scheduler: one request after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from folovllm.engine.event_stream import Events
from folovllm.engine.events import Aborted, Admitted, Refused, StepBegan
from folovllm.engine.logprobs import scores_of
from folovllm.engine.stop import check_stop_conditions
from folovllm.request import Sequence, SequenceOutput, SequenceStatus, sampling_spec
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput


class SerialScheduler:
    """One request at a time, first come, first served: the whole prompt in one step, then a token a step."""

    kv = None  # no cache manager: each sequence's cache grows by itself

    def __init__(self, events: Events | None = None) -> None:
        self.events = Events() if events is None else events
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._num_steps = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def abort(self, *seqs: Sequence) -> None:
        gone = set(seqs)  # one pass for all: to remove each by itself is quadratic
        self.waiting = deque(seq for seq in self.waiting if seq not in gone)
        self.running = [seq for seq in self.running if seq not in gone]
        for seq in seqs:
            seq.status = SequenceStatus.FINISHED_ABORTED
            if self.events.on:
                self.events.emit(Aborted(seq.seq_id))

    def schedule(self) -> SchedulerOutput:
        """All tokens of the current sequence that are not computed yet."""
        start_time = time.monotonic()
        if not self.running and self.waiting:
            seq = self.waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            if self.events.on:
                self.events.emit(Admitted(seq.seq_id, 0))
        output = SchedulerOutput(tuple(map(self._scheduled, self.running)))
        if self.events.on and output.scheduled_seqs:
            if self.waiting:
                self.events.emit(Refused(self.waiting[0].seq_id, budget="sequences"))
            self.events.emit(StepBegan(self._num_steps, start_time, time.monotonic(), output, budget_left=0))
        self._num_steps += len(output.scheduled_seqs)
        return output

    def _scheduled(self, seq: Sequence) -> ScheduledSequence:
        start, end = seq.num_computed_tokens, seq.num_tokens
        sampling = None if start else sampling_spec(seq)  # with its first step
        seq.num_computed_tokens = end
        scores = None if seq.params.prompt_logprobs is None else scores_of(seq, start, end)
        return ScheduledSequence(
            seq_id=seq.seq_id, row=0, start=start, end=end, token_ids=seq.tokens(start, end),
            new_blocks=(), first_new_block=0, num_samples=1, sampling=sampling, scores=scores,
        )  # fmt: skip

    def sequences(self, output: SchedulerOutput) -> list[Sequence]:
        """The sequences of the last step: the one that runs."""
        return list(self.running)

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
        """Append the token; leave when it ends the answer."""
        outputs = []
        for seq, token_ids in sampled:
            for token_id in token_ids:  # one; none if it broke a grammar
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.status = status
                    self.running.remove(seq)
                outputs.append(SequenceOutput(seq, [token_id], status))
        return outputs
