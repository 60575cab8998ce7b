"""The victim leaves but keeps its blocks: nobody gains anything by it."""


def preempt(scheduler, candidates):
    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    victim.requeue()
    scheduler.add(victim)
    return victim
