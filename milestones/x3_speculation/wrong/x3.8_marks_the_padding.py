"""Writes positions into the padding row too: what it holds looks like the state of a token."""

import torch


class KeptStates:
    def keep(self, rows, positions, ends, hidden):
        padding, depth = len(self.hidden) - 1, self.hidden.shape[1]
        is_kept = positions >= ends - depth
        rows, places = torch.where(is_kept, rows, padding), positions % depth
        self.hidden[rows, places] = hidden
        self.positions[rows, places] = positions
