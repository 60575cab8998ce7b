"""The first in rank gives way: whoever has waited longest and computed most loses it all, to those that came later."""


def preempt(scheduler, candidates):
    victim = min(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.add(victim)
    return victim
