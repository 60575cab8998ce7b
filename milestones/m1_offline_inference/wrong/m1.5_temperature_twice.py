"""Divides by the temperature, which `filter` has done already: at temperature 2 it samples as if it were 4."""


class Sampler:
    def sample_filtered(self, logits, batch):
        import torch
        from folovllm.sample.noise import gumbel

        if batch.all_greedy:
            return logits.argmax(-1)
        is_random = batch.temperature > 0
        logits = logits / torch.where(is_random, batch.temperature, 1.0)[:, None]
        noise = gumbel(batch.seeds, batch.positions, logits.shape[-1])
        return (logits + noise * is_random[:, None]).argmax(-1)
