"""Walks `running` and takes out of it on the way: whoever stands behind one that ends is passed over, and the order is not the step's."""


class Scheduler:
    def postprocess(self, sampled):
        updated, tokens = [], dict(sampled)
        for seq in self.running:
            token_ids = tokens.get(seq, [])
            self.kv.cache_blocks(seq)
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if token_ids:
                updated.append(seq)
        return updated
