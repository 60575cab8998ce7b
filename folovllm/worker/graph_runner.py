"""The runner that keeps the CPU off the critical path: packed steps, recorded decodes, tokens that stay on the device."""

from __future__ import annotations

import logging
from typing import Any

import torch
from tqdm import tqdm

from folovllm.engine.scheduler import ScheduledSequence, SchedulerOutput
from folovllm.engine.setup import EngineSetup
from folovllm.forward_batch import ForwardBatch
from folovllm.request import Sequence
from folovllm.sample.sampler import Logprobs, SamplerOutput, SamplingBatch
from folovllm.worker.host_ring import HostRing
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.packed_step import DeviceTables, Field, PackedStep, StepPacker
from folovllm.worker.step_graph import CudaGraph, RecordedGraph, StepGraph

logger = logging.getLogger("folovllm")


class PendingStep:
    """A step that was started. Its tokens are on the device, and on their way to the host."""

    def __init__(self, tokens: torch.Tensor, arrived: torch.cuda.Event | None, logprobs: list[Logprobs | None]) -> None:
        self._tokens = tokens  # [S] int64 in host memory, once `arrived`
        self._arrived = arrived
        self._logprobs = logprobs

    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> SamplerOutput:
        """The tokens, as soon as they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return SamplerOutput(self._tokens.tolist(), self._logprobs)


class GraphRunner(ModelRunner):
    """A `ModelRunner` whose steps are started and not waited for.

    The whole decode step, from unpacking its buffer to the draw, is recorded once for each width in `buckets`. Other
    steps run the same operations one by one. All device work is queued on one stream, so that a step sees what the step
    before it wrote, whatever the host knows by then.
    """

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        rows, device = setup.max_num_seqs, setup.device
        self.buckets: list[int] = []
        self.packer = StepPacker(rows, setup.block_size)
        self._tables = DeviceTables(rows, -(-setup.max_model_len // setup.block_size), setup.block_size, device)
        self._graphs: dict[int, StepGraph] = {}
        self._graph_pool: Any = None
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # what the step drew
        self._logits: dict[int, torch.Tensor] = {}  # [width, V], where the recorded step of a width leaves them
        self._steps_in, self._tokens_out = HostRing(torch.int32, device), HostRing(torch.int64, device)

    def initialize_kv_cache(self) -> int:
        """As without graphs; then record them."""
        num_blocks = super().initialize_kv_cache()
        if not self._setup.config.enforce_eager:
            self.capture_cudagraph()
        return num_blocks

    def capture_cudagraph(self) -> None:
        """Record the decode step for every bucket, the widest first, so that all others fit into its memory.

        On CPU a bucket is recorded when it is first needed: nothing is gained by doing it earlier.
        """
        setup = self._setup
        if not self._backend.supports_graph(setup.device):
            logger.warning("attention backend %s cannot be captured: decode runs eagerly", setup.backend)
            return
        self.buckets = decode_buckets(setup.max_num_seqs)
        if setup.device.type == "cuda":
            self._graph_pool = torch.cuda.graph_pool_handle()
            for width in tqdm(self.buckets[::-1], desc="Capturing graphs", disable=not setup.config.use_tqdm):
                self._graph(width)

    def _graph(self, width: int) -> StepGraph:
        """The recorded decode step of a bucket; recorded now, with nothing but padding, if it is not yet."""
        if width not in self._graphs:
            padding = torch.from_numpy(self.packer.pack_decode([], width).fields).to(self._setup.device)
            graph = RecordedGraph(padding) if self._graph_pool is None else CudaGraph(padding, self._graph_pool)
            with torch.inference_mode():
                graph.capture(self._decode)
            self._graphs[width] = graph
        return self._graphs[width]

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Start a step and wait for it."""
        return self.submit(output).wait()

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start a step; the host does not wait for anything, unless a request wants log-probabilities."""
        return self.run(self.packer.pack(output.scheduled, self.buckets), full_path(output.scheduled))

    def run(self, step: PackedStep, full: dict[int, Sequence]) -> PendingStep:
        """Start a packed step; `full` is what `full_path` says of it."""
        n = step.num_seqs
        if step.is_decode:
            width = step.fields.shape[1]
            self._graph(width).replay(self._steps_in.stage(step.fields.ravel()).view(step.fields.shape))
            self._steps_in.mark()
            logits = self._logits[width]
        else:
            flat = self._steps_in.to_device(step.flatten())
            logits = self._forward(self._tables.unpack_mixed(step, flat), flat[: step.fields.size].view(len(Field), -1))
        logprobs: list[Logprobs | None] = [None] * n
        if full:
            self._redraw(logits, step, full, logprobs)
        tokens, arrived = self._tokens_out.to_host(self._tokens[:n])
        return PendingStep(tokens, arrived, logprobs)

    def _decode(self, fields: torch.Tensor) -> None:
        """The work of a decode step, from its buffer [len(Field), width] to its tokens: what a graph records."""
        batch = self._tables.unpack_decode(fields, self._setup.max_model_len)
        self._logits[batch.num_seqs] = self._forward(batch, fields)

    def _forward(self, batch: ForwardBatch, fields: torch.Tensor) -> torch.Tensor:
        """Model and draw; returns the logits [S, V]."""
        self._backend.plan(batch)
        logits = self.model.compute_logits(self.model(batch), batch)
        self._draw(logits, fields)
        return logits

    def _draw(self, logits: torch.Tensor, fields: torch.Tensor) -> None:
        """One token a row, in one pass over the logits [S, V], to be kept: no filters, no penalties."""
        temperature = fields[Field.TEMPERATURE].view(torch.float32)
        low, high, positions = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.SEQ_LEN]
        if logits.is_cuda and not self._setup.config.compile:
            from folovllm.kernels.gumbel_max import gumbel_max

            keep = (self._tables.last_token, fields[Field.ROW])
            gumbel_max(logits, temperature, low, high, positions, out=self._tokens, keep=keep)
            return
        seeds = high.long() << 32 | low.long() & 0xFFFFFFFF
        greedy = not logits.is_cuda and not bool(temperature.any())  # to ask a GPU is to wait for it
        batch = SamplingBatch(temperature, seeds, positions.long(), greedy)
        self._keep(self._sampler.sample(logits, batch), fields)

    def _keep(self, tokens: torch.Tensor, fields: torch.Tensor) -> None:
        """The drawn tokens [S] go to `_tokens`, and to their rows' last token."""
        self._tokens[: len(tokens)] = tokens
        self._tables.last_token[fields[Field.ROW].long()] = tokens

    def _redraw(
        self, logits: torch.Tensor, step: PackedStep, full: dict[int, Sequence], out: list[Logprobs | None]
    ) -> None:
        """Draw again, with everything, for the rows whose requests ask for it."""
        index = list(full)
        at = torch.tensor(index).to(logits.device, non_blocking=True)
        seqs = [full[i] for i in index]
        batch = SamplingBatch.from_sequences(seqs, logits.device)
        rows = self._whole_logits(logits[at]).float()
        tokens = self._sampler.choose(rows, batch)
        self._tokens[at] = tokens
        table_rows = torch.from_numpy(step.fields[Field.ROW, index]).long().to(logits.device, non_blocking=True)
        self._tables.last_token[table_rows] = tokens
        if any(seq.params.logprobs is not None for seq in seqs):  # the host waits here
            for i, logprobs in zip(index, self._sampler.logprobs(rows, tokens.tolist(), seqs), strict=True):
                out[i] = logprobs

    def _whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Rows over the whole vocabulary, [n, V]; on one rank they are that already."""
        return logits


def full_path(items: list[ScheduledSequence]) -> dict[int, Sequence]:
    """The sequences, by index in the step, that the one-pass draw cannot serve."""
    return {i: item.seq for i, item in enumerate(items) if item.draws and _needs_full_path(item.seq)}


def _needs_full_path(seq: Sequence) -> bool:
    """Whether the draw takes more than temperature and noise."""
    p = seq.params
    filtered = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    return filtered or p.has_penalties or p.logprobs is not None or p.min_tokens > 0


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Widths to record: 1, 2, 4, 8, then every 16th, and the largest batch there can be."""
    widths = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(width for width in widths if width <= max_num_seqs)
