"""A runner beside whose model a draft head runs: it gives the head its pairs, and runs a chain of drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from folovllm.attention.backends.registry import make_backend
from folovllm.electives.spec_decode.heads import KeptStates, chain_places, head_inputs
from folovllm.electives.spec_decode.verify_runner import VerifyingModelRunner
from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import attention_layers
from folovllm.layers.linear import PLAIN
from folovllm.models.draft_head import DraftHead
from folovllm.models.given_tensors import as_named, require_usable
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import Tensors, checkpoint_places, copy_weight, read_tensors
from folovllm.models.messages import some_of
from folovllm.models.model_config import head_dim_of, num_kv_heads_of
from folovllm.sample.sampler import SamplingBatch
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput, StepResult
from folovllm.worker.input_batch import padded_tables

CHAIN = "draft_chain"  # the owner of a step's extras that asks for drafts in place of a step: its first line is 0, k
Sample = Callable[[torch.Tensor, int], torch.Tensor]  # logits [S, V], draft 0 to k - 1 -> tokens [S] int64
MakeHead = Callable[[EngineSetup, LlamaForCausalLM], DraftHead]


class HeadModelRunner(VerifyingModelRunner):
    """Stores the head's K/V of every step, and drafts when it is asked.

    Behind the model's layers a step stores the head's K/V of the pairs whose tokens it brings (`head_inputs`): those of a
    rejected draft are written over as the target's own are. A captured step does so beside the product with the vocabulary:
    these are small kernels, which would take longer to start than to run. The last token's hidden state waits for the token behind it
    (`KeptStates`). A chain begins with that pair, so it needs nothing from the last step but this state.
    """

    head: DraftHead
    kept: KeptStates

    def __init__(self, *arguments: Any, make_head: MakeHead, longest: int) -> None:
        """`longest`: the most draft tokens of a sequence in a step."""
        super().__init__(*arguments)
        self._make_head, self._longest = make_head, longest
        self._taken: dict[int, torch.Tensor] = {}  # hidden states before layers, of the step under way
        self._beside: torch.cuda.Stream | None = None  # of captured steps; ranks exchange numbers on one stream alone
        self._read_beside: Any = None  # what must stay in memory until `join`
        self._specs: dict[int, SamplingSpec] = {}  # by row; a runner of packed steps has them on the device

    def load_model(self) -> None:
        """Load the model, then the head, and take from the model what the head reads."""
        super().load_model()
        setup, model = self._setup, self.model
        self.head = self._make_head(setup, model)
        attention = head_attention(setup, self.head.config)
        self._head_backend = make_backend(setup.backend, attention)
        self._layers = attention_layers(cast(nn.Module, self.head))
        for layer in self._layers:
            layer.bind(self._head_backend)
        self.kept = KeptStates(
            setup.max_num_seqs, self._longest + 1, self.head.config.hidden_size, setup.dtype, setup.device
        )
        for i in self.head.aux_layers:
            [*model.model.layers, model.model.norm][i].register_forward_pre_hook(partial(self._take, i))
        self._reads_the_end = max(self.head.aux_layers, default=len(model.model.layers)) >= len(model.model.layers) - 1
        if setup.device.type == "cuda" and setup.config.tensor_parallel_size == 1:
            self._beside = torch.cuda.Stream(setup.device)
        self._ids = None if self.head.target_ids is None else own_ids(self.head.target_ids, model)

    def load_weights(self, weights: Path | Tensors | None) -> None:
        """As the parent. A head in the model's checkpoint gets the weights that these hold for it, all of them, or keeps its own."""
        given, head = self._setup.path if weights is None else weights, cast(Any, self.head)
        if head.is_in_checkpoint and not (weights is None and self._setup.config.random_weights):
            if isinstance(given, Path):
                own = read_tensors(given, {}, None, lambda name, t: [(name, t)] * bool([*head.local_tensors(name, t)]))
                deque(passed_on(head, own), maxlen=0)
            else:
                weights = passed_on(head, given)
        super().load_weights(weights)

    def _take(self, i: int, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Keep the hidden state before layer `i`: what the one before returned, plus the residual stream."""
        x, residual = (*arguments, None)[:2]
        self._taken[i] = x + residual if isinstance(residual, torch.Tensor) else x.clone()  # it is written over

    def more_kv_bytes(self) -> int:
        config = self._head_backend.config
        return 2 * len(self._layers) * config.num_kv_heads * config.head_dim * config.dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype | None = None) -> None:
        """Allocate the model's cache and the head's, which has blocks of its own for each row's drafts.

        It is zero: a slot that nobody has written is read as a token of no weight, never as NaN.
        """
        super().allocate_kv_cache(num_blocks, dtype)
        setup, config = self._setup, self._head_backend.config
        self._num_blocks, self._spare = num_blocks, -(-self._longest // setup.block_size)
        count = num_blocks + (setup.max_num_seqs + 1) * self._spare
        shape = (len(self._layers), 2, count, config.num_kv_heads, setup.block_size, config.head_dim)
        cache = torch.zeros(shape, dtype=setup.dtype, device=setup.device)
        for layer, part in zip(self._layers, cache.permute(0, 1, 2, 4, 3, 5), strict=True):
            layer.kv_cache = part

    def _build(self, scheduled_seqs: Sequence[ScheduledSequence]) -> ForwardBatch:
        new = {scheduled.row: scheduled.sampling for scheduled in scheduled_seqs if scheduled.sampling is not None}
        if new:
            self._specs |= new
            self.kept.forget(torch.tensor([*new], device=self._setup.device))
        return super()._build(scheduled_seqs)

    def forward_hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """As the parent; also stores the head's K/V, and keeps the hidden states that the next step may need.

        In a capture it may be under way until `join`.
        """
        batch.only_last = batch.only_last and not self._reads_the_end
        hidden = super().forward_hidden(batch)
        taken, self._taken = self._taken, {}
        if self._beside is None or not torch.cuda.is_current_stream_capturing():
            self._store_pairs(hidden, taken, batch)
            return hidden
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._store_pairs(hidden, taken, batch)
        self._read_beside = hidden, taken, batch
        return hidden

    def join(self) -> None:
        """Let what comes next in a capture wait for the head's K/V."""
        if self._beside is not None and self._read_beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
            self._read_beside = None

    def _store_pairs(self, hidden: torch.Tensor, taken: dict[int, torch.Tensor], batch: ForwardBatch) -> None:
        if len(taken) < len(self.head.aux_layers):  # a dry run leaves layers out, and looks at no values
            missing = hidden.new_zeros(len(batch.input_ids), hidden.shape[1])
            taken = {i: taken.get(i, missing) for i in self.head.aux_layers}
        states = [taken[i] for i in self.head.aux_layers]
        own = self.head.combine(torch.cat(states, -1) if states else hidden)
        if own.is_cuda:
            from folovllm.electives.spec_decode.kernels.pairs import pair_up

            paired, positions, slots = pair_up(own, batch, self.kept, self._setup.block_size)
        else:
            paired, positions, slots = pairs(own, batch, self.kept, self._setup.block_size)
        self.head.store(paired, replace(batch, positions=positions, slot_mapping=slots))

    def chain(self, batch: ForwardBatch, k: int, sample: Sample) -> torch.Tensor:
        """Return the newest tokens, and `k` draft tokens behind each, [k + 1, S] int64. Device work only.

        Args:
            batch: the newest tokens, which are not computed, as a batch of decodes.
        """
        size, spare = self._setup.block_size, (self._num_blocks, self._spare)
        if batch.positions.is_cuda:
            from folovllm.electives.spec_decode.kernels.pairs import start_chain

            tables, positions, slots, lens, hidden = start_chain(batch, k, self.kept, size, *spare)
        else:
            tables, positions, slots, lens, hidden = chain_start(batch, k, self.kept, size, *spare)
        tokens, longest = [batch.input_ids], tables.shape[1] * size
        for i in range(k):
            lens_host = [n and min(n - 1 + i, longest) for n in batch.seq_lens_host]  # none where a chain is captured
            step = replace(
                batch, input_ids=tokens[-1], positions=positions[i], slot_mapping=slots[i], seq_lens=lens[i],
                block_tables=tables, seq_lens_host=lens_host,
            )  # fmt: skip
            self._head_backend.plan(step)
            hidden = self.head.forward(hidden, step)
            tokens.append(sample(self._over_all_ids(self.head.compute_logits(hidden)), i))
        return torch.stack(tokens)

    def _over_all_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the head's logits as the target's [S, V]; what the head does not know is never sampled."""
        if self._ids is None:
            return logits
        known, places = self._ids
        whole = logits.new_full((len(logits), len(self.model.lm_head.weight)), -torch.inf)
        return whole.index_copy_(1, places, logits if known is None else logits[:, known])

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run a step, or a chain of drafts if that is asked for: its result has the newest token first."""
        if output.extras is None or CHAIN not in output.extras:
            return super().execute_model(output)
        return StepResult(self._chain_eagerly(output.scheduled_seqs, int(output.extras[CHAIN][0, 1])), {})

    def _chain_eagerly(self, scheduled_seqs: Sequence[ScheduledSequence], k: int) -> list[list[int]]:
        on, count = self._setup.device, len(scheduled_seqs)
        rows, lens = [scheduled.row for scheduled in scheduled_seqs], [scheduled.end for scheduled in scheduled_seqs]
        own = padded_tables([self._input_batch.block_tables[row] for row in rows])
        tables = np.zeros((count, -(-self._setup.max_model_len // self._setup.block_size)), np.int32)
        tables[:, : own.shape[1]] = own
        tokens = torch.tensor([int(scheduled.token_ids[0]) for scheduled in scheduled_seqs], device=on)
        counting, seq_lens = torch.arange(count + 1, device=on), torch.tensor(lens, dtype=torch.int32, device=on)
        batch = ForwardBatch(
            tokens, (seq_lens - 1).long(), counting[:-1], counting.int(), seq_lens, torch.from_numpy(tables).to(on),
            counting[:-1], count, count, 1, self._setup.max_model_len, [1] * count, lens, rows=torch.tensor(rows, device=on),
        )  # fmt: skip
        specs = [self._specs[row] for row in rows]

        def sample(logits: torch.Tensor, i: int) -> torch.Tensor:
            return self._sampler.sample(logits, SamplingBatch.from_specs(specs, [n + i for n in lens], on))

        found: list[list[int]] = self.chain(batch, k, sample).T.tolist()
        return found


def head_attention(setup: EngineSetup, config: Any) -> Any:
    """Return the `AttentionConfig` of a head: of its own shape, and in the dtype of the model. Every rank has all of it."""
    return replace(
        setup.attention, num_heads=config.num_attention_heads, num_kv_heads=num_kv_heads_of(config),
        head_dim=head_dim_of(config), kv_dtype=None, block_size=setup.block_size,
    )  # fmt: skip


def own_ids(target_ids: torch.Tensor, model: LlamaForCausalLM) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return which draft ids [n] are of this rank's part of the vocabulary, None for all, and their places [n] in it."""
    group, count = getattr(model.model.embed_tokens, "group", None), len(model.lm_head.weight)
    places = target_ids - (0 if group is None else group.rank * count)
    known = ((places >= 0) & (places < count)).nonzero().flatten()
    return None if len(known) == len(places) else known, places[known]


def pairs(
    own: torch.Tensor, batch: ForwardBatch, kept: KeptStates, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [T, H], positions and slots [T] of the pairs whose tokens a step brings, and keep its last states.

    Args:
        own: [T, H], what a chain carries of each token.
    """
    assert batch.rows is not None
    ends, rows, sequence = batch.seq_lens.long(), batch.rows.long(), sequences_of(batch)
    starts = ends - batch.query_start_loc.diff()
    before, is_there = kept.before(rows, starts)
    positions, hidden = head_inputs(batch.positions, own, sequence, before)
    first = torch.where(is_there, starts - 1, starts)  # the first position with a pair
    is_pair = (batch.slot_mapping >= 0) & (positions >= first[sequence])
    positions = positions.clamp(min=0)
    slots = batch.block_tables[sequence, positions // block_size].long() * block_size + positions % block_size
    kept.keep(rows[sequence], batch.positions, ends[sequence], own)
    return hidden, positions, torch.where(is_pair, slots, -1)


def chain_start(
    batch: ForwardBatch, k: int, kept: KeptStates, block_size: int, first_spare: int, num_spare: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a chain of `k` drafts begins with, for a batch whose newest tokens are not computed.

    These are block tables [S, max_blocks] int32, positions and slots [k, S] int64 and lengths [k, S] int32 of the pairs, and the
    hidden states [S, H] of the first ones. A sequence may have no blocks yet for the tokens that are drafted behind it: in the
    tables its row's spare blocks follow, `num_spare` for each row from block `first_spare` on.
    """
    assert batch.rows is not None
    rows, tables = batch.rows.long(), batch.block_tables
    newest = torch.where(batch.seq_lens > 0, batch.positions, -1)
    behind = torch.arange(tables.shape[1], device=tables.device) - (newest + block_size - 1)[:, None] // block_size
    spare = first_spare + rows[:, None] * num_spare + behind.clamp(0, num_spare - 1)
    tables = torch.where(behind < 0, tables, spare.int())
    positions, slots = chain_places(newest, tables, block_size, k)
    lens = torch.where(newest < 0, 0, positions + 1).int()
    return tables, positions.contiguous(), slots.contiguous(), lens, kept.before(rows, newest)[0]


def sequences_of(batch: ForwardBatch) -> torch.Tensor:
    """Return the sequence that each token of a batch is of, [T] int64. Device work only."""
    count = torch.arange(len(batch.input_ids), device=batch.positions.device)
    if batch.num_decodes == batch.num_seqs:
        return count
    return torch.searchsorted(batch.query_start_loc[1:].long(), count, right=True).clamp(max=batch.num_seqs - 1)


def passed_on(head: Any, weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the target's new weights, and copy on the way those of the head into it.

    Raises ValueError for a tensor that the head has no place for, and behind the last one if they are not all of the head's.
    """
    places = {head.checkpoint_name(name): place for name, place in checkpoint_places(head).items()}
    count = len(places)
    for name, tensor in map(as_named, weights):
        for own, part in head.local_tensors(name, tensor):
            require_usable(name, part, PLAIN)
            copy_weight(head.checkpoint_name(own), part, places)
        yield name, tensor
    if 0 < len(places) < count:
        raise ValueError(f"the given set of weights lacks {some_of(places)}")
    if not places:
        head.weights_loaded()
