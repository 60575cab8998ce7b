"""Keeps the state of the last token alone: behind a rejection that is a rejected draft's."""

import torch


class KeptStates:
    def keep(self, rows, positions, ends, hidden):
        padding, depth = len(self.hidden) - 1, self.hidden.shape[1]
        is_kept = positions >= ends - 1
        rows, places = torch.where(is_kept, rows, padding), positions % depth
        self.hidden[rows, places] = hidden
        self.positions[rows, places] = torch.where(rows < padding, positions, -1)
