"""Keeps the CPU off the critical path: packed steps, recorded decodes, tokens that stay on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch
from tqdm import tqdm

from folovllm.forward_batch import ForwardBatch
from folovllm.models.llama import LlamaForCausalLM
from folovllm.sample.draw_state import DrawState
from folovllm.sample.logprobs import DrawnLogprobs, gather_logprobs
from folovllm.setup import EngineSetup
from folovllm.step.masks import Masks
from folovllm.step.packed import Field, Int32, PackedStep, StepPacker
from folovllm.step.schedule import SchedulerOutput
from folovllm.worker.device_tables import DeviceTables
from folovllm.worker.draw import StepDraw
from folovllm.worker.graph_cache import GraphStore
from folovllm.worker.host_ring import HostRing
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.pending_step import Computed, PendingStep
from folovllm.worker.prompt_graphs import PromptGraphs
from folovllm.worker.rehearse import compile_at_once
from folovllm.worker.step_graph import Recorder, StepGraph
from folovllm.worker.warm_up import small_steps

logger = logging.getLogger("folovllm")


class GraphRunner:
    """Wraps a `ModelRunner`: it starts packed steps and does not wait for them.

    For each width in `buckets` three things are recorded: the whole decode step, from unpacking its buffer to the draw in
    one pass; the step as far as its logits; and from there the draw of any row. Of small steps with prompts the model is
    recorded (`PromptGraphs`). Other steps run the same operations one by one. All device work is queued on one stream, so
    that a step sees what the step before it wrote, whatever the host knows by then.

    A step that draws late stops at its logits. The masks that its rows draw with are the next thing to come, and set it
    going again.
    """

    def __init__(
        self, setup: EngineSetup, runner: ModelRunner, draw: StepDraw, rows_draw: DrawState, graphs: GraphStore
    ) -> None:
        """`draw` serves steps whose draw is plain; `rows_draw` serves all others, and knows how each row draws.

        `graphs` says which widths are recorded, and keeps what is.
        """
        rows, device = setup.max_num_seqs, setup.device
        self._setup = setup
        self._runner = runner
        self._draw = draw
        self._rows_draw = rows_draw
        self.buckets: list[int] = []
        self._tables = DeviceTables(rows, -(-setup.max_model_len // setup.block_size), setup.block_size, device)
        self._graphs = graphs
        self._is_rehearsed = device.type == "cuda" and not setup.config.compile
        # Ranks run it before: their sums' first call in a recording has never been tried on several GPUs.
        self._recorder = Recorder(device, self._is_rehearsed and setup.config.tensor_parallel_size == 1)
        self._prompts = PromptGraphs(setup, runner, self._tables, self._recorder)
        self._late: Computed | None = None  # what `Masks` set going again
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
        if records:
            self._reserve_logits()
        if self._is_rehearsed:
            self.compile_at_once(records)
        num_blocks = self._runner.fit_kv_cache(self._prompts.largest() if records else 0.0)
        if setup.device.type == "cuda":
            self.compile_kernels()
        if records:
            self.capture_cudagraph()
        return num_blocks

    def _reserve_logits(self) -> None:
        """Make the place where recorded steps leave their logits, before the cache takes what is left."""
        shape = self._setup.max_num_seqs, len(self.model.lm_head.weight)
        self._logits = torch.zeros(shape, dtype=self._setup.dtype, device=self._setup.device)

    def compile_at_once(self, records: bool) -> None:
        """Compile all kernels of the start, many at a time."""
        compile_at_once(self._setup, self.model.model, lambda: self._rehearse(records))

    def _rehearse(self, records: bool) -> None:
        """Do once, over a small cache, what the start does: the largest step, small ones, and what is recorded.

        Scales of a cache come first, since kernels are others where keys lose an offset; the start finds the true ones.
        """
        setup = self._setup
        if setup.config.calculate_kv_scales:
            self._runner.calculate_kv_scales()
        self._runner.warmup_model()
        self._runner.allocate_kv_cache(-(-min(setup.max_model_len, setup.max_num_batched_tokens) // setup.block_size))
        self.compile_kernels()
        if records:
            self._rehearse_graphs()
        self._runner.allocate_kv_cache(0)

    def _rehearse_graphs(self) -> None:
        """Do the work that will be recorded."""
        for width in self._graphs.widths:
            for work in self._works():
                work(torch.from_numpy(self._padding(width)).to(self._setup.device))
        self._prompts.rehearse()

    def compile_kernels(self) -> None:
        """Run one operation after the other, so that all of their kernels are compiled before the first request."""
        self._warm_up(small_steps(self._setup))

    def _warm_up(self, steps: Iterable[SchedulerOutput]) -> None:
        """Run steps, and wait for each."""
        packer = StepPacker(self._setup.max_num_seqs, [])
        with torch.inference_mode():
            for output in steps:
                self._start(packer.pack(output)).wait()

    def capture_cudagraph(self) -> None:
        """Record steps with prompts, then the decode step for every bucket, the widest first, so that all others fit into
        its memory. On CPU a step is recorded when it is first needed: nothing is gained by doing it earlier.
        """
        setup = self._setup
        self.buckets = self._graphs.widths
        self._prompts.open()
        if setup.device.type == "cuda":
            for width in tqdm(self.buckets[::-1], desc="Capturing graphs", disable=not setup.config.use_tqdm):
                self._record(width)

    def _record(self, width: int) -> None:
        """Record all that steps of this width may need, so that no later step waits for it."""
        for work in self._works():
            self._recorded(width, work)

    def _works(self) -> tuple[Callable[[torch.Tensor], None], ...]:
        """What is recorded of each width."""
        return self._decode, self._forward, self._draw_recorded

    def _padding(self, width: int) -> Int32:
        """The fields of a decode step of nothing but padding."""
        return StepPacker(self._setup.max_num_seqs, []).pack_decode([], width).fields

    def _recorded(self, width: int, work: Callable[[torch.Tensor], None]) -> StepGraph:
        """The graph of `work` on the fields of a decode step. Records it now, with nothing but padding, if none is kept."""
        return self._graphs.get(width, work.__name__, lambda: self._recorder.record(self._padding(width), work))

    def execute_model(self, step: PackedStep | Masks) -> PendingStep | None:
        """Start a packed step, or the draw of the one that has its logits; the host does not wait for anything.

        None for a step that draws late.
        """
        if isinstance(step, Masks):
            return self._draw_late(step)
        if not step.draws_late:
            return self._start(step)
        self._late = self._compute(step)
        return None

    def _start(self, step: PackedStep) -> PendingStep:
        """Start a step that computes and draws at once."""
        if step.is_decode and not step.is_special:
            return self._sent(self._replay(step, self._decode))
        computed = self._compute(step)
        self._draw_step(computed, step.is_special)
        return self._pending(computed)

    def _draw_late(self, masks: Masks) -> PendingStep:
        """Draw for the step that has its logits."""
        assert self._late is not None, "no step waits for masks"
        computed, self._late = self._late, None
        numbers = self._steps_in.to_device(np.concatenate([masks.rows, masks.bits.ravel()]))
        rows, bits = numbers[: len(masks.rows)], numbers[len(masks.rows) :].view(masks.bits.shape)
        self._rows_draw.set_masks(rows, bits)
        self._draw_step(computed, is_special=True)
        return self._pending(computed)

    def _replay(self, step: PackedStep, work: Callable[[torch.Tensor], None]) -> Computed:
        """Do the recorded `work` on the fields of a decode step."""
        width = step.fields.shape[1]
        graph = self._recorded(width, work)
        graph.replay(self._steps_in.stage(step.fields.ravel()).view(step.fields.shape))
        self._steps_in.mark()
        return Computed(step, self._logits_of(graph.static_input), graph.static_input)

    def _pending(self, computed: Computed) -> PendingStep:
        """What will have the result of a step that has drawn."""
        return self._sent(computed)

    def _sent(self, computed: Computed) -> PendingStep:
        """Send a token for each share, and their log-probabilities, on their way to the host."""
        step, logits = computed.step, computed.logits
        logprobs = self._gather_logprobs(logits, step) if step.logprobs.size else None
        tokens, arrived = self._tokens_out.to_host(self._tokens[: step.num_seqs])
        return PendingStep(step, tokens, arrived, logprobs, computed.scores)

    def _decode(self, fields: torch.Tensor) -> None:
        """Do the whole work of a plain decode step, from its buffer [len(Field), width] to its tokens. A graph records this."""
        self._forward(fields)
        self._one_pass(self._logits_of(fields), fields)

    def _forward(self, fields: torch.Tensor) -> None:
        """Do the work of a decode step up to its logits, which stay in their buffer. A graph records this too."""
        batch = self._tables.unpack_decode(fields, self._setup.max_model_len)
        self._runner.forward(batch, out=self._logits_of(fields))

    def _draw_recorded(self, fields: torch.Tensor) -> None:
        """Draw for the rows of a decode step that has its logits, however they draw. A graph records this too."""
        self._draw_rows(self._logits_of(fields), fields)

    def _logits_of(self, fields: torch.Tensor) -> torch.Tensor:
        """The part of the buffer that holds a decode step's logits, [width, V]."""
        assert self._logits is not None
        return self._logits[: fields.shape[1]]

    def _compute(self, step: PackedStep) -> Computed:
        """Do the work of any step up to its logits. The scores of prompts are sent to the host on the way."""
        if step.is_decode:
            return self._replay(step, self._forward)
        room, numbers = self._prompts.pad(step)
        flat, padded = self._upload(step, numbers)
        fields = flat[: step.fields.size].view(step.fields.shape)
        if room is not None:
            return Computed(step, self._prompts.logits(step, flat, room, padded), fields)
        logits, scores = self._logits_and_scores(step, self._tables.unpack_mixed(step, flat))
        return Computed(step, logits, fields, scores)

    def _upload(self, step: PackedStep, numbers: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring a step's buffer to the device, and `numbers` behind it; note how new rows draw. Returns both."""
        packed, draws = step.flatten(), step.draws
        flat, more = self._steps_in.to_device(np.concatenate([packed, numbers])).tensor_split([len(packed)])
        if draws.num_rows:
            self._rows_draw.set_rows(flat[-len(draws.buffer) :], draws.num_rows, draws.num_with_line)
        return flat, more

    def _logits_and_scores(self, step: PackedStep, batch: ForwardBatch) -> tuple[torch.Tensor, DrawnLogprobs | None]:
        """Run the model on a step that is not recorded; the scores of prompts, if it has any, are on their way to the host."""
        if not step.scores.size:
            return self._runner.forward(batch), None
        after, tokens = self._steps_in.to_device(step.scores[1:3].ravel()).long().view(2, -1)
        logits, found = self._runner.forward_and_score(batch, after, tokens, int(step.scores[3].max()))
        return logits, found.to_host(non_blocking=True)

    def _draw_step(self, computed: Computed, is_special: bool) -> None:
        """Draw for a step that has its logits."""
        if computed.step.is_decode:
            self._replay(computed.step, self._draw_recorded)
        elif is_special:
            self._draw_rows(computed.logits, computed.fields)
        else:
            self._one_pass(computed.logits, computed.fields)

    def _one_pass(self, logits: torch.Tensor, fields: torch.Tensor) -> None:
        """Draw a token for each row of `logits`, into `self._tokens` and to where the next step finds it. Device work only."""
        self._draw.one_pass(logits, fields, self._tokens, self._tables.last_token)

    def _draw_rows(self, logits: torch.Tensor, fields: torch.Tensor) -> None:
        """Do the same with all that each row asks for."""
        whole, rows, positions = self._draw.whole(logits), fields[Field.ROW], fields[Field.SEQ_LEN]
        tokens = self._rows_draw.draw(whole, rows, positions, self._tokens, self._tables.last_token)
        self._rows_draw.note(tokens, rows, positions, fields[Field.NUM_DRAWS])

    def _gather_logprobs(self, logits: torch.Tensor, step: PackedStep) -> DrawnLogprobs:
        """Send log-probabilities to the host, ahead of the tokens, for the sequences that want them."""
        index, count = step.logprobs
        at = self._steps_in.to_device(index).long()
        return gather_logprobs(self._draw.whole(logits[at]), self._tokens[at], int(count.max())).to_host(
            non_blocking=True
        )
