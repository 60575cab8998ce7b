"""start checks nothing. Input: a finished sequence."""

class Sequence:
    def start(self):
        self.status = SequenceStatus.RUNNING
