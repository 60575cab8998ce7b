"""A preempted sequence keeps its count of computed tokens: it resumes as if its K/V were still there."""


class Sequence:
    def requeue(self):
        self._expect(SequenceStatus.RUNNING)
        self.status = SequenceStatus.WAITING
