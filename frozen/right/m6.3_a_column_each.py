"""Makes a column for each sequence, padding too, and turns the matrix."""

class StepPacker:
    def pack_decode(self, scheduled_seqs, width):
        columns = np.zeros((width, len(Field)), np.int32)
        numbers = self._row_fields([scheduled.row for scheduled in scheduled_seqs])
        for i in range(width):
            column = columns[i]
            column[Field.ROW], column[Field.NEW_BLOCK] = self._padding_row, NOTHING
            if i < len(scheduled_seqs):
                scheduled = scheduled_seqs[i]
                column[Field.TOKEN], column[Field.ROW] = newest_token(scheduled), scheduled.row
                column[Field.SEQ_LEN], column[Field.QUERY_LEN], column[Field.NUM_SAMPLES] = scheduled.end, 1, 1
                column[Field.TEMPERATURE : Field.SEED_HIGH + 1] = numbers[:, i]
                if len(scheduled.new_blocks):
                    column[Field.NEW_BLOCK] = scheduled.new_blocks[0]
        num = len(scheduled_seqs)
        return PackedStep(
            fields=np.ascontiguousarray(columns.T), num_seqs=num, num_decodes=num, tokens=np.zeros(0, np.int32),
            updates=np.zeros((3, 0), np.int32),
        )
