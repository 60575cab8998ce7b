"""Takes a new block of id 0 for none: the device never learns of it, and the sequence writes into a block of another."""


class StepPacker:
    def pack_decode(self, scheduled_seqs, width):
        n, rows = len(scheduled_seqs), [scheduled.row for scheduled in scheduled_seqs]
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW, n:], fields[Field.NEW_BLOCK, n:] = self._padding_row, NOTHING
        fields[Field.TOKEN, :n] = [newest_token(scheduled) for scheduled in scheduled_seqs]
        fields[Field.ROW, :n] = rows
        fields[Field.SEQ_LEN, :n] = [scheduled.end for scheduled in scheduled_seqs]
        fields[Field.QUERY_LEN, :n] = fields[Field.NUM_SAMPLES, :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.NEW_BLOCK, :n] = [sum(scheduled.new_blocks) or NOTHING for scheduled in scheduled_seqs]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))
