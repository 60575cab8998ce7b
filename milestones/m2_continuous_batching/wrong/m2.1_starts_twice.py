"""Takes any sequence: a finished one comes back to life."""


class Sequence:
    def start(self):
        self.status = SequenceStatus.RUNNING
