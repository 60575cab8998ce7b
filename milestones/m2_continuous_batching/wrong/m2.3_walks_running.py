"""Walks `running` and takes out of it on the way: whoever stands behind one that ends is passed over, and the order is not the step's."""


class Scheduler:
    def postprocess(self, sampled):
        outputs, tokens = [], dict(sampled)
        for seq in self.running:
            token_ids = tokens.get(seq, [])
            self.kv.cache_blocks(seq)
            new_token_ids, status = [], None
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
                new_token_ids.append(token_id)
                if (status := check_stop_conditions(seq)) is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if token_ids:
                outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs
