"""A finished sequence leaves the batch but not the cache: blocks run out, and nobody is admitted any more."""


class Scheduler:
    def postprocess(self, output, token_ids):
        updated = []
        for item, token_id in zip(output.scheduled, token_ids, strict=True):
            seq = item.seq
            self.kv.publish(seq)
            if not item.draws:
                continue
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            updated.append(seq)
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
        return updated
