"""Only turns the status: the sequence resumes as if the K/V it gave up were still there."""


def preempt(scheduler, candidates):
    from folovllm.request import SequenceStatus

    victim = max(candidates, key=scheduler.rank)
    scheduler.running.remove(victim)
    scheduler.kv.free(victim)
    victim.status = SequenceStatus.WAITING
    scheduler.add(victim)
    return victim
