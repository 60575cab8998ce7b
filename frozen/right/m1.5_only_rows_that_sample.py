"""Adds noise to the rows with a temperature alone."""

class Sampler:
    def sample_filtered(self, logits, batch):
        if batch.all_greedy:
            return torch.argmax(logits, dim=1)
        tokens = logits.argmax(1)
        noisy = logits + gumbel(batch.seeds, batch.positions, logits.shape[-1])
        return torch.where(batch.temperature > 0, noisy.argmax(1), tokens)
