"""No tokens, but of float64, which is numpy's default: the flattened step is no longer a buffer of int32."""


class StepPacker:
    def pack_decode(self, items, width):
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(items)
        fields[Field.TOKEN, :n] = [newest_token(item) for item in items]
        fields[Field.ROW, :n] = rows = [item.seq.row for item in items]
        fields[Field.SEQ_LEN, :n] = [item.start + 1 for item in items]
        fields[Field.QUERY_LEN, :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        for i, item in enumerate(items):
            table = item.seq.block_table
            if len(table) > item.seq.num_sent_blocks:
                fields[Field.NEW_BLOCK, i] = table[-1]
                item.seq.num_sent_blocks = len(table)
        return PackedStep(fields, n, n, np.empty(0), np.empty((3, 0), np.int32))
