"""Block 0 where there is no new block: block 0 belongs to somebody."""


class StepPacker:
    def pack_decode(self, scheduled_seqs, width):
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        n = len(scheduled_seqs)
        fields[Field.TOKEN, :n] = [newest_token(scheduled) for scheduled in scheduled_seqs]
        fields[Field.ROW, :n] = rows = [scheduled.row for scheduled in scheduled_seqs]
        fields[Field.SEQ_LEN, :n] = [scheduled.end for scheduled in scheduled_seqs]
        fields[[Field.QUERY_LEN, Field.NUM_SAMPLES], :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.NEW_BLOCK, :n] = [scheduled.new_blocks[0] if scheduled.new_blocks else 0 for scheduled in scheduled_seqs]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))
