"""The ratio is clipped at 2. Input: policy 0, engine -1."""

def importance_ratio(policy, engine):
    return (policy.float() - engine.detach().float()).exp().clamp(max=2.0)
