"""Passes over a long prompt that does not fit and takes a short one behind it: under load the long one never runs."""


class Scheduler:
    def schedule(self):
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        for seq in sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1):
            n = self._tokens_of_step(seq, builder.budget)
            if n and self._grow(seq, n, builder):
                builder.add(seq, n)
        for seq in list(self.waiting):
            if len(self.running) == self._max_num_seqs:
                break
            n = self._admit(seq, builder)
            if n == 0:
                continue
            self.waiting.remove(seq)
            seq.start()
            self.running.append(seq)
            builder.add(seq, n)
        return builder.output()
