"""A running sequence for which the budget has nothing left takes part with 0 tokens. Input: more to compute than the budget."""

class Scheduler:
    def schedule(self):
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1):
            n = self._tokens_of_step(seq, builder.budget)
            if self._grow(seq, n, builder):
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
