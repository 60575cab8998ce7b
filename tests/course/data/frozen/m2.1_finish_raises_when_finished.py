"""finish of a finished sequence raises. Input: finish twice."""

class Sequence:
    def finish(self, status):
        if not status.is_finished:
            raise ValueError(f"{status} does not end a sequence")
        if self.status.is_finished:
            raise ValueError("finished already")
        self.status = status
