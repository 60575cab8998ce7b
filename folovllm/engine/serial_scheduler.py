"""The first scheduler: one request after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from folovllm.engine.step_builder import BatchRows, StepBuilder
from folovllm.engine.stop import check_stop_conditions
from folovllm.event_stream import Events
from folovllm.events import Aborted, Admitted
from folovllm.request import Sequence, SequenceStatus
from folovllm.step.schedule import SchedulerOutput


class SerialScheduler:
    """One request at a time, first come, first served: the whole prompt in one step, then a token a step."""

    kv = None

    def __init__(self, events: Events | None = None) -> None:
        self.events = Events() if events is None else events
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._rows = BatchRows(1, self.events, lambda: self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def abort(self, *seqs: Sequence) -> None:
        """End sequences at once."""
        gone = set(seqs)  # one pass for all: to remove each by itself is quadratic
        self.waiting = deque(seq for seq in self.waiting if seq not in gone)
        self.running = [seq for seq in self.running if seq not in gone]
        for seq in seqs:
            seq.status = SequenceStatus.FINISHED_ABORTED
            if self.events.on:
                self.events.emit(Aborted(seq.seq_id))

    def schedule(self) -> SchedulerOutput:
        """All tokens of the current sequence that are not computed yet."""
        if not self.running and self.waiting:
            seq = self.waiting.popleft()
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            if self.events.on:
                self.events.emit(Admitted(seq.seq_id, 0))
        builder = StepBuilder(self._rows, self.running, budget=0)
        for seq in self.running:
            builder.add(seq, seq.num_uncomputed_tokens)
        return builder.output()

    def sequences(self, output: SchedulerOutput) -> list[Sequence]:
        """The sequences of the step that was decided last."""
        return self._rows.owners(output)

    def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[Sequence]:
        """Append the token; leave when it ends the answer."""
        updated = []
        for seq, (token_id,) in sampled:
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            updated.append(seq)
            if (status := check_stop_conditions(seq)) is not None:
                seq.status = status
                self.running.remove(seq)
        return updated
