"""Appends a whole list and asks then: only the newest token is looked at, so an end in the middle is overlooked and the answer goes on."""


class Scheduler:
    def postprocess(self, sampled):
        updated = []
        for seq, token_ids in sampled:
            self.kv.cache_blocks(seq)
            for token_id in token_ids:
                seq.append_token(token_id)
                seq.detokenizer.append(token_id)
            if not token_ids:
                continue
            updated.append(seq)
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
        return updated
