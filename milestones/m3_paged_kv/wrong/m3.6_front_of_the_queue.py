"""Puts the victim in front of everybody, also of those that are more urgent: it takes the room that they wait for."""


def preempt(scheduler, candidates):
    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.waiting.insert(0, victim)
    return victim
