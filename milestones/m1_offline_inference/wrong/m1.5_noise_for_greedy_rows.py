"""Adds noise to greedy rows too when another row of the batch is not greedy."""


class Sampler:
    def sample_filtered(self, logits, batch):
        from folovllm.sample.noise import gumbel

        if batch.all_greedy:
            return logits.argmax(-1)
        return (logits + gumbel(batch.seeds, batch.positions, logits.shape[-1])).argmax(-1)
