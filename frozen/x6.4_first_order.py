"""1 + difference in place of exp. Input: policy 0.1, engine 0."""

def importance_ratio(policy, engine):
    return 1 + policy.float() - engine.detach().float()
