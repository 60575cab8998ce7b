"""A gradient flows into the engine's. Input: an engine tensor that requires one."""

def importance_ratio(policy, engine):
    return (policy.float() - engine.float()).exp()
