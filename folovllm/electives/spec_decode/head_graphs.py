"""The runner of packed steps for a model with a draft head: it captures chains of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from folovllm.electives.spec_decode.head_runner import CHAIN, HeadModelRunner
from folovllm.electives.spec_decode.multi_step import WIDEST, DraftTokens
from folovllm.sample.sampling_row import RowField
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import Field, PackedStep, Parts, split, unpack_extras
from folovllm.step.schedule import StepResult
from folovllm.worker.buckets import Bucket, decode_bucket, padding_of
from folovllm.worker.graph_runner import GraphRunner


@dataclass(slots=True, frozen=True)
class PendingChain:
    """A chain of drafts that was started."""

    drafted: DraftTokens
    num_seqs: int
    k: int

    def is_here(self) -> bool:
        """Return whether the drafts have arrived: `wait` would return at once."""
        return self.drafted.arrived is None or self.drafted.arrived.query()

    def wait(self) -> StepResult:
        """Wait for the drafts, and return for each sequence its newest token and its `k` draft tokens."""
        ids = self.drafted.placeholder_ids[: self.k + 1, : self.num_seqs]
        return StepResult(self.drafted.resolve(ids).T.tolist(), {})


class HeadGraphRunner(GraphRunner):
    """A `GraphRunner` that also starts chains of drafts, whose tokens the next step reads on the device by placeholder ids.

    Row 0 of `drafted.sampled` gets the newest tokens, and row i + 1 the drafts number i; column s is sequence s of the chain.
    """

    def __init__(self, *arguments: Any, drafted: DraftTokens, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._drafted, device = drafted, self._setup.device
        rows = self._setup.max_num_seqs + 1
        self._lengths = chain_lengths(len(drafted.sampled) - 1)
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # nobody reads those of drafts
        self._all_allowed = torch.full_like(self._row_sampler.masks[:rows], -1)
        self._ended = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def _inner(self) -> HeadModelRunner:
        return cast(HeadModelRunner, self.inner)

    def execute_model(self, step: PackedStep | TokenBitmasks) -> Any:
        """Run a step, or start the chain that is asked for in place of one and return a `PendingChain`."""
        if isinstance(step, PackedStep) and step.extras.size:
            asked = unpack_extras(step.extras).get(CHAIN)
            if asked is not None:
                return self._start_chain(step, int(asked[0, 1]))
        return super().execute_model(step)

    def _start_chain(self, step: PackedStep, k: int) -> PendingChain:
        if step.is_decode:
            k = next(length for length in self._lengths if length >= k)
            graph = self._chain_graph(step.fields.shape[1], k, step.is_special)
            graph.replay(self._steps_in.stage(step.fields.ravel()))
            self._steps_in.mark()
        else:
            self._run_chain_eagerly(step, k)
        if self._ended is not None:
            self._ended.record()
            self._drafted.arrived = self._ended
        return PendingChain(self._drafted, step.num_seqs, k)

    def _chain_graph(self, width: int, k: int, is_special: bool) -> Any:
        bucket = decode_bucket(width)

        def capture() -> Any:
            work = partial(self._chain_of_decodes, bucket, k, is_special)
            return self._graph_pool.capture(padding_of(bucket, self._setup.max_num_seqs), work)

        return self._graphs.get(width, f"{k} drafts{' special' * is_special}", capture)

    def _chain_of_decodes(self, bucket: Bucket, k: int, is_special: bool, numbers: torch.Tensor) -> None:
        """Unpack a batch of decodes and run a chain of drafts for it. This work is captured."""
        fields = split(numbers, bucket.columns).fields
        self._chain(self._tables.unpack_decode(fields, self._setup.max_model_len), fields, k, is_special)

    def _run_chain_eagerly(self, step: PackedStep, k: int) -> None:
        parts, _ = self._upload(step, None)
        batch = self._tables.unpack(parts, step.num_seqs, 1, self._setup.max_model_len, step.fields)
        self._chain(batch, parts.samples, k, step.is_special)

    def _chain(self, batch: ForwardBatch, samples: torch.Tensor, k: int, is_special: bool) -> None:
        """Draft for the newest tokens of a batch. `samples` [len(Sample), S] says how to sample. Device work only."""
        sample, own = self._sample_special if is_special else self._sample_plainly, samples.clone()

        def next_tokens(logits: torch.Tensor, i: int) -> torch.Tensor:
            if i:
                own[Field.SEQ_LEN] += 1  # each draft is a position later
            return sample(logits, own)

        found = self._inner.chain(batch, k, next_tokens)
        self._drafted.sampled[: k + 1, : found.shape[1]] = found
        self._drafted.host.copy_(self._drafted.sampled, non_blocking=True)

    def _sample_plainly(self, logits: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._step_sampler.one_pass(logits, samples, out, self._last_tokens)
        return out

    def _sample_special(self, logits: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Sample with each row's filters, with its penalties as they were before the chain, and without its grammar."""
        rows, positions = samples[Field.ROW], samples[Field.SEQ_LEN]
        masks = self._all_allowed[: len(logits)]
        return self._row_sampler.sample(self._step_sampler.full_logits(logits), rows, positions, masks=masks)

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

    def _capture(self, bucket: Bucket) -> None:
        super()._capture(bucket)
        if bucket.is_decode:
            for k in self._lengths:
                for is_special in (False, True)[: 1 + (bucket.num_decodes <= WIDEST)]:
                    self._chain_graph(bucket.num_decodes, k, is_special)

    def _dry_run_graphs(self) -> None:
        """Also run a chain of one draft at each width: the kernels of a chain do not depend on its length."""
        super()._dry_run_graphs()
        for bucket in map(decode_bucket, self._graphs.widths):
            numbers = torch.from_numpy(padding_of(bucket, self._setup.max_num_seqs)).to(self._setup.device)
            for is_special in (False, True):
                self._chain_of_decodes(bucket, 1, is_special, numbers)


def chain_lengths(most: int) -> list[int]:
    """Return the lengths of captured chains, ascending. A request for another length runs the next longer one."""
    return sorted({n for n in (1, 2, 3, 4, 6, 8, 16, 32) if n < most} | {most})
