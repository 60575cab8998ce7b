"""Sorts a copy by rank, and takes its last."""

def preempt(scheduler, candidates):
    if not candidates:
        return None
    victim = sorted(candidates, key=scheduler.rank)[-1]
    scheduler.running = [seq for seq in scheduler.running if seq is not victim]
    scheduler.kv.free(victim)
    victim.requeue()
    scheduler.add(victim)
    return victim
