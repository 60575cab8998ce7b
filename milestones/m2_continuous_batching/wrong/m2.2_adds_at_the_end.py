"""Gathers the shares in a list of its own and adds them to the plan at the end: one whose cache was taken from it in the meantime keeps its share, and its blocks belong to somebody else."""


class Scheduler:
    def schedule(self):
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        chosen, budget = [], builder.budget
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1):
            n = self._tokens_of_step(seq, budget)
            if n and self._grow(seq, n, builder):
                chosen.append((seq, n))
                budget -= n
        for seq, n in chosen:
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
