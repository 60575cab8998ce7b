"""Passes over a long prompt that does not fit and takes a short one behind it: under load the long one never runs."""


class Scheduler:
    def schedule(self):
        output, budget = SchedulerOutput(), self._max_num_batched_tokens
        pending = sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1)
        while pending:
            seq = pending.pop(0)
            n = self._tokens_of_step(seq, budget)
            if n and self._reserve(seq, n, pending, output):
                output.add(seq, n)
                budget -= n
        for seq in list(self.waiting):
            if output.preempted or len(self.running) == self._max_num_seqs:
                break
            self.kv.match(seq)
            n = self._tokens_of_step(seq, budget)
            if n == 0 or not self.kv.reserve(seq, n):
                self.kv.free(seq)
                continue
            self.waiting.remove(seq)
            seq.start()
            self.running.append(seq)
            output.add(seq, n)
            budget -= n
        return output
