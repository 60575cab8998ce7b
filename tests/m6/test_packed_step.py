"""A packed step says what `InputBatch` says, with less to carry."""

import random
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.scheduler import BatchRows, Scheduler, wait, whole_prompt
from folovllm.executor.messages import decode_step, encode_step
from folovllm.request import Sequence
from folovllm.sample.sampler_state import seeds_of
from folovllm.step import packed
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import IN_FLIGHT, NOTHING, Field, Sample, StepPacker, choose_bucket, is_plain_decode
from folovllm.step.schedule import Extras, SamplingSpec, ScheduledSequence, SchedulerOutput
from folovllm.worker.device_tables import DeviceTables
from folovllm.worker.input_batch import InputBatch
from tests.sequences import make_seq
from tests.tiny import worked_case

CPU = torch.device("cpu")
ROWS, BLOCK_SIZE, MAX_BLOCKS = 6, 4, 16


def scheduled(rows: BatchRows, seq: Sequence, num_new_tokens: int) -> ScheduledSequence:
    """A share, and what becomes of the sequence by it."""
    made = rows.scheduled(seq, num_new_tokens)
    seq.num_computed_tokens += num_new_tokens
    return made


class Device:
    """A packer and the tables on the other side."""

    def __init__(self, with_buckets: bool = False) -> None:
        self.packer = StepPacker(ROWS, [2, 4, 8] if with_buckets else [])
        self.tables = DeviceTables(ROWS, MAX_BLOCKS, BLOCK_SIZE, CPU)

    def unpack(self, step: packed.PackedStep) -> ForwardBatch:
        if step.is_decode:
            return self.tables.unpack_decode(torch.from_numpy(step.fields), MAX_BLOCKS * BLOCK_SIZE)
        parts, fields = packed.split(torch.from_numpy(step.flatten()), step.columns), step.fields
        self.tables.enter_blocks(parts.updates)
        longest, most = int(fields[Field.QUERY_LEN].max()), int(fields[Field.SEQ_LEN].max())
        return self.tables.unpack(parts, step.num_decodes, longest, most, fields)


class TestChooseBucket:
    def test_a_worked_case(self) -> None:
        got = {f"{count} sequences": choose_bucket(count, [1, 2, 4, 8]) for count in (2, 3, 5, 9)}
        says = "the smallest of the widths 1, 2, 4, 8 that holds them all; 0 if none does"
        worked_case("m6.1 choose_bucket", got, dict(zip(got, [2, 4, 8, 0], strict=True)), says)

    @pytest.mark.parametrize(("count", "width"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 0)])
    def test_is_the_smallest_that_holds_them(self, count: int, width: int) -> None:
        assert choose_bucket(count, [1, 2, 4, 8]) == width, f"of the widths 1, 2, 4, 8, for {count} sequences"
        assert choose_bucket(count, []) == 0, "0 says that no width holds them"


class TestPackDecode:
    def step_of(self, *scheduled_seqs: ScheduledSequence, width: int) -> packed.PackedStep:
        """A decode step of rows that were sampled before: row 4 with temperature 0.5 and a seed, others greedily."""
        specs = {4: SamplingSpec(seed=(3 << 32) + 9, temperature=0.5)}
        packer = StepPacker(ROWS, [])
        greedy = SamplingSpec(temperature=0.0)
        packer._pack_mixed([s._replace(sampling=specs.get(s.row, greedy)) for s in scheduled_seqs])
        return packer.pack_decode(scheduled_seqs, width)

    def test_a_worked_case(self) -> None:
        """Width 3, six rows. The first's token 2 is known; the second's token 4 is in flight and begins block 5; then padding."""
        first = ScheduledSequence(1, 4, 2, 3, np.array([7], np.int32), (), 1, 1, None)
        second = ScheduledSequence(2, 2, 4, 5, np.empty(0, np.int32), (5,), 1, 1, None)
        step = self.step_of(first, second, width=3)
        got = {field.name: step.fields[field].tolist() for field in Field}
        got["TEMPERATURE"] = step.fields[Field.TEMPERATURE].view(np.float32).tolist()
        got |= {"buffer": str(step.flatten().dtype)}
        expected = {
            "TOKEN": [7, IN_FLIGHT, 0], "ROW": [4, 2, ROWS], "SEQ_LEN": [3, 5, 0], "QUERY_LEN": [1, 1, 0],
            "TEMPERATURE": [0.5, 0.0, 0.0], "SEED_LOW": [9, 0, 0], "SEED_HIGH": [3, 0, 0],
            "NEW_BLOCK": [NOTHING, 5, NOTHING], "NUM_SAMPLES": [1, 1, 0], "buffer": "int32",
        }  # fmt: skip
        says = "a column for each of two sequences, and one of padding; lengths are those after the step"
        worked_case("m6.3", got, expected, says)

    def test_block_0_is_a_block(self) -> None:
        step = self.step_of(ScheduledSequence(1, 4, 4, 5, np.array([7], np.int32), (0,), 1, 1, None), width=2)
        got = step.fields[Field.NEW_BLOCK].tolist()
        assert got == [0, NOTHING], f"the first token of block 0, then padding: NEW_BLOCK is [0, {NOTHING}], not {got}"

    def test_padding_is_no_decode_and_the_matrix_is_all_that_travels(self) -> None:
        first = ScheduledSequence(1, 4, 2, 3, np.array([7], np.int32), (), 1, 1, None)
        second = ScheduledSequence(2, 2, 4, 5, np.array([1], np.int32), (5,), 1, 1, None)
        step = self.step_of(first, second, width=4)
        assert step.is_decode and (step.num_seqs, step.num_decodes) == (2, 2), "two sequences decode; padding is none"
        assert step.fields.dtype == np.int32 and step.fields.shape == (len(Field), 4), "int32, [len(Field), width]"
        assert step.flatten().dtype == np.int32, "fields, tokens and updates are int32, the empty ones too"
        assert step.flatten().tolist() == step.fields.ravel().tolist(), "tokens and updates are empty"

    def test_a_step_is_its_own(self) -> None:
        """The step before may still wait for its copy to the device, of the same width or of another one."""
        long = ScheduledSequence(1, 4, 2, 3, np.array([7], np.int32), (6,), 1, 1, None)
        short = ScheduledSequence(2, 2, 4, 5, np.array([9], np.int32), (5,), 1, 1, None)
        packer = StepPacker(ROWS, [])
        first = packer.pack_decode((long, short), 3)
        before = first.fields.copy()
        for width in 3, 2, 4:
            step = packer.pack_decode((short,), width)
            assert np.array_equal(first.fields, before), f"a step of width {width} changed the one of width 3 before it"
            alone = StepPacker(ROWS, []).pack_decode((short,), width)
            assert np.array_equal(step.fields, alone.fields), f"width {width}: it has what a step before it left there"

    def test_a_token_in_flight_is_the_devices_to_fill_in(self) -> None:
        in_flight = ScheduledSequence(1, 1, 3, 4, np.empty(0, np.int32), (), 1, 1, None)
        device = Device()
        device.tables.last_token[1] = 77
        step = device.packer.pack_decode((in_flight,), 2)
        assert step.fields[Field.TOKEN, 0] == IN_FLIGHT, "the host does not know it"
        assert step.fields[Field.SEQ_LEN, 0] == 4, "3 that the host knows, and the one in flight"
        batch = device.unpack(step)
        assert batch.input_ids[0] == 77 and batch.positions[0] == 3, "the device takes the token that it drew last"


def test_a_token_in_flight_beside_a_prompt() -> None:
    in_flight = ScheduledSequence(1, 1, 3, 4, np.empty(0, np.int32), (), 1, 1, None)
    prompt = ScheduledSequence(2, 0, 0, 2, np.array([5, 6], np.int32), (3,), 0, 1, SamplingSpec())
    device = Device()
    device.tables.last_token[1] = 77
    batch = device.unpack(device.packer.pack(SchedulerOutput((in_flight, prompt))))
    assert batch.input_ids.tolist() == [77, 5, 6], "the device takes the token that it drew last, here too"


def test_what_is_no_plain_decode() -> None:
    plain = ScheduledSequence(1, 0, 8, 9, np.array([1], np.int32), (6,), 2, 1, None)
    assert is_plain_decode(plain) and is_plain_decode(plain._replace(new_blocks=()))
    assert not is_plain_decode(plain._replace(new_blocks=(5, 6), first_new_block=1)), "two blocks: one field is too few"
    assert not is_plain_decode(plain._replace(sampling=SamplingSpec())), "how a new row is drawn must travel too"
    assert not is_plain_decode(plain._replace(end=10))
    assert not is_plain_decode(plain._replace(num_samples=0)), "a captured step would draw after this chunk"


def test_samples_of_a_step_with_drafts() -> None:
    """A draft of two tokens behind one that is in flight, a chunk that samples nothing, and a prompt."""
    draft = ScheduledSequence(1, 4, 7, 10, np.array([IN_FLIGHT, 50, 51], np.int32), (), 2, 3, None)
    chunk = ScheduledSequence(2, 1, 0, 2, np.array([5, 6], np.int32), (3,), 0, 0, SamplingSpec())
    prompt = ScheduledSequence(3, 0, 0, 2, np.array([8, 9], np.int32), (4,), 0, 1, SamplingSpec(logprobs=2))
    packer = StepPacker(ROWS, [])
    packer._pack_mixed((draft._replace(sampling=SamplingSpec(temperature=0.5, logprobs=1)),))
    step = packer.pack(SchedulerOutput((draft, chunk, prompt)))
    samples = step.samples
    assert samples[Sample.SEQUENCE].tolist() == [0, 0, 0, 2] and samples[Sample.COUNTS].tolist() == [1, 1, 1, 1]
    assert samples[Sample.ROW].tolist() == [4, 4, 4, 0] and samples[Sample.AFTER].tolist() == [0, 1, 2, 6]
    assert samples[Sample.POSITION].tolist() == [8, 9, 10, 2], "each token's own index in its sequence"
    assert samples[Sample.DRAFT].tolist() == [50, 51, NOTHING, NOTHING], "behind the last there is no draft token"
    assert samples[Sample.TEMPERATURE].view(np.float32).tolist() == [0.5, 0.5, 0.5, 1.0]
    assert step.logprobs.T.tolist() == [[0, 1], [1, 1], [2, 1], [3, 2]], "by sample"
    assert step.has_drafts and [level.tolist() for level in packed.sample_levels(samples)] == [[0, 3], [1], [2]]


def test_without_drafts_each_sequence_has_a_sample() -> None:
    """The last token of each, also where nobody wants what follows it."""
    chunk = ScheduledSequence(2, 1, 0, 2, np.array([5, 6], np.int32), (3,), 0, 0, SamplingSpec())
    prompt = ScheduledSequence(3, 0, 0, 2, np.array([8, 9], np.int32), (4,), 0, 1, SamplingSpec())
    step = StepPacker(ROWS, []).pack(SchedulerOutput((chunk, prompt)))
    assert step.samples[Sample.AFTER].tolist() == [1, 3] and step.samples[Sample.COUNTS].tolist() == [0, 1]
    assert not step.has_drafts


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1, 3 * 2**40 + 2**31, 2**63 - 1])
def test_a_seed_arrives_whole(seed: int) -> None:
    first = ScheduledSequence(1, 0, 0, 1, np.array([5], np.int32), (3,), 0, 1, SamplingSpec(seed=seed))
    step = StepPacker(ROWS, []).pack(SchedulerOutput((first,)))
    low, high = torch.from_numpy(step.fields[[Field.SEED_LOW, Field.SEED_HIGH]])
    assert seeds_of(low, high).tolist() == [seed], "its lower half has no sign"


def test_the_next_owner_of_a_row_asks_for_itself() -> None:
    packer = StepPacker(ROWS, [])
    first = ScheduledSequence(1, 0, 0, 2, np.array([5, 6], np.int32), (3,), 0, 1, SamplingSpec(logprobs=2))
    assert packer.pack(SchedulerOutput((first,))).logprobs.T.tolist() == [[0, 2]]
    step = packer.pack(SchedulerOutput((first._replace(seq_id=2, sampling=SamplingSpec()),)))
    assert not step.logprobs.size, "it wants no log-probabilities, whoever had its row before"


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), with_buckets=st.booleans())
def test_a_packed_step_is_the_plain_one(seed: int, with_buckets: bool) -> None:
    """Random prefills, chunks and decodes over several steps: every tensor that counts is the same."""
    rng = random.Random(seed)
    manager, device = BlockManager(ROWS * MAX_BLOCKS, BLOCK_SIZE), Device(with_buckets)
    rows = BatchRows(ROWS, manager)
    plain = InputBatch(BlockManager.slots, BLOCK_SIZE, CPU)
    seqs = [make_seq([rng.randrange(200) for _ in range(rng.randint(1, 20))], 30) for _ in range(ROWS)]
    for _ in range(6):
        scheduled_seqs = []
        served = sorted(rng.sample(seqs, rng.randint(1, ROWS)), key=lambda s: s.num_uncomputed_tokens > 1)
        for seq in served:
            count = 1 if seq.num_uncomputed_tokens == 1 else rng.randint(1, seq.num_uncomputed_tokens)
            manager.allocate(seq, count)
            scheduled_seqs.append(scheduled(rows, seq, count))
        expected = plain.build(scheduled_seqs)
        actual = device.unpack(device.packer.pack(SchedulerOutput(tuple(scheduled_seqs))))
        assert_same_batch(actual, expected)
        for own, seq in zip(scheduled_seqs, served, strict=True):
            if own.num_samples:
                seq.append_token(rng.randrange(200))


def assert_same_batch(actual: ForwardBatch, expected: ForwardBatch) -> None:
    n, tokens = expected.num_seqs, len(expected.input_ids)
    assert torch.equal(actual.input_ids[:tokens], expected.input_ids)
    assert torch.equal(actual.positions[:tokens], expected.positions)
    assert torch.equal(actual.slot_mapping[:tokens], expected.slot_mapping)
    assert (actual.slot_mapping[tokens:] == -1).all() and (actual.seq_lens[n:] == 0).all()
    assert actual.num_decodes == (expected.num_decodes if actual.num_seqs == n else actual.num_seqs), "padding decodes"
    assert torch.equal(actual.query_start_loc[: n + 1], expected.query_start_loc)
    assert torch.equal(actual.seq_lens[:n], expected.seq_lens)
    assert torch.equal(actual.logits_indices[:n], expected.logits_indices)
    for row, table, length in zip(actual.block_tables, expected.block_tables, expected.seq_lens_host, strict=False):
        blocks = -(-length // BLOCK_SIZE)
        assert torch.equal(row[:blocks], table[:blocks])
    assert actual.query_lens_host[:n] == expected.query_lens_host
    assert actual.seq_lens_host[:n] == expected.seq_lens_host


class Labelled(BlockManager):
    """A cache manager whose steps carry two matrices, of owners of its own, for each sequence with an even number of tokens."""

    def step_extras(self, scheduled_seqs: SequenceOf[ScheduledSequence]) -> Extras | None:
        own = [[i, scheduled.seq_id] for i, scheduled in enumerate(scheduled_seqs) if scheduled.end % 2 == 0]
        return {"labels": np.array(own, np.int32), "an owner's name": np.array(own, np.int32)[:, :1]} if own else None


def test_what_only_some_steps_carry_reaches_every_rank() -> None:
    kv = Labelled(8, BLOCK_SIZE)
    scheduler = Scheduler(kv, 4, 64, whole_prompt, wait)
    odd, even = make_seq(3), make_seq(4)
    for seq, expected in ((odd, {}), (even, {"labels": [[0, even.seq_id]], "an owner's name": [[0]]})):
        scheduler.add(seq)
        output = scheduler.schedule()
        step = StepPacker(4, [1, 2]).pack(output)
        assert (output.extras is None) == (not step.extras.size) == (not expected), "most steps carry nothing"
        sent = decode_step(encode_step(step))
        assert isinstance(sent, packed.PackedStep)
        assert {owner: found.tolist() for owner, found in packed.unpack_extras(sent.extras).items()} == expected
        assert sent.tokens.tolist() == seq.token_ids.tolist(), "what stands before it is as ever"
        scheduler.abort(seq)
