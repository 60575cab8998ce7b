"""Returns only sequences that go on. Input: a sequence that ends in this step."""

class Scheduler:
    def postprocess(self, sampled):
        outputs = []
        for seq, tokens in sampled:
            self.kv.cache_blocks(seq)
            status, new = None, []
            for token in tokens:
                seq.append_token(token)
                seq.detokenizer.append(token)
                new.append(token)
                if status := check_stop_conditions(seq):
                    seq.finish(status)
                    self.running.remove(seq)
                    self.kv.free(seq)
                    break
            if new and not status:
                outputs.append(SequenceOutput(seq, new, status))
        return outputs
