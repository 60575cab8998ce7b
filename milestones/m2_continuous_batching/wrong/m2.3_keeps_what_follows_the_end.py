"""Notes the end of an answer and goes on with its list: tokens that were drawn after the end are part of the answer."""


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
                status = check_stop_conditions(seq)
                if status is not None and not seq.status.is_finished:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
            if token_ids:
                outputs.append(SequenceOutput(seq, new_token_ids, status))
        return outputs
