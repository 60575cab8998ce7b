"""A late abort overwrites how the sequence really ended."""


class Sequence:
    def finish(self, status):
        if not status.is_finished:
            raise ValueError(f"{status} does not end a sequence")
        self.status = status
