"""Empties the table of blocks itself: the cache takes blocks back by that table, so they are lost for ever."""


class Sequence:
    def requeue(self):
        self._expect(SequenceStatus.RUNNING)
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0
        self.block_table = []
