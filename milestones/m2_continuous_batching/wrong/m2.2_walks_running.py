"""Walks `running` as it is: prompts are served before decodes, and when somebody gives way on the walk, the one behind is passed over."""


class Scheduler:
    def schedule(self):
        builder = StepBuilder(self._rows, self.running, self._max_num_batched_tokens)
        for seq in self.running:
            n = self._tokens_of_step(seq, builder.budget)
            if n and self._grow(seq, n, builder):
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
