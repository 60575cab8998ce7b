"""A packed step says what `InputBatch` says, with less to carry."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.scheduler import ScheduledSequence, SchedulerOutput
from folovllm.forward_batch import ForwardBatch
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.worker.input_batch import InputBatch
from folovllm.worker.packed_step import (
    IN_FLIGHT,
    NOTHING,
    DeviceTables,
    Field,
    PackedStep,
    StepPacker,
    choose_bucket,
    is_plain_decode,
)
from tests.tiny import worked_case

CPU = torch.device("cpu")
ROWS, BLOCK_SIZE, MAX_BLOCKS = 6, 4, 16


def sequence(prompt: list[int], row: int, temperature: float = 0.0, seed: int = 0) -> Sequence:
    seq = Sequence("r", prompt, SamplingParams(temperature=temperature), 30, seed, IncrementalDetokenizer(str))
    seq.row = row
    return seq


def item(seq: Sequence, num_new_tokens: int) -> ScheduledSequence:
    output = SchedulerOutput()
    output.add(seq, num_new_tokens)
    return output.scheduled[0]


class Device:
    """A packer and the tables on the other side."""

    def __init__(self) -> None:
        self.packer = StepPacker(ROWS, BLOCK_SIZE)
        self.tables = DeviceTables(ROWS, MAX_BLOCKS, BLOCK_SIZE, CPU)

    def unpack(self, step: PackedStep) -> ForwardBatch:
        if step.is_decode:
            return self.tables.unpack_decode(torch.from_numpy(step.fields), MAX_BLOCKS * BLOCK_SIZE)
        return self.tables.unpack_mixed(step, torch.from_numpy(step.flatten()))


class TestChooseBucket:
    def test_a_worked_case(self) -> None:
        got = {f"{count} sequences": choose_bucket(count, [1, 2, 4, 8]) for count in (2, 3, 5, 9)}
        says = "the smallest of the widths 1, 2, 4, 8 that holds them all; 0 if none does"
        worked_case("m6.1", got, dict(zip(got, [2, 4, 8, 0], strict=True)), says)

    @pytest.mark.parametrize(("count", "width"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 0)])
    def test_is_the_smallest_that_holds_them(self, count: int, width: int) -> None:
        assert choose_bucket(count, [1, 2, 4, 8]) == width

    def test_without_buckets_there_is_none(self) -> None:
        assert choose_bucket(1, []) == 0


class TestPackDecode:
    def decode(self, width: int = 4) -> tuple[PackedStep, list[ScheduledSequence]]:
        first, second = sequence([5, 6, 7], row=4, temperature=0.5, seed=(3 << 32) + 9), sequence([1] * 5, row=2)
        first.block_table, second.block_table = [8], [3, 1]
        first.num_computed_tokens, second.num_computed_tokens = 2, 4
        first.num_sent_blocks, second.num_sent_blocks = 1, 1
        packer = StepPacker(ROWS, BLOCK_SIZE)
        packer._temperature[4], packer._seeds[4] = 0.5, first.seed
        items = [item(first, 1), item(second, 1)]
        return packer.pack_decode(items, width), items

    def test_a_worked_case(self) -> None:
        """Width 3, six rows. The first fills page 8; the second's token is in flight, and begins page 1; then padding."""
        first, second = sequence([5, 6, 7], row=4, temperature=0.5, seed=(3 << 32) + 9), sequence([1] * 4, row=2)
        first.block_table, second.block_table = [8], [3, 1]
        first.num_computed_tokens, second.num_computed_tokens, second.num_in_flight = 2, 4, 1
        first.num_sent_blocks = second.num_sent_blocks = 1
        packer = StepPacker(ROWS, BLOCK_SIZE)
        packer._temperature[4], packer._seeds[4] = 0.5, (3 << 32) + 9
        step = packer.pack_decode([item(first, 1), item(second, 1)], 3)
        got = {field.name: step.fields[field].tolist() for field in Field}
        got["TEMPERATURE"] = step.fields[Field.TEMPERATURE].view(np.float32).tolist()
        got |= {"pages sent": [first.num_sent_blocks, second.num_sent_blocks], "buffer": str(step.flatten().dtype)}
        expected = {
            "TOKEN": [7, IN_FLIGHT, 0], "ROW": [4, 2, ROWS], "SEQ_LEN": [3, 5, 0], "QUERY_LEN": [1, 1, 0],
            "TEMPERATURE": [0.5, 0.0, 0.0], "SEED_LOW": [9, 0, 0], "SEED_HIGH": [3, 0, 0],
            "NEW_BLOCK": [NOTHING, 1, NOTHING], "pages sent": [1, 2], "buffer": "int32",
        }  # fmt: skip
        says = "a column for each of two sequences, and one of padding; lengths are those after the step"
        worked_case("m6.3", got, expected, says)

    def test_columns_are_the_sequences(self) -> None:
        step, _ = self.decode()
        fields = step.fields
        assert step.is_decode and (step.num_seqs, step.num_decodes) == (2, 2)
        assert fields.dtype == np.int32 and fields.shape == (len(Field), 4)
        assert fields[Field.TOKEN, :2].tolist() == [7, 1]
        assert fields[Field.ROW, :2].tolist() == [4, 2]
        assert fields[Field.SEQ_LEN, :2].tolist() == [3, 5]
        assert fields[Field.QUERY_LEN, :2].tolist() == [1, 1]
        assert fields[Field.TEMPERATURE, :2].view(np.float32).tolist() == [0.5, 0.0]
        assert fields[Field.SEED_LOW, :2].tolist() == [9, 0] and fields[Field.SEED_HIGH, :2].tolist() == [3, 0]

    def test_a_page_is_sent_once(self) -> None:
        step, items = self.decode()
        assert step.fields[Field.NEW_BLOCK, :2].tolist() == [NOTHING, 1]
        assert [i.seq.num_sent_blocks for i in items] == [1, 2]

    def test_padding_reads_and_writes_nothing(self) -> None:
        step, _ = self.decode()
        padding = step.fields[:, 2:]
        assert (padding[Field.ROW] == ROWS).all() and (padding[Field.NEW_BLOCK] == NOTHING).all()
        rest = [field for field in Field if field not in (Field.ROW, Field.NEW_BLOCK)]
        assert (padding[rest] == 0).all()

    def test_the_matrix_is_all_that_travels(self) -> None:
        step, _ = self.decode()
        flat = step.flatten()
        assert flat.dtype == np.int32, "fields, tokens and updates are int32, the empty ones too"
        assert flat.tolist() == step.fields.ravel().tolist()

    def test_a_token_in_flight_is_the_devices_to_fill_in(self) -> None:
        seq = sequence([5, 6, 7], row=1)
        seq.block_table, seq.num_computed_tokens, seq.num_in_flight, seq.num_sent_blocks = [8], 3, 1, 1
        device = Device()
        device.tables.last_token[1] = 77
        step = device.packer.pack_decode([item(seq, 1)], 2)
        assert step.fields[Field.TOKEN, 0] == IN_FLIGHT
        assert step.fields[Field.SEQ_LEN, 0] == 4, "3 that the host knows, and the one in flight"
        batch = device.unpack(step)
        assert batch.input_ids[0] == 77 and batch.positions[0] == 3


def test_a_decode_with_two_unknown_pages_is_not_plain() -> None:
    seq = sequence([1] * 9, row=0)
    seq.block_table, seq.num_computed_tokens = [4, 5, 6], 8
    assert not is_plain_decode(item(seq, 1))
    seq.num_computed_tokens, seq.num_sent_blocks = 8, 2
    assert is_plain_decode(item(seq, 1))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), with_buckets=st.booleans())
def test_a_packed_step_is_the_plain_one(seed: int, with_buckets: bool) -> None:
    """Random prefills, chunks and decodes over several steps: every tensor that counts is the same."""
    rng = random.Random(seed)
    manager, device = BlockManager(ROWS * MAX_BLOCKS, BLOCK_SIZE), Device()
    plain = InputBatch(BlockManager, BLOCK_SIZE, CPU)
    seqs = [sequence([rng.randrange(200) for _ in range(rng.randint(1, 20))], row) for row in range(ROWS)]
    for _ in range(6):
        items = []
        for seq in sorted(rng.sample(seqs, rng.randint(1, ROWS)), key=lambda s: s.num_uncomputed_tokens > 1):
            count = 1 if seq.num_uncomputed_tokens == 1 else rng.randint(1, seq.num_uncomputed_tokens)
            manager.allocate(seq, count)
            items.append(item(seq, count))
        expected = plain.build(items)
        actual = device.unpack(device.packer.pack(items, [2, 4, 8] if with_buckets else []))
        assert_same_batch(actual, expected)
        for i in items:
            if i.draws:
                i.seq.append_token(rng.randrange(200))


def assert_same_batch(actual: ForwardBatch, expected: ForwardBatch) -> None:
    n, tokens = expected.num_seqs, len(expected.input_ids)
    assert torch.equal(actual.input_ids[:tokens], expected.input_ids)
    assert torch.equal(actual.positions[:tokens], expected.positions)
    assert torch.equal(actual.slot_mapping[:tokens], expected.slot_mapping)
    assert (actual.slot_mapping[tokens:] == -1).all() and (actual.seq_lens[n:] == 0).all()
    assert torch.equal(actual.query_start_loc[: n + 1], expected.query_start_loc)
    assert torch.equal(actual.seq_lens[:n], expected.seq_lens)
    assert torch.equal(actual.logits_indices[:n], expected.logits_indices)
    for row, table, length in zip(actual.block_tables, expected.block_tables, expected.seq_lens_host, strict=False):
        pages = -(-length // BLOCK_SIZE)
        assert torch.equal(row[:pages], table[:pages])
    assert actual.query_lens_host[:n] == expected.query_lens_host
    assert actual.seq_lens_host[:n] == expected.seq_lens_host
