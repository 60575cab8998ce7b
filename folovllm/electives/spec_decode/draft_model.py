"""Drafts by a small model (Leviathan et al., arXiv 2211.17192), with the noise of the large one.

It samples with the seed, the position and the filters of the sequence. Where both models find about the same tokens likely,
the same noise makes both sample the same one. So they agree more often than two independent samples would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch

from folovllm.config import EngineConfig
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.models.files import load_hf_config, resolve_model
from folovllm.models.model_config import num_linear_of, num_positions
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput, TokenIds

if TYPE_CHECKING:
    from folovllm.electives.spec_decode.multi_step import DraftTokens, MultiStepExecutor

MEMORY_SHARE = 0.05  # of the memory, for the K/V of a draft model


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


class DraftModel(Proposer):
    """Drafts by decoding with a small model, which has an executor and blocks of its own and no scheduler.

    A sequence for which there is no row or block gets no draft. A sequence that is not asked about may lose its row and blocks;
    then it is computed again when it is asked about.
    """

    def __init__(self, executor: MultiStepExecutor, setup: EngineSetup, hand_over: DraftTokens | None = None) -> None:
        """`executor` runs the small model, which `setup` describes.

        `hand_over`: where the model that verifies finds the tokens. Drafts then consist of placeholder ids.
        """
        self._executor, self._hand_over = executor, hand_over
        self._budget, self._max_model_len = setup.max_num_batched_tokens, setup.max_model_len
        self._rows, self._block_size = list(range(setup.max_num_seqs)), setup.block_size
        self._free = list(range(executor.num_kv_blocks))
        self._drafts: dict[int, Draft] = {}  # by seq_id; the one asked about last stands at the end
        self._unresolved: list[Draft] = []  # those whose tokens may be placeholder ids: of the last multi-step decode

    def propose(self, state: RowState, k: int) -> list[int]:
        return self.propose_all([state], [k])[0]

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """Return the drafts: one step over what the texts have grown by, where that is much, and then a multi-step decode."""
        self._learn()
        asked = [(state, k) for state, k in zip(states, ks, strict=True) if k]
        keep = {state.seq_id for state, _ in asked}
        others = iter([seq_id for seq_id in self._drafts if seq_id not in keep])
        placed = [(state, k) for state, k in asked if self._place(state, k, others)]
        written = self._write(self._catch_up(placed))
        self._unresolved = [self._drafts[seq_id] for seq_id in written]
        for draft, tokens in zip(self._unresolved, written.values(), strict=True):
            draft.tokens = tokens
        return [written.get(state.seq_id, []) for state in states]

    def resolve(self, draft: Sequence[int]) -> list[int]:
        if self._hand_over is None:
            return list(draft)
        return self._hand_over.resolve(np.array(draft, np.int32)).tolist()

    def _learn(self) -> None:
        """Resolve the tokens of the last multi-step decode: its placeholder ids mean others when the next one begins."""
        tokens = self.resolve([token for draft in self._unresolved for token in draft.tokens])
        for draft in self._unresolved:
            count = len(draft.tokens)
            draft.tokens, tokens = tokens[:count], tokens[count:]
        self._unresolved = []

    def finish(self, seq_id: int) -> None:
        self._drop(seq_id)

    def close(self) -> None:
        self._executor.shutdown()

    def _drop(self, seq_id: int) -> None:
        draft = self._drafts.pop(seq_id, None)
        if draft is not None:
            self._rows.append(draft.row)
            self._free += draft.blocks

    def _place(self, state: RowState, k: int, others: Iterator[int]) -> bool:
        """Give `state` a row and blocks for `k` draft tokens, at need those of `others`, in turn. Return False if there are too few.

        The last draft token is sampled and not computed.
        """
        length = len(state.token_ids) + k - 1
        if length > self._max_model_len:
            return False
        draft = self._drafts.pop(state.seq_id, None)
        missing = -(-length // self._block_size) - len(draft.blocks if draft else ())
        while (len(self._free) < missing or not (draft or self._rows)) and (other := next(others, None)) is not None:
            self._drop(other)
        if draft is None:
            if not self._rows:
                return False
            draft = Draft(self._rows.pop())
        self._drafts[state.seq_id] = draft  # at the end
        if len(self._free) < missing:
            return False
        draft.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _catch_up(self, placed: list[tuple[RowState, int]]) -> list[tuple[RowState, int]]:
        """Compute what texts have before their newest tokens, and send new rows to the device. Return those that can be drafted for.

        Behind a draft that was accepted as a whole two tokens of a text are not computed, and else one. The multi-step decode
        computes these. Of a text beyond the budget only a part is computed.
        """
        budget, scheduled_seqs, ready = self._budget - len(placed), [], []
        for state, k in placed:
            draft = self._drafts[state.seq_id]
            draft.cut_back(state)
            missing = len(state.token_ids) - 1 - draft.num_cached
            num_new = 0
            if missing > 1 or draft.is_new:
                num_new = min(max(1, missing), 1 + max(0, budget))
                budget -= num_new - 1
                tokens = state.token_ids[draft.num_cached : draft.num_cached + num_new]
                scheduled_seqs.append(self._scheduled(state, tokens, num_new, 0))
                draft.is_new = False
            if num_new >= missing - 1:
                draft.num_cached = min(draft.num_cached, len(state.token_ids) - 1)
                ready.append((state, k))
        if scheduled_seqs:
            self._executor.submit(
                SchedulerOutput(tuple(sorted(scheduled_seqs, key=lambda scheduled: scheduled.num_new_tokens)))
            )
        return ready

    def _write(self, ready: list[tuple[RowState, int]]) -> dict[int, list[int]]:
        """Return the drafts of a multi-step decode: its first steps compute what is left of the text, then come the draft tokens."""
        left = {state.seq_id: state.token_ids[self._drafts[state.seq_id].num_cached :] for state, _ in ready}
        writers = [(state, left[state.seq_id], len(left[state.seq_id]) - 1 + k) for state, k in ready]
        writers.sort(key=lambda writer: -writer[2])  # so that each has the same place in all of its steps
        if not writers:
            return {}
        steps = [
            SchedulerOutput(
                tuple(self._scheduled(state, tokens[i : i + 1], 1, 1) for state, tokens, end in writers if i < end)
            )
            for i in range(writers[0][2])
        ]
        run = self._executor.submit_steps(steps)
        if self._hand_over is not None and run.placeholder_ids is not None:
            sampled = run.placeholder_ids[:, : len(writers)].T.tolist()
        else:
            by_step = ([token for (token,) in step.token_ids] for step in run.wait())
            sampled = [list(tokens) for tokens in zip_longest(*by_step)]
        return {
            state.seq_id: tokens[len(given) - 1 : end]
            for tokens, (state, given, end) in zip(sampled, writers, strict=False)
        }

    def _scheduled(self, state: RowState, tokens: TokenIds, num_new: int, num_samples: int) -> ScheduledSequence:
        """Return a step's part of a sequence: its next `num_new` tokens; without `tokens`, the one that the device sampled last."""
        draft = self._drafts[state.seq_id]
        start, end = draft.num_cached, draft.num_cached + num_new
        first, needed = draft.num_sent, -(-end // self._block_size)
        draft.num_cached, draft.num_sent = end, max(first, needed)
        blocks = tuple(draft.blocks[first:needed])
        sampling = sampling_without_history(state.sampling) if draft.is_new else None
        return ScheduledSequence(state.seq_id, draft.row, start, end, tokens, blocks, first, num_samples, sampling)


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
    return replace(draft, config=replace(draft.config, num_kv_blocks=num_blocks))
