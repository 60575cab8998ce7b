"""The gated delta rule in torch: a state of fixed size in place of a KV cache that grows (Yang et al. 2024, "Gated Delta Networks").

The state S [Dk, Dv] of a head is a memory of pairs: k S is what it holds for key k. All vectors are rows. A token with key k and
value v changes it to

    S <- a S;  S <- S + b k^T (v - k S);  and reads  o = q S

First all that it holds fades by the factor a = exp(g). Then the answer for k moves towards v by the share b, the *delta*. Keys have
length 1, so with b = 1 the answer for k is v afterwards, and answers for keys at right angles to k stay as they are.
"""

from __future__ import annotations

import torch

CHUNK = 64  # tokens that are computed at once
EPS = 1e-6  # under the root, where a vector is divided by its length


def delta_rule_step(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence, by the formula above: the recurrent form.

    Args:
        state: [S, H, Dk, Dv] float32, before the token.
        query, key: [S, H, Dk]; value: [S, H, Dv].
        g: [S, H], the logarithm of the decay, at most 0. beta: [S, H], between 0 and 1.

    Returns:
        What the queries read [S, H, Dv], and the state after the token. `state` itself does not change.
    """
    state = state * g.exp()[..., None, None]
    delta = beta[..., None] * (value - torch.einsum("shk,shkv->shv", key, state))
    state = state + torch.einsum("shk,shv->shkv", key, delta)
    return torch.einsum("shk,shkv->shv", query, state), state


def delta_rule_chunk(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n tokens of one sequence at once, with the result of n steps: the chunked form (sections 3.2 and 3.3 of the paper).

    Let c_i = g_0 + ... + g_i, and d_i be what token i writes: it adds k_i^T d_i to the state. Token i finds what the chunk began with,
    decayed by exp(c_i), and what each token j before it has added, decayed by exp(c_i - c_j):

        d_i = b_i (v_i - exp(c_i) k_i S - sum over j < i of exp(c_i - c_j) (k_i . k_j) d_j)

    That is a triangular system of n equations (`torch.linalg.solve_triangular`). Its solution gives the outputs and the
    state, all by products of matrices and without a loop over tokens:

        o_i = exp(c_i) q_i S + sum over j <= i of exp(c_i - c_j) (q_i . k_j) d_j
        S   = exp(c_last) S + sum over j of exp(c_last - c_j) k_j^T d_j

    No exponent may be positive, for exp(-c_j) alone overflows in a long chunk.

    Args:
        state: [H, Dk, Dv] float32, before the first token.
        query, key: [n, H, Dk]; value: [n, H, Dv]; g, beta: [n, H], as of `delta_rule_step`.

    Returns:
        What the queries read [n, H, Dv], and the state after the last token.
    """
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)  # [H, n, Dk] or [H, n, Dv]
    c, beta = g.cumsum(0).T, beta.T[..., None]  # [H, n], [H, n, 1]
    decay = (
        (c[:, :, None] - c[:, None, :]).masked_fill(~lower_triangle(len(g), g.device), -torch.inf).exp()
    )  # [H, n, n]
    since_start, until_end = c.exp()[..., None], (c[:, -1:] - c).exp()[..., None]  # [H, n, 1]
    system = beta * (key @ key.mT) * decay
    rhs = beta * (value - since_start * (key @ state))
    delta = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)  # [H, n, Dv]
    out = since_start * (query @ state) + ((query @ key.mT) * decay) @ delta
    state = since_start[:, -1:] * state + (until_end * key).mT @ delta
    return out.transpose(0, 1), state


def delta_rule(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `delta_rule_chunk` does, of any number of tokens: each chunk begins with the state that the one before left."""
    outputs = []
    for part in zip(*(x.split(CHUNK) for x in (query, key, value, g, beta)), strict=True):
        out, state = delta_rule_chunk(state, *part)
        outputs.append(out)
    return torch.cat(outputs), state


def lower_triangle(n: int, device: torch.device) -> torch.Tensor:
    """[n, n] bool: True where the column is at most the row."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., D] with length 1, in float32. A vector of zeros stays zero."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)
