"""Stage 1: from logits to a token."""

from torch import Tensor


def sample(logits: Tensor, temperature: float, noise: Tensor) -> int:
    """Return the token with the largest logit [V], or at a temperature above 0 a random one, by Gumbel-max.

    `noise` [V] has a Gumbel-distributed number for each token: the argmax of logits / temperature + noise is a sample of the
    softmax of logits / temperature. Ties take the lowest id.
    """
    return int(logits.argmax() if temperature == 0 else (logits / temperature + noise).argmax())
