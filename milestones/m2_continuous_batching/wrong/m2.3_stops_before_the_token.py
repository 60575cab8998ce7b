"""Asks whether the answer is over before the new token is part of it: every answer is one token too long."""


class Scheduler:
    def postprocess(self, output, token_ids):
        updated = []
        for item, token_id in zip(output.scheduled, token_ids, strict=True):
            seq = item.seq
            self.kv.publish(seq)
            if not item.draws:
                continue
            updated.append(seq)
            status = check_stop_conditions(seq)
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            if status is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
        return updated
