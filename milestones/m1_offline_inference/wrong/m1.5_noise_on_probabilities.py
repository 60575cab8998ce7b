"""Adds the noise to probabilities instead of logits: rare tokens come far too often."""


class Sampler:
    def sample_filtered(self, logits, batch):
        from folovllm.sample.noise import gumbel

        if batch.all_greedy:
            return logits.argmax(-1)
        noise = gumbel(batch.seeds, batch.positions, logits.shape[-1])
        return (logits.softmax(-1) + noise * (batch.temperature > 0)[:, None]).argmax(-1)
