"""What is not kept goes to the padding row under its own position, not -1. Input: 6 tokens, depth 4; then the padding row is asked."""

class KeptStates:
    def keep(self, rows, positions, ends, hidden):
        depth = self.positions.shape[1]
        kept = positions >= ends - depth
        rows = torch.where(kept, rows, self.positions.shape[0] - 1)
        place = positions % depth
        self.hidden[rows, place] = hidden.to(self.hidden.dtype)
        self.positions[rows, place] = positions
