"""Takes the last candidate in the list for the last to arrive: after a resumption the list is in another order, and the oldest gives way again."""


def preempt(scheduler, candidates):
    victim = candidates[-1]
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.add(victim)
    return victim
