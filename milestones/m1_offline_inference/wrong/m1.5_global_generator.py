"""Samples with torch's global generator: a seed no longer says what comes out, and neighbours disturb each other."""


class Sampler:
    def sample_filtered(self, logits, batch):
        import torch

        greedy = logits.argmax(-1)
        if batch.all_greedy:
            return greedy
        sampled = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        return torch.where(batch.temperature > 0, sampled, greedy)
