"""Makes the noise once, for the first row's seed, and adds it to every row."""


class Sampler:
    def sample_filtered(self, logits, batch):
        from folovllm.sample.noise import gumbel

        if batch.all_greedy:
            return logits.argmax(-1)
        noise = gumbel(batch.seeds[:1], batch.positions[:1], logits.shape[-1])
        return (logits + noise * (batch.temperature > 0)[:, None]).argmax(-1)
