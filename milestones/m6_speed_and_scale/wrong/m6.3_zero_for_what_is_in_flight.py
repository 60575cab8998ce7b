"""Token 0 where the newest one is in flight: 0 is a token, and the device takes it for the one to compute."""


class StepPacker:
    def pack_decode(self, shares, width):
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(shares)
        fields[Field.TOKEN, :n] = [int(share.token_ids[0]) if len(share.token_ids) else 0 for share in shares]
        fields[Field.ROW, :n] = rows = [share.row for share in shares]
        fields[Field.SEQ_LEN, :n] = [share.end for share in shares]
        fields[[Field.QUERY_LEN, Field.NUM_DRAWS], :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.NEW_BLOCK, :n] = [share.new_blocks[0] if share.new_blocks else NOTHING for share in shares]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))
