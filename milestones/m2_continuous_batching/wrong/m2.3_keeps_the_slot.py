"""A finished sequence leaves the batch but not the cache: blocks run out, and nobody is admitted any more."""


class Scheduler:
    def postprocess(self, sampled):
        outputs = []
        for seq, token_ids in sampled:
            self.kv.cache_blocks(seq)
            new_token_ids, status = [], None
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                new_token_ids.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    break
            if token_ids:
                outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs
