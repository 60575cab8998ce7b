"""Chains of drafts on a device: a draft model or a head drafts token after token, each from the one before, in one call.

A chain is captured as one graph, so that it costs the host a launch. The host need not wait for its tokens: a step can name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import Field, PackedStep, split, unpack_extras
from folovllm.step.schedule import Int32, StepResult
from folovllm.worker.buckets import Bucket, decode_bucket, padding_of
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.step_graph import StepGraph

CHAIN = "draft_chain"  # the key of a step's extras that asks for a chain in place of a step: one row, [0, k]
WIDEST = 32  # sequences of a captured chain that samples with filters
SampleFn = Callable[[torch.Tensor, int], torch.Tensor]  # logits [S, V], draft 0 to k - 1 -> tokens [S] int64


class DraftTokens:
    """The tokens that a draft model or a head drafted last, on the device. Each has a *placeholder id*, behind the vocabulary.

    So a step can bring draft tokens that the host does not know yet: drafting and verifying are on one device, which works in
    order. A placeholder id is valid until drafting begins again.

    Attributes:
        sampled: [lines, rows] int32, on the device: line 0 has the newest tokens, line i the i-th drafts; column s is sequence s.
        placeholder_ids: [lines, rows] int32.
    """

    def __init__(self, vocab_size: int, num_lines: int, max_num_seqs: int, device: torch.device) -> None:
        """`num_lines`: one more than the tokens of the longest chain."""
        shape = num_lines, max_num_seqs
        self._first_placeholder = vocab_size
        self._resolved = torch.arange(-1, vocab_size + num_lines * max_num_seqs, dtype=torch.int32, device=device)
        self.sampled = self._resolved[1 + vocab_size :].view(shape)
        self.placeholder_ids: Int32 = np.arange(num_lines * max_num_seqs, dtype=np.int32).reshape(shape) + vocab_size
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_host = self._host.numpy().ravel()  # a view
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None  # behind the last chain

    def write(self, tokens: torch.Tensor) -> None:
        """Take the tokens of a chain [n, S], and queue the copy to the host. Device work only."""
        self.sampled[: len(tokens), : tokens.shape[1]] = tokens
        self._host.copy_(self.sampled, non_blocking=True)

    def mark(self) -> None:
        """Note that a chain was started: its tokens arrive behind all that is queued now."""
        if self._arrived is not None:
            self._arrived.record()

    def are_here(self) -> bool:
        """Return whether the host has the tokens of the last chain."""
        return self._arrived is None or self._arrived.query()

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32; what is in flight stays. Device work only."""
        torch.index_select(self._resolved, 0, tokens + 1, out=tokens)

    def resolve(self, tokens: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
        """Return [n] tokens with their placeholder ids replaced. The host waits for the last chain."""
        if self._arrived is not None:
            self._arrived.synchronize()
        places = tokens - self._first_placeholder
        return np.where(places >= 0, self._on_host[np.maximum(places, 0)], tokens)


@dataclass(slots=True, frozen=True)
class PendingChain:
    """A chain of drafts that was started."""

    drafted: DraftTokens
    num_seqs: int
    k: int

    def is_here(self) -> bool:
        """Return whether the drafts have arrived: `wait` would return at once."""
        return self.drafted.are_here()

    def wait(self) -> StepResult:
        """Wait for the drafts, and return for each sequence its newest token and its `k` draft tokens."""
        ids = self.drafted.placeholder_ids[: self.k + 1, : self.num_seqs]
        return StepResult(self.drafted.resolve(ids).T.tolist(), {})


class Drafter(Protocol):
    """A `ModelRunner` that can draft."""

    def chain(self, batch: ForwardBatch, k: int, sample: SampleFn) -> torch.Tensor:
        """Draft `k` tokens for each sequence: [k + 1, S] int64. Row 0 is `batch.input_ids`, row i the i-th draft tokens.

        `batch` has the newest tokens, which are not computed, as a batch of decodes. Device work only.
        """


class ChainGraphRunner(GraphRunner):
    """A `GraphRunner` that also starts chains of drafts, whose tokens the next step reads on the device by placeholder ids."""

    def __init__(self, *arguments: Any, drafted: DraftTokens, **others: Any) -> None:
        """`drafted`: gets the tokens."""
        super().__init__(*arguments, **others)
        rows = self._setup.max_num_seqs + 1
        self._drafted, self._lengths = drafted, chain_lengths(len(drafted.sampled) - 1)
        # The kernel that samples notes the last tokens; nobody reads those of drafts.
        self._last_tokens = torch.zeros(rows, dtype=torch.int64, device=self._setup.device)
        self._all_allowed = torch.full_like(self._row_sampler.masks[:rows], -1)

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
            parts, _ = self._upload(step, None)
            batch = self._tables.unpack(parts, step.num_seqs, 1, self._setup.max_model_len, step.fields)
            self._chain(batch, parts.samples, k, step.is_special)
        self._drafted.mark()
        return PendingChain(self._drafted, step.num_seqs, k)

    def _chain_graph(self, width: int, k: int, is_special: bool) -> StepGraph:
        bucket = decode_bucket(width)

        def capture() -> StepGraph:
            work = partial(self._chain_of_decodes, bucket, k, is_special)
            return self._graph_pool.capture(padding_of(bucket, self._setup.max_num_seqs), work)

        return self._graphs.get(width, f"{k} drafts{' special' * is_special}", capture)

    def _chain_of_decodes(self, bucket: Bucket, k: int, is_special: bool, numbers: torch.Tensor) -> None:
        """Unpack a batch of decodes and run a chain of drafts for it. This work is captured."""
        fields = split(numbers, bucket.columns).fields
        self._chain(self._tables.unpack_decode(fields, self._setup.max_model_len), fields, k, is_special)

    def _chain(self, batch: ForwardBatch, samples: torch.Tensor, k: int, is_special: bool) -> None:
        """Draft for the newest tokens of a batch. `samples` [fields, S] (`step.packed.Sample`) says how to sample. Device work only."""
        sample, own = self._sample_special if is_special else self._sample_plainly, samples.clone()

        def next_tokens(logits: torch.Tensor, i: int) -> torch.Tensor:
            if i:
                own[Field.SEQ_LEN] += 1  # each draft is a position later
            return sample(logits, own)

        assert batch.rows is not None
        # The batch's tables end with its sequences, and a chain goes on behind them: it needs the rows' own.
        batch = replace(batch, block_tables=self._tables.block_tables.index_select(0, batch.rows))
        self._drafted.write(cast(Drafter, self.inner).chain(batch, k, next_tokens))

    def _sample_plainly(self, logits: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        self._step_sampler.one_pass(logits, samples, out, self._last_tokens)
        return out

    def _sample_special(self, logits: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Sample with each row's filters, with its penalties as they were before the chain, and without its grammar."""
        rows, positions = samples[Field.ROW], samples[Field.SEQ_LEN]
        masks = self._all_allowed[: len(logits)]
        return self._row_sampler.sample(self._step_sampler.full_logits(logits), rows, positions, masks=masks)

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
    return sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if n < most} | {most})
