"""Parts of `parts` things instead of `parts` parts."""


class Pool:
    def share(self, parts):
        things = list(self.free)
        return [things[n : n + parts] for n in range(0, len(things), parts)]
