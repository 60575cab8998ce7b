"""Static batching: nobody joins until the whole batch has finished."""


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
        if output.scheduled:
            return output
        while self.waiting and not output.preempted and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            self.kv.match(seq)
            n = self._tokens_of_step(seq, budget)
            if n == 0 or not self.kv.reserve(seq, n):
                self.kv.free(seq)
                break
            self.waiting.pop(0)
            seq.start()
            self.running.append(seq)
            output.add(seq, n)
            budget -= n
        return output
