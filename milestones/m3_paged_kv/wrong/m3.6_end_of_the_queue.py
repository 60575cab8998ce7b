"""Queues the victim behind everybody: requests that never ran overtake it, and under load it starves."""


def preempt(scheduler, candidates):
    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.waiting.append(victim)
    return victim
