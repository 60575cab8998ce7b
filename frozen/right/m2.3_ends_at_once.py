"""Collects tokens in a list of its own, with for and else."""

class Scheduler:
    def postprocess(self, sampled):
        outputs = []
        for seq, tokens in sampled:
            self.kv.cache_blocks(seq)
            new, status = [], None
            for token in tokens:
                seq.append_token(token)
                seq.detokenizer.append(token)
                new.append(token)
                status = check_stop_conditions(seq)
                if status is not None:
                    seq.finish(status)
                    self.running = [other for other in self.running if other is not seq]
                    self.kv.free(seq)
                    break
            if new:
                outputs.append(SequenceOutput(seq, new, status))
        return outputs
