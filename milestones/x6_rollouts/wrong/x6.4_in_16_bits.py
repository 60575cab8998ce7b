"""Subtracts in the dtype of its inputs: of two bfloat16 numbers near each other the difference keeps few digits."""


def importance_ratio(policy, engine):
    return (policy - engine.detach().to(policy.dtype)).exp()
