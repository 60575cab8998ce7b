"""Converts temperatures to integers, instead of carrying their bits: 0.5 becomes 0, which is greedy."""


class StepPacker:
    def pack_decode(self, shares, width):
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(shares)
        fields[Field.TOKEN, :n] = [newest_token(share) for share in shares]
        fields[Field.ROW, :n] = rows = [share.row for share in shares]
        fields[Field.SEQ_LEN, :n] = [share.end for share in shares]
        fields[[Field.QUERY_LEN, Field.NUM_DRAWS], :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.TEMPERATURE, :n] = self._row_numbers[0, rows].view(np.float32).astype(np.int32)
        fields[Field.NEW_BLOCK, :n] = [share.new_blocks[0] if share.new_blocks else NOTHING for share in shares]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))
