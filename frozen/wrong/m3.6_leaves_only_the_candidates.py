"""Removes the victim from the candidates, which may be a list of their own. Input: candidates that are a copy of `running`."""

def preempt(scheduler, candidates):
    if not candidates:
        return None
    victim = max(candidates, key=scheduler.rank)
    candidates.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    victim.num_computed_tokens = 0
    scheduler.add(victim)
    return victim
