"""Gives all tokens to the first answer, also those of the others."""


class Stream:
    def feed(self, delta, now):
        seq = self.seqs[0]
        if not self.has_begun:
            self.seqs[0].prefix = CachedPrefix(num_hit_tokens=delta.num_cached_tokens)
            self.metrics.first_token_time = now
        for row in delta.logprobs or ():
            seq.logprobs.append(self._with_text(row))
        for token_id in delta.token_ids:
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            self.metrics.num_generated_tokens += 1
            if check_stop_conditions(seq) is not None:
                break
        self.newest[delta.index] = now
        if delta.finish_reason is not None:
            self._end(seq, delta.finish_reason, now)
        if self.is_finished or self.streams:
            self._tell()
