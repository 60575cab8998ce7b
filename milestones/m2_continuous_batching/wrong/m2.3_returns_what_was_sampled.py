"""Returns the list that the step sampled: whoever hands out the answer shows tokens that are no part of it."""


class Scheduler:
    def postprocess(self, sampled):
        outputs = []
        for seq, token_ids in sampled:
            self.kv.cache_blocks(seq)
            status = None
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if token_ids:
                outputs.append(SequenceOutput(seq, token_ids, status))
        return outputs
