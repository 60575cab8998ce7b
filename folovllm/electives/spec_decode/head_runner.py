"""The runners of a model with a draft head: each step stores the head's K/V, and a chain of drafts runs when asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from folovllm.attention.backends.registry import make_backend
from folovllm.electives.spec_decode import pairing
from folovllm.electives.spec_decode.chain import CHAIN, ChainGraphRunner, SampleFn
from folovllm.electives.spec_decode.heads import KeptStates
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
from folovllm.sample.sampling_row import RowField
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import PackedStep, Parts
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput, StepResult
from folovllm.worker.buckets import Bucket
from folovllm.worker.input_batch import padded_tables

MakeHead = Callable[[LlamaForCausalLM], DraftHead]


class HeadModelRunner(VerifyingModelRunner):
    """A `ModelRunner` that stores the head's K/V in every step, and runs chains of drafts.

    After the model's layers, a step stores the head's K/V for the pairs of its tokens (`head_inputs`). Those of a rejected draft
    are overwritten later, as the target's own are. A captured step stores on a second stream, beside the product with the
    vocabulary: these are small kernels, which take longer to start than to run. The last hidden states are kept for the next
    step (`KeptStates`). A chain begins with the newest token and the state before it, and needs nothing else of the last step.
    """

    head: DraftHead
    kept: KeptStates

    def __init__(self, *arguments: Any, make_head: MakeHead, most_drafts: int) -> None:
        """`most_drafts`: of a sequence in a step."""
        super().__init__(*arguments)
        self._make_head, self._most_drafts = make_head, most_drafts
        self._aux_states: dict[int, torch.Tensor] = {}  # of the step under way: hidden states before layers
        self._side_stream: torch.cuda.Stream | None = (
            None  # of captured steps on one rank; ranks exchange on one stream alone
        )
        self._side_inputs: Any = None  # what must stay in memory until `join_side_stream`
        self._specs: dict[int, SamplingSpec] = {}  # by row, for chains of steps that are not packed

    def load_model(self) -> None:
        """Load the model, then the head, and record from now on the hidden states that the head reads."""
        super().load_model()
        setup, model = self._setup, self.model
        self.head = self._make_head(model)
        attention = head_attention(setup, self.head.config)
        self._head_backend = make_backend(setup.backend, attention)
        self._layers = attention_layers(cast(nn.Module, self.head))
        for layer in self._layers:
            layer.bind(self._head_backend)
        depth, size = self._most_drafts + 1, self.head.config.hidden_size
        self.kept = KeptStates(setup.max_num_seqs, depth, size, setup.dtype, setup.device)
        self._pairing: ModuleType = pairing
        if setup.device.type == "cuda":
            from folovllm.electives.spec_decode.kernels import pairs

            self._pairing = pairs
        for i in self.head.aux_layers:
            [*model.model.layers, model.model.norm][i].register_forward_pre_hook(partial(self._record_aux_state, i))
        last = len(model.model.layers) - 1
        self._reads_last_layer = max(self.head.aux_layers, default=last) >= last
        if setup.device.type == "cuda" and setup.config.tensor_parallel_size == 1:
            self._side_stream = torch.cuda.Stream(setup.device)
        self._local_ids = None if self.head.target_ids is None else local_draft_ids(self.head.target_ids, model)

    def load_weights(self, weights: Path | Tensors | None) -> None:
        """Load the model's weights, and those of a head in its checkpoint: all of them, or none, and then the head stays as it is."""
        given, head = self._setup.path if weights is None else weights, cast(Any, self.head)
        if head.is_in_checkpoint and not (weights is None and self._setup.config.random_weights):
            if isinstance(given, Path):
                own = read_tensors(given, {}, None, lambda name, t: [(name, t)] * bool([*head.local_tensors(name, t)]))
                deque(copy_head_weights(head, own), maxlen=0)
            else:
                weights = copy_head_weights(head, given)
        super().load_weights(weights)

    def _record_aux_state(self, i: int, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Record the hidden state before layer `i`: the output of the layer before, plus the residual stream."""
        x, residual = (*arguments, None)[:2]
        self._aux_states[i] = x + residual if isinstance(residual, torch.Tensor) else x.clone()  # it is written over

    def more_kv_bytes(self) -> int:
        config = self._head_backend.config
        return 2 * len(self._layers) * config.num_kv_heads * config.head_dim * config.dtype.itemsize

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype | None = None) -> None:
        """Allocate the model's cache and the head's, which has spare blocks for each row's drafts.

        It begins as zeros: the slot of a pair without a hidden state is never written, and must not be read as NaN.
        """
        super().allocate_kv_cache(num_blocks, dtype)
        setup, config = self._setup, self._head_backend.config
        self._num_blocks, self._spare = num_blocks, -(-self._most_drafts // setup.block_size)
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
        """Run the model, store the head's K/V, and keep the hidden states that the next step may need.

        In a capture the storing may be under way until `join_side_stream`.
        """
        batch.only_last = batch.only_last and not self._reads_last_layer
        hidden = super().forward_hidden(batch)
        aux_states, self._aux_states = self._aux_states, {}
        if self._side_stream is None or not torch.cuda.is_current_stream_capturing():
            self._store_pairs(hidden, aux_states, batch)
            return hidden
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            self._store_pairs(hidden, aux_states, batch)
        self._side_inputs = hidden, aux_states, batch
        return hidden

    def join_side_stream(self) -> None:
        """Make the rest of a capture wait for the head's K/V."""
        if self._side_stream is not None and self._side_inputs is not None:
            torch.cuda.current_stream().wait_stream(self._side_stream)
            self._side_inputs = None

    def _store_pairs(self, hidden: torch.Tensor, aux_states: dict[int, torch.Tensor], batch: ForwardBatch) -> None:
        if len(aux_states) < len(self.head.aux_layers):  # a dry run leaves layers out, and looks at no values
            missing = hidden.new_zeros(len(batch.input_ids), hidden.shape[1])
            aux_states = {i: aux_states.get(i, missing) for i in self.head.aux_layers}
        states = [aux_states[i] for i in self.head.aux_layers]
        combined = self.head.combine(torch.cat(states, -1) if states else hidden)
        paired, positions, slots = self._pairing.pair_up(combined, batch, self.kept, self._setup.block_size)
        self.head.store(paired, replace(batch, positions=positions, slot_mapping=slots))

    def chain(self, batch: ForwardBatch, k: int, sample: SampleFn) -> torch.Tensor:
        """Run the head `k` times from the hidden states that were kept, as `Drafter.chain`."""
        size, spare = self._setup.block_size, (self._num_blocks, self._spare)
        tables, positions, slots, lens, hidden = self._pairing.start_chain(batch, k, self.kept, size, *spare)
        tokens, most_tokens = [batch.input_ids], tables.shape[1] * size
        for i in range(k):
            # In a capture on a GPU there are none.
            lens_host = [n and min(n - 1 + i, most_tokens) for n in batch.seq_lens_host]
            step = replace(
                batch, input_ids=tokens[-1], positions=positions[i], slot_mapping=slots[i], seq_lens=lens[i],
                block_tables=tables, seq_lens_host=lens_host,
            )  # fmt: skip
            self._head_backend.plan(step)
            hidden = self.head.forward(hidden, step)
            tokens.append(sample(self._over_all_ids(self.head.compute_logits(hidden)), i))
        return torch.stack(tokens)

    def _over_all_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the head's logits as the target's [S, V]; an id that the head does not know is never sampled."""
        if self._local_ids is None:
            return logits
        known, places = self._local_ids
        whole = logits.new_full((len(logits), len(self.model.lm_head.weight)), -torch.inf)
        return whole.index_copy_(1, places, logits if known is None else logits[:, known])

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run a step; or a chain of drafts if that is asked for, whose result has the newest token first."""
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


class HeadGraphRunner(ChainGraphRunner):
    """A `ChainGraphRunner` around a `HeadModelRunner`."""

    @property
    def _inner(self) -> HeadModelRunner:
        return cast(HeadModelRunner, self.inner)

    def _forward(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        """Run the model; at the end the head's K/V is complete."""
        super()._forward(bucket, numbers)
        self._inner.join_side_stream()

    def _upload(self, step: PackedStep, bucket: Bucket | None) -> tuple[Parts[torch.Tensor], torch.Tensor]:
        """Upload a step; rows that get another sequence drop their kept hidden states."""
        parts, padded = super()._upload(step, bucket)
        if count := step.sampling_updates.num_rows:
            width = 1 + len(RowField)
            self._inner.kept.forget(parts.sampling_updates[: count * width].view(count, width)[:, 0].long())
        return parts, padded


def head_attention(setup: EngineSetup, config: Any) -> Any:
    """Return the `AttentionConfig` of a head: its own shape, the model's dtype. No rank has only a part of it."""
    return replace(
        setup.attention, num_heads=config.num_attention_heads, num_kv_heads=num_kv_heads_of(config),
        head_dim=head_dim_of(config), kv_dtype=None, block_size=setup.block_size,
    )  # fmt: skip


def local_draft_ids(target_ids: torch.Tensor, model: LlamaForCausalLM) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the draft ids [n] in this rank's shard of the vocabulary (None: all of them), and the row [n] of each in that shard."""
    group, count = getattr(model.model.embed_tokens, "group", None), len(model.lm_head.weight)
    places = target_ids - (0 if group is None else group.rank * count)
    known = ((places >= 0) & (places < count)).nonzero().flatten()
    return None if len(known) == len(places) else known, places[known]


def copy_head_weights(head: Any, weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the target's new weights unchanged, and copy those of the head into it as they pass.

    Raises ValueError for a tensor that does not fit the head, and after the last one if some of the head's tensors were missing.
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
