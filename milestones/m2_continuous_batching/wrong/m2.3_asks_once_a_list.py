"""Appends a whole list and asks then: only the newest token is looked at, so an end in the middle is overlooked and the answer goes on."""


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
            if not token_ids:
                continue
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
            outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs
