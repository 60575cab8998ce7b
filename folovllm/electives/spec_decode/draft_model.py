"""Drafts by a small model (Leviathan et al., arXiv 2211.17192), with the noise of the large one.

It samples with the seed, the position and the filters of the sequence. Where both models find about the same tokens likely,
the same noise makes both sample the same one. So they agree more often than two independent samples would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from folovllm.config import EngineConfig
from folovllm.electives.spec_decode.chain import SampleFn
from folovllm.electives.spec_decode.chain_proposer import ChainProposer
from folovllm.electives.spec_decode.heads import chain_places
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.executor.abstract import Executor
from folovllm.models.files import load_hf_config, resolve_model
from folovllm.models.model_config import num_linear_of, num_positions
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput, TokenIds
from folovllm.worker.model_runner import ModelRunner

MEMORY_SHARE = 0.05  # of the memory, for the K/V of a draft model
AHEAD = 64  # tokens for which a sequence gets more blocks than it needs


class DraftModelRunner(ModelRunner):
    """A `ModelRunner` that also runs chains."""

    def chain(self, batch: ForwardBatch, k: int, sample: SampleFn) -> torch.Tensor:
        """Decode `k` tokens as `Drafter.chain`. The last one is computed, too, so that K/V of the whole draft are there.

        A chain may be longer than a sequence has blocks. Then its K/V go to block 0, which is no sequence's.
        """
        setup = self._setup
        first = torch.where(batch.seq_lens > 0, batch.positions + 1, -1)
        positions, slots = chain_places(first, batch.block_tables, setup.block_size, k + 1)
        positions = positions.clamp(max=setup.max_model_len - 1)
        lens = torch.where(first < 0, 0, positions + 1).int()
        tokens = [batch.input_ids]
        for i in range(k + 1):
            # In a capture on a GPU there are none.
            lens_host = [n and min(n + i, setup.max_model_len) for n in batch.seq_lens_host]
            step = replace(
                batch, input_ids=tokens[-1], positions=positions[i], slot_mapping=slots[i], seq_lens=lens[i],
                seq_lens_host=lens_host,
            )  # fmt: skip
            if i == k:
                self.forward_hidden(step)
            else:
                tokens.append(sample(self.forward(step), i))
        return torch.stack(tokens)


@dataclass(slots=True, eq=False)
class Draft:
    """What the draft model has of one sequence.

    Invariant: `blocks` hold the K/V of the first `num_cached` tokens. They are valid up to the first rejected draft token;
    what lies behind is written over.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0  # blocks that the device knows
    num_known: int = 0  # tokens of the text when it was last drafted for
    tokens: list[int] = field(default_factory=list)  # what was drafted behind them, or its placeholder ids
    num_cached: int = 0
    is_new: bool = True  # the device does not know how its tokens are sampled

    def num_accepted(self, state: RowState) -> int:
        """Return how many of the draft tokens agree with the text, as far as it is known."""
        sampled = state.token_ids[self.num_known :].tolist()
        return next((i for i, (g, t) in enumerate(zip(self.tokens, sampled, strict=False)) if g != t), len(self.tokens))

    def cut_back(self, state: RowState) -> None:
        """Count as cached what agrees with the text, but never its newest token, whose logits are needed."""
        accepted = self.num_accepted(state)
        self.num_cached = min(self.num_cached, self.num_known + accepted, len(state.token_ids) - 1)
        self.num_known, self.tokens = len(state.token_ids), []


class DraftModel(ChainProposer):
    """Drafts by chains of a small model, which has an executor and blocks of its own and no scheduler.

    A sequence for which there is no row or block gets no draft. A sequence that is not asked about may lose its row and blocks;
    then it is computed again when it is asked about.
    """

    def __init__(self, executor: Executor, setup: EngineSetup, uses_placeholders: bool = False) -> None:
        """`executor` runs the small model, which `setup` describes."""
        super().__init__(setup.vocab_size, setup.max_num_seqs, uses_placeholders)
        self._executor, self._setup = executor, setup
        self._most_blocks = -(-setup.max_model_len // setup.block_size)  # of a sequence
        self._rows = list(range(setup.max_num_seqs))
        self._free = list(range(1, executor.num_kv_blocks))  # block 0: see `DraftModelRunner.chain`
        self._drafts: dict[int, Draft] = {}  # by seq_id; the one asked about last stands at the end
        self._unresolved: list[Draft] = []  # those of the last chain, whose tokens may be placeholder ids

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """Return a draft for each state. One step computes what the draft model lacks of the texts; then one chain drafts."""
        for draft in self._unresolved:  # the ids mean other tokens when the next chain begins
            draft.tokens = self.resolve(draft.tokens)
        asked = [(state, k) for state, k in zip(states, ks, strict=True) if k]
        keep = {state.seq_id for state, _ in asked}
        others = iter([seq_id for seq_id in self._drafts if seq_id not in keep])
        ready = self._catch_up([(state, k) for state, k in asked if self._place(state, k, others)])
        self._unresolved = [self._drafts[state.seq_id] for state, _ in ready]
        if ready:
            newest = [self._schedule(state, state.token_ids[-1:], 1) for state, _ in ready]
            found = self._run_chain(self._executor, newest, [(1, 1 + k) for _, k in ready])
            for draft, tokens in zip(self._unresolved, found, strict=True):
                draft.tokens = tokens
                draft.num_cached += len(tokens)
        written = {state.seq_id: draft.tokens for (state, _), draft in zip(ready, self._unresolved, strict=True)}
        return [written.get(state.seq_id, []) for state in states]

    def finish(self, seq_id: int) -> None:
        if (draft := self._drafts.pop(seq_id, None)) is not None:
            self._rows.append(draft.row)
            self._free += draft.blocks

    def close(self) -> None:
        self._executor.shutdown()

    def _place(self, state: RowState, k: int, others: Iterator[int]) -> bool:
        """Give `state` a row and blocks for `k` draft tokens, at need those of `others`, in turn. Return False if there are too few.

        It gets more blocks than it needs while half of all are free, since a step must tell the device of new ones.
        """
        size, length = self._setup.block_size, len(state.token_ids) + k
        if length - 1 > self._setup.max_model_len:
            return False
        draft = self._drafts.pop(state.seq_id, None)
        num_blocks = len(draft.blocks) if draft else 0
        missing = min(-(-length // size), self._most_blocks) - num_blocks
        while (len(self._free) < missing or not (draft or self._rows)) and (other := next(others, None)) is not None:
            self.finish(other)
        if draft is None:
            if not self._rows:
                return False
            draft = Draft(self._rows.pop())
        self._drafts[state.seq_id] = draft  # at the end
        if len(self._free) < missing:
            return False
        if missing > 0:
            spare = max(0, len(self._free) - missing - self._executor.num_kv_blocks // 2)
            missing += min(-(-AHEAD // size), spare, self._most_blocks - num_blocks - missing)
            draft.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _catch_up(self, placed: list[tuple[RowState, int]]) -> list[tuple[RowState, int]]:
        """Compute what texts have before their newest tokens, and send new rows and blocks to the device. Return those that can be drafted for.

        Of a text beyond the budget only a part is computed.
        """
        budget, scheduled_seqs, ready = self._setup.max_num_batched_tokens - len(placed), [], []
        for state, k in placed:
            draft = self._drafts[state.seq_id]
            draft.cut_back(state)
            missing = len(state.token_ids) - 1 - draft.num_cached
            if missing or draft.num_sent < len(draft.blocks):
                num_new = min(max(1, missing), 1 + max(0, budget))
                budget -= num_new - 1
                tokens = state.token_ids[draft.num_cached : draft.num_cached + num_new]
                scheduled_seqs.append(self._schedule(state, tokens, 0))
                # Where nothing was missing, the newest token went along to bring the new blocks.
                draft.num_cached = min(draft.num_cached, len(state.token_ids) - 1)
            if draft.num_cached == len(state.token_ids) - 1:
                ready.append((state, k))
        if scheduled_seqs:
            scheduled_seqs.sort(key=lambda scheduled: scheduled.num_new_tokens)
            self._executor.submit(SchedulerOutput(tuple(scheduled_seqs)))
        return ready

    def _schedule(self, state: RowState, tokens: TokenIds, num_samples: int) -> ScheduledSequence:
        """Schedule the next `tokens`, and count them as cached and all blocks as sent. A new row's table is sent whole, padded with block 0."""
        draft = self._drafts[state.seq_id]
        start, first, blocks, sampling = draft.num_cached, draft.num_sent, draft.blocks[draft.num_sent :], None
        if draft.is_new:
            blocks = blocks + [0] * (self._most_blocks - len(blocks))
            sampling, draft.is_new = sampling_without_history(state.sampling), False
        draft.num_cached, draft.num_sent = start + len(tokens), len(draft.blocks)
        return ScheduledSequence(
            state.seq_id, draft.row, start, draft.num_cached, tokens, tuple(blocks), first, num_samples, sampling
        )


def sampling_without_history(spec: SamplingSpec) -> SamplingSpec:
    """Return the noise and the filters of a sequence, without what depends on earlier tokens: those may be rejected draft tokens."""
    return SamplingSpec(spec.seed, spec.temperature, spec.top_k, spec.top_p, spec.min_p)


def draft_setup(setup: EngineSetup, model: str) -> EngineSetup:
    """Return the set-up of the draft model `model` for the large one that `setup` describes: on its device, in its dtype.

    Its cache has room for all sequences, or as much as `MEMORY_SHARE` of the memory holds. Raises ValueError if the two
    models do not share a vocabulary.
    """
    large = setup.config
    config = EngineConfig(
        model=model, dtype=str(setup.dtype), device=str(setup.device), max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens, enable_prefix_caching=False, enforce_eager=large.enforce_eager,
        num_threads=large.num_threads, trust_remote_code=large.trust_remote_code, use_tqdm=large.use_tqdm,
    )  # fmt: skip
    limit = num_positions(load_hf_config(resolve_model(model), config))
    draft = set_up(replace(config, max_model_len=min(limit, setup.max_model_len)))
    if draft.vocab_size != setup.vocab_size:
        raise ValueError(
            f"a draft must have the vocabulary of its model: {model} has {draft.vocab_size} tokens, {large.model} "
            f"{setup.vocab_size}"
        )
    if num_linear_of(draft.hf_config):
        raise ValueError(f"{model} cannot draft: it has layers of linear attention, whose states cannot be cut back")
    memory = large.kv_cache_memory
    if setup.device.type == "cuda":
        memory = torch.cuda.get_device_properties(setup.device).total_memory
    blocks_per_seq = -(-draft.max_model_len // draft.block_size)
    affordable = int(MEMORY_SHARE * memory) // (draft.block_size * draft.kv_bytes_per_token)
    num_blocks = max(blocks_per_seq, min(affordable, blocks_per_seq * draft.max_num_seqs))
    return replace(draft, config=replace(draft.config, num_kv_blocks=1 + num_blocks))
