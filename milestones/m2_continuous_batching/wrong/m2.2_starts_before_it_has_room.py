"""Starts a sequence before it asks for its cache, and takes that back on failure: a running one may take the last blocks, so no watermark is kept."""


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
        while self.waiting and not output.preempted and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            self.kv.match(seq)
            n = self._tokens_of_step(seq, budget)
            seq.start()
            if n == 0 or not self.kv.reserve(seq, n):
                seq.requeue()
                self.kv.free(seq)
                break
            self.waiting.pop(0)
            self.running.append(seq)
            output.add(seq, n)
            budget -= n
        return output
