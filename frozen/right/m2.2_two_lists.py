"""Two lists of running sequences, and a `for` with a break over a copy of those that wait."""

class Scheduler:
    def schedule(self):
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        decodes, rest = [], []
        for seq in self.running:
            (decodes if seq.num_uncomputed_tokens == 1 else rest).append(seq)
        for seq in [*decodes, *rest]:
            tokens = self._tokens_of_step(seq, builder.budget)
            if tokens and self._grow(seq, tokens, builder):
                builder.add(seq, tokens)
        for seq in tuple(self.waiting):
            if len(self.running) == self._max_num_seqs:
                break
            tokens = self._admit(seq, builder)
            if not tokens:
                break
            self.waiting.remove(seq)
            seq.start()
            self.running.append(seq)
            builder.add(seq, tokens)
        return builder.output()
