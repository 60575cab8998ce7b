"""Stops at the first running sequence that gets no room, so those behind it lose a step that they could have had."""


class Scheduler:
    def schedule(self):
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1):
            n = self._tokens_of_step(seq, builder.budget)
            if n == 0 or not self._grow(seq, n, builder):
                break
            builder.add(seq, n)
        while self.waiting and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            n = self._admit(seq, builder)
            if n == 0:
                break
            self.waiting.pop(0)
            seq.start()
            self.running.append(seq)
            builder.add(seq, n)
        return builder.output()
