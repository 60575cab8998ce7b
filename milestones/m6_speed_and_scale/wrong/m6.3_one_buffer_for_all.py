"""Writes every step of a width into the same matrix: a step that still waits for its copy becomes the next one."""


class StepPacker:
    def pack_decode(self, scheduled_seqs, width):
        kept = self.__dict__.setdefault("_kept", {})
        fields = kept.setdefault(width, np.zeros((len(Field), width), np.int32))
        fields[:] = 0
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(scheduled_seqs)
        fields[Field.TOKEN, :n] = [newest_token(scheduled) for scheduled in scheduled_seqs]
        fields[Field.ROW, :n] = rows = [scheduled.row for scheduled in scheduled_seqs]
        fields[Field.SEQ_LEN, :n] = [scheduled.end for scheduled in scheduled_seqs]
        fields[[Field.QUERY_LEN, Field.NUM_SAMPLES], :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.NEW_BLOCK, :n] = [
            scheduled.new_blocks[0] if scheduled.new_blocks else NOTHING for scheduled in scheduled_seqs
        ]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))
