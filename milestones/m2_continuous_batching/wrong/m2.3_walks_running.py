"""Pairs tokens with `running`, whose order is not the step's: with decodes first, answers are swapped."""


class Scheduler:
    def postprocess(self, output, token_ids):
        updated = []
        for seq, token_id in zip(list(self.running), token_ids):
            self.kv.publish(seq)
            if seq.num_uncomputed_tokens:
                continue
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            updated.append(seq)
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
        return updated
