"""Goes to float32 when the difference is already rounded to the 16 bits of both."""


def importance_ratio(policy, engine):
    return (policy - engine.detach()).float().exp()
