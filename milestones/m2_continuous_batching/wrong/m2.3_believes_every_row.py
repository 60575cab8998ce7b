"""Takes the row of a share that did not reach the last token: a token from the middle of a prompt enters the answer."""


class Scheduler:
    def postprocess(self, output, token_ids):
        for item, token_id in zip(output.scheduled, token_ids, strict=True):
            seq = item.seq
            self.kv.publish(seq)
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
        return [item.seq for item in output.scheduled]
