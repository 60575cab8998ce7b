"""Puts the victim before all that wait, whatever they rank. Input: somebody more urgent waits."""

def preempt(scheduler, candidates):
    if not candidates:
        return None
    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.waiting.insert(0, victim)
    return victim
