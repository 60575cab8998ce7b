"""Stops at the first running sequence that gets no room, so those behind it lose a step that they could have had."""


class Scheduler:
    def schedule(self):
        output, budget = SchedulerOutput(), self._max_num_batched_tokens
        pending = sorted(self.running, key=lambda seq: seq.num_uncomputed_tokens > 1)
        while pending:
            seq = pending.pop(0)
            n = self._tokens_of_step(seq, budget)
            if n == 0 or not self._reserve(seq, n, pending, output):
                break
            output.add(seq, n)
            budget -= n
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
