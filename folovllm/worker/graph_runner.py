"""The runner that keeps the CPU off the critical path: packed steps, recorded decodes, tokens that stay on the device."""

from __future__ import annotations

import logging
from typing import Any

import torch
from tqdm import tqdm

from folovllm.models.llama import LlamaForCausalLM
from folovllm.sample.rows import DrawRows
from folovllm.sample.sampler import Sampler
from folovllm.setup import EngineSetup
from folovllm.step.draw import Logprobs
from folovllm.step.packed import Field, PackedStep, StepPacker
from folovllm.step.schedule import StepResult
from folovllm.worker.device_tables import DeviceTables
from folovllm.worker.draw import StepDraw
from folovllm.worker.host_ring import HostRing
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.step_graph import CudaGraph, RecordedGraph, StepGraph
from folovllm.worker.warm_up import small_steps

logger = logging.getLogger("folovllm")


class PendingStep:
    """A step that was started. Its tokens are on the device, and on their way to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        arrived: torch.cuda.Event | None,
        num_draws: list[int],
        logprobs: dict[int, Logprobs],
    ) -> None:
        self._tokens = tokens  # [S] int64 in host memory, once `arrived`
        self._arrived = arrived
        self._num_draws = num_draws
        self._logprobs = logprobs  # by index in the step

    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or self._arrived.query()

    def wait(self) -> StepResult:
        """The tokens, as soon as they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens = [[token] * drawn for token, drawn in zip(self._tokens.tolist(), self._num_draws, strict=True)]
        logprobs = [[self._logprobs[i]] if i in self._logprobs else [] for i in range(len(tokens))]
        return StepResult(tokens, logprobs)


class GraphRunner:
    """Around a `ModelRunner`: packed steps, which are started and not waited for.

    The whole decode step, from unpacking its buffer to the draw, is recorded once for each width in `buckets`. Other
    steps run the same operations one by one. All device work is queued on one stream, so that a step sees what the step
    before it wrote, whatever the host knows by then.
    """

    def __init__(self, setup: EngineSetup, runner: ModelRunner, draw: StepDraw, sampler: Sampler) -> None:
        rows, device = setup.max_num_seqs, setup.device
        self._setup = setup
        self._runner = runner
        self._draw = draw
        self._sampler = sampler
        self.buckets: list[int] = []
        self._draws = DrawRows(draw.vocab_size, device)
        self._tables = DeviceTables(rows, -(-setup.max_model_len // setup.block_size), setup.block_size, device)
        self._graphs: dict[int, StepGraph] = {}
        self._graph_pool: Any = None
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # what the step drew
        self._logits: torch.Tensor | None = None  # [rows, V], where recorded steps leave them
        self._steps_in, self._tokens_out = HostRing(torch.int32, device), HostRing(torch.int64, device)

    @property
    def model(self) -> LlamaForCausalLM:
        """The model, once it is loaded."""
        return self._runner.model

    def load_model(self) -> None:
        """Build the model and load its weights."""
        self._runner.load_model()

    def initialize_kv_cache(self) -> int:
        """Find out how many blocks fit, and allocate them; compile kernels and record steps. Returns the number of blocks."""
        setup = self._setup
        records = not setup.config.enforce_eager and self._runner.supports_graph()
        if records:  # before the cache takes what is left
            shape = setup.max_num_seqs, len(self.model.lm_head.weight)
            self._logits = torch.zeros(shape, dtype=setup.dtype, device=setup.device)
        num_blocks = self._runner.fit_kv_cache()
        if setup.device.type == "cuda":
            self.compile_kernels()
        if records:
            self.capture_cudagraph()
        return num_blocks

    def compile_kernels(self) -> None:
        """Run what no later step will find uncompiled, one operation after the other."""
        packer = StepPacker(self._setup.max_num_seqs, [])
        with torch.inference_mode():
            for output in small_steps(self._setup):
                self.execute_model(packer.pack(output)).wait()

    def capture_cudagraph(self) -> None:
        """Record the decode step for every bucket, the widest first, so that all others fit into its memory.

        On CPU a bucket is recorded when it is first needed: nothing is gained by doing it earlier.
        """
        setup = self._setup
        self.buckets = decode_buckets(setup.max_num_seqs)
        if setup.device.type == "cuda":
            self._graph_pool = torch.cuda.graph_pool_handle()
            for width in tqdm(self.buckets[::-1], desc="Capturing graphs", disable=not setup.config.use_tqdm):
                self._graph(width)

    def _graph(self, width: int) -> StepGraph:
        """The recorded decode step of a bucket; recorded now, with nothing but padding, if it is not yet."""
        if width not in self._graphs:
            padding = StepPacker(self._setup.max_num_seqs, []).pack_decode([], width)
            fields = torch.from_numpy(padding.fields).to(self._setup.device)
            graph = RecordedGraph(fields) if self._graph_pool is None else CudaGraph(fields, self._graph_pool)
            with torch.inference_mode():
                graph.capture(self._decode)
            self._graphs[width] = graph
        return self._graphs[width]

    def execute_model(self, step: PackedStep) -> PendingStep:
        """Start a packed step; the host does not wait for anything, unless a request wants log-probabilities."""
        self._draws.set(step.new_rows)
        if step.is_decode:
            width = step.fields.shape[1]
            self._graph(width).replay(self._steps_in.stage(step.fields.ravel()).view(step.fields.shape))
            self._steps_in.mark()
            assert self._logits is not None
            logits = self._logits[:width]
        else:
            flat = self._steps_in.to_device(step.flatten())
            fields = flat[: step.fields.size].view(len(Field), -1)
            logits = self._runner.forward(self._tables.unpack_mixed(step, flat))
            self._draw.one_pass(logits, fields, self._tokens, self._tables.last_token)
        logprobs = self._redraw(logits, step)
        tokens, arrived = self._tokens_out.to_host(self._tokens[: step.num_seqs])
        return PendingStep(tokens, arrived, step.fields[Field.NUM_DRAWS, : step.num_seqs].tolist(), logprobs)

    def _decode(self, fields: torch.Tensor) -> None:
        """The work of a decode step, from its buffer [len(Field), width] to its tokens: what a graph records."""
        assert self._logits is not None
        batch = self._tables.unpack_decode(fields, self._setup.max_model_len)
        logits = self._runner.forward(batch, out=self._logits[: batch.num_seqs])
        self._draw.one_pass(logits, fields, self._tokens, self._tables.last_token)

    def _redraw(self, logits: torch.Tensor, step: PackedStep) -> dict[int, Logprobs]:
        """Draw again, with everything, for the rows whose requests ask for it; returns their log-probabilities."""
        rows = step.fields[Field.ROW, : step.num_seqs].tolist()
        index = [i for i in self._draws.special(rows) if step.fields[Field.NUM_DRAWS, i]]
        if not index:
            return {}
        rows = [rows[i] for i in index]
        at = torch.tensor(index).to(logits.device, non_blocking=True)
        batch = self._draws.batch(rows, step.fields[Field.SEQ_LEN, index].tolist())
        whole = self._draw.whole(logits[at]).float()
        tokens = self._sampler.choose(whole, batch)
        self._tokens[at] = tokens
        self._tables.last_token[torch.tensor(rows).to(logits.device, non_blocking=True)] = tokens
        self._draws.note(rows, tokens)
        if not self._draws.wants_logprobs(rows):
            return {}
        found = self._sampler.logprobs(whole, tokens.tolist(), batch.specs)  # the host waits here
        return {i: own for i, own in zip(index, found, strict=True) if own is not None}


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Widths to record: 1, 2, 4, 8, then every 16th, and the largest batch there can be."""
    widths = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(width for width in widths if width <= max_num_seqs)
