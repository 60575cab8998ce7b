"""Divides by the temperature, which `filter` has done already: at temperature 2 it draws as if it were 4."""


class Sampler:
    def sample_filtered(self, logits, batch):
        import torch
        from folovllm.sample.noise import gumbel

        if batch.all_greedy:
            return logits.argmax(-1)
        drawing = batch.temperature > 0
        logits = logits / torch.where(drawing, batch.temperature, 1.0)[:, None]
        noise = gumbel(batch.seeds, batch.positions, logits.shape[-1])
        return (logits + noise * drawing[:, None]).argmax(-1)
