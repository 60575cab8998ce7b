"""Asks whether the answer is over before the new token is part of it: every answer is one token too long."""


class Scheduler:
    def postprocess(self, sampled):
        outputs = []
        for seq, token_ids in sampled:
            self.kv.cache_blocks(seq)
            new_token_ids, status = [], None
            for token_id in token_ids:
                status = check_stop_conditions(seq)
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                new_token_ids.append(token_id)
                if status is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if token_ids:
                outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs
