"""Goes back to the bare prompt when preempted: the user sees the answer begin again."""


class Sequence:
    def requeue(self):
        self._expect(SequenceStatus.RUNNING)
        self.status = SequenceStatus.WAITING
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
