"""Gives the prompt's log-probabilities to the answer that the delta is for: they belong to the first sequence."""


class Stream:
    def feed(self, delta, now):
        seq = self.seqs[delta.index]
        if not self.has_begun:
            self.seqs[0].prefix = CachedPrefix(num_hit_tokens=delta.num_cached_tokens)
            if delta.token_ids:
                self.metrics.first_token_time = now
        for row in delta.prompt_logprobs or ():
            seq.prompt_logprobs.append(self._with_text(row))
        for row in delta.logprobs or ():
            seq.logprobs.append(self._with_text(row))
        must_look = bool(self.params.stop) or len(delta.token_ids) > 1
        for token_id in delta.token_ids:
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            self.metrics.num_generated_tokens += 1
            if must_look and check_stop_conditions(seq) is not None:  # it cuts the text, and notes what stopped it
                break
        self.newest[delta.index] = now
        if delta.finish_reason is not None:
            self._end(seq, delta.finish_reason, now)
        if self.is_finished or self.streams:
            self._tell()
