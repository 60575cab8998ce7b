"""The runner of M6: packed steps, captured steps, and tokens that stay on the device, so that the GPU never waits for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from folovllm.engine.setup import EngineSetup
from folovllm.models.llama import LlamaForCausalLM
from folovllm.plugins import CALIBRATION, load_elective
from folovllm.sample.logprobs import SampledLogprobs, gather_logprobs, score
from folovllm.sample.sampler_state import SamplerState
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import Field, PackedStep, Parts, Sample, StepPacker, sample_levels, split, unpack_extras
from folovllm.step.schedule import SchedulerOutput, StepResult
from folovllm.worker.buckets import Bucket, buckets_for, decode_bucket, pad, padding_of
from folovllm.worker.device_tables import DeviceTables
from folovllm.worker.dry_run import one_layer_of_each_kind
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.pending_step import Computed, Verifier, result_of
from folovllm.worker.step_graph import GraphPool, GraphStore, HostRing, StepGraph
from folovllm.worker.step_sampler import StepSampler
from folovllm.worker.warm_up import small_steps

logger = logging.getLogger("folovllm")

Work = Callable[[Bucket, torch.Tensor], None]  # device work on the buffer of a step in a bucket


@dataclass(slots=True, frozen=True, eq=False)
class PendingStep:
    """A step that was started. The copy of its tokens to the host is queued."""

    step: PackedStep
    tokens: torch.Tensor  # [R] int64 in host memory; like `logprobs` and `scores` it is complete after `arrived`
    arrived: torch.cuda.Event | None
    logprobs: SampledLogprobs | None
    scores: SampledLogprobs | None
    verifier: Verifier | None

    def is_here(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.arrived is None or self.arrived.query()

    def wait(self) -> StepResult:
        """Wait for the tokens and return them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.tolist()
        if self.step.is_decode and self.logprobs is None:
            return StepResult([[token] for token in tokens], {})
        return result_of(self.step, tokens, self.logprobs, self.scores, self.verifier)


class GraphRunner:
    """Wraps a `ModelRunner`: it starts packed steps and does not wait for them.

    Steps that fit a `Bucket` are captured in three graphs: the whole step, from its buffer to its tokens; the step up to its
    logits; and the sampling of any row from there. Of steps with prompts only the model is captured. Other steps run eagerly.
    All device work is queued on one stream. So a step reads what the step before it wrote, even if the host has not seen it yet.

    A step with deferred sampling stops at its logits. The next call brings the masks of its rows, and samples.
    """

    def __init__(
        self, setup: EngineSetup, runner: ModelRunner, step_sampler: StepSampler, row_sampler: SamplerState, graphs: GraphStore,
        verifier: Verifier | None = None,
    ) -> None:  # fmt: skip
        """`step_sampler` samples for steps without filters and penalties; `row_sampler` has the state of rows and samples for all others.

        `graphs` chooses the widths of captured decode steps and keeps their graphs. Steps with drafts need a `verifier`.
        """
        rows, device = setup.max_num_seqs, setup.device
        self._setup = setup
        self.inner = runner  # runs a step that is not captured, and owns the model and the cache
        self._step_sampler = step_sampler
        self._row_sampler = row_sampler
        self._verifier = verifier
        self.buckets: list[int] = []  # widths of decode steps
        self._decodes: dict[int, Bucket] = {}  # by width
        self._others: dict[bool, list[Bucket]] = {False: [], True: []}  # by whether for drafts; small ones first
        self._tables = DeviceTables(rows, -(-setup.max_model_len // setup.block_size), setup.block_size, device)
        self._graphs = graphs
        self._other_graphs: dict[tuple[Bucket, str], StepGraph] = {}
        self._has_dry_run = device.type == "cuda" and not setup.config.compile
        # Several ranks run the work before the capture: a capture of a sum's first call was never tried on several GPUs.
        self._graph_pool = GraphPool(device, self._has_dry_run and setup.config.tensor_parallel_size == 1)
        self._late: Computed | None = None  # the step that waits for its `TokenBitmasks`
        num_samples = rows + (0 if verifier is None else verifier.num_samples)
        self._tokens = torch.zeros(num_samples, dtype=torch.int64, device=device)  # of the step
        # Results of captured steps: logits [R, V], and hidden states [R, H] of steps that are no decodes.
        self._logits = self._last_hidden = torch.empty(0)
        self._steps_in, self._tokens_out = HostRing(torch.int32, device), HostRing(torch.int64, device)

    @property
    def model(self) -> LlamaForCausalLM:
        """The model, once it is loaded."""
        return self.inner.model

    def load_model(self) -> None:
        """Build the model and load its weights. `initialize_kv_cache` allocates the buffers and captures steps."""
        self.inner.load_model()

    def forget_graphs(self) -> None:
        """Drop all captured steps, as before memory that they read is freed. `capture_again` makes them anew."""
        self._graphs = type(self._graphs)(self._setup.max_num_seqs)
        self._other_graphs.clear()
        self._others = {False: [], True: []}
        self._graph_pool = self._graph_pool.anew()

    def capture_again(self) -> None:
        """Capture the steps that `forget_graphs` dropped; none if steps are not captured."""
        if self.buckets:
            self.capture_cudagraph()

    def initialize_kv_cache(self) -> int:
        """Allocate as many blocks as fit, compile kernels and capture steps. Returns the number of blocks."""
        setup = self._setup
        captures = not setup.config.enforce_eager and self._supports_graph()
        buckets = self._wanted() if captures else []
        if captures:
            self._reserve_results(buckets)
        if self._has_dry_run:
            self.compile_at_once(captures)
        largest = max((bucket.num_tokens for bucket in buckets if not bucket.has_drafts), default=0)
        num_blocks = self.inner.fit_kv_cache(largest / setup.max_num_batched_tokens)
        if setup.device.type == "cuda" and not self._has_dry_run:  # else the dry run has run these steps
            self.compile_kernels()
        if captures:
            self.capture_cudagraph()
        self.inner.clear_counters()
        return num_blocks

    def _wanted(self) -> list[Bucket]:
        """Return the buckets to capture beside those of decodes."""
        more = [] if self._verifier is None else self._verifier.buckets()
        supported = self.inner.backend.supports_prompt_graph and not self._setup.config.compile
        return buckets_for(self._setup, more) if supported else []

    def _supports_graph(self) -> bool:
        """Return whether the attention backend can be part of a captured step."""
        supported = self.inner.backend.supports_graph(self._setup.device)
        if not supported:
            logger.warning("attention backend %s cannot be captured: decode runs eagerly", self._setup.backend)
        return supported

    def _reserve_results(self, buckets: list[Bucket]) -> None:
        """Allocate the results of captured steps, before the cache takes the free memory."""
        setup, (vocab_size, width) = self._setup, self.model.lm_head.weight.shape
        drafted = max((bucket.num_samples for bucket in buckets if bucket.has_drafts), default=0)
        most = max((bucket.num_samples for bucket in buckets), default=0)
        self._logits = torch.zeros(max(setup.max_num_seqs, drafted), vocab_size, dtype=setup.dtype, device=setup.device)
        self._last_hidden = torch.zeros(most, width, dtype=setup.dtype, device=setup.device)

    def compile_at_once(self, captures: bool) -> None:
        """Compile all kernels of the start in parallel; if `captures`, also those of the steps that will be captured.

        A kernel that the dry run misses is compiled at its first launch, for example if layers of one kind differ after all.
        """
        from folovllm.kernels.dry_run import dry_run  # here, for not every machine has Triton

        config = self._setup.config
        compiles = dry_run(self._setup.device, config.tensor_parallel_size, config.use_tqdm)
        with one_layer_of_each_kind(self.model.model), torch.inference_mode(), compiles:
            self._dry_run(captures)

    def _dry_run(self, captures: bool) -> None:
        """Run the work of the start once over a small cache: the largest step, small steps, and the work that is captured.

        The cache's scales come first, because keys with an offset need other kernels. Their values here are not used.
        """
        setup = self._setup
        if setup.config.extras.get("calculate_kv_scales"):
            load_elective(CALIBRATION, "calculate_kv_scales")(self.inner)
        self.inner.warmup_model()
        self.inner.allocate_kv_cache(-(-min(setup.max_model_len, setup.max_num_batched_tokens) // setup.block_size))
        self.compile_kernels()
        if captures:
            self._dry_run_graphs()
        self.inner.allocate_kv_cache(0)

    def _dry_run_graphs(self) -> None:
        """Run the work that will be captured."""
        for bucket in [decode_bucket(width) for width in self._graphs.widths] + self._wanted():
            for work in self._works(bucket):
                work(bucket, torch.from_numpy(padding_of(bucket, self._setup.max_num_seqs)).to(self._setup.device))

    def compile_kernels(self) -> None:
        """Run small steps eagerly, so that their kernels are compiled before the first request."""
        self.warm_up(small_steps(self._setup))
        if self._verifier is not None:
            self._verifier.warm_up(self)

    def warm_up(self, steps: Iterable[SchedulerOutput]) -> None:
        """Run steps and wait for each of them."""
        packer = StepPacker(self._setup.max_num_seqs, [])
        with torch.inference_mode():
            for output in steps:
                self._start(packer.pack(output)).wait()

    def capture_cudagraph(self) -> None:
        """Capture steps of every bucket, the widest of each kind first: all others fit into its memory.

        On a CPU a step is captured at its first use, since an earlier capture saves nothing.
        """
        self.buckets = self._graphs.widths
        self._decodes = {width: decode_bucket(width) for width in self.buckets}
        for bucket in self._wanted():
            self._others[bucket.has_drafts].append(bucket)
        if self._setup.device.type == "cuda":
            kinds = self._others[False], [*self._decodes.values()], self._others[True]
            every = [bucket for kind in kinds for bucket in kind[::-1]]
            hidden = None if self._setup.config.use_tqdm else True
            for bucket in tqdm(every, desc="Capturing graphs", disable=hidden, delay=1):
                self._capture(bucket)

    def _capture(self, bucket: Bucket) -> None:
        """Capture all graphs of a bucket, so that no later step waits for a capture."""
        for work in self._works(bucket):
            self._graph(bucket, work)

    def _works(self, bucket: Bucket) -> tuple[Work, ...]:
        """Return the kinds of work that are captured for a bucket."""
        if bucket.is_decode:
            return self._decode, self._forward, self._sample_decode
        if bucket.has_drafts:
            return self._verify, self._forward, self._sample_drafts
        return (self._forward,)

    def _graph(self, bucket: Bucket, work: Work) -> StepGraph:
        """Return the graph of `work` in a bucket. If none is kept, capture it with padding alone."""

        def capture() -> StepGraph:
            return self._graph_pool.capture(padding_of(bucket, self._setup.max_num_seqs), partial(work, bucket))

        if not bucket.num_others:  # decodes alone
            return self._graphs.get(bucket.num_decodes, work.__name__, capture)
        key = bucket, work.__name__
        if key not in self._other_graphs:
            self._other_graphs[key] = capture()
        return self._other_graphs[key]

    def execute_model(self, step: PackedStep | TokenBitmasks) -> PendingStep | None:
        """Start a packed step, or sample for the step that waits for masks. The host does not wait.

        Returns None for a step with deferred sampling.
        """
        if isinstance(step, TokenBitmasks):
            assert self._late is not None, "no step waits for masks"
            computed, self._late = self._late, None
            self._sample(computed, step)
            return self._sent(computed)
        if not step.extras.size or self.inner.states is None:
            return self._begin(step)
        extras, rows = unpack_extras(step.extras), step.fields[Field.ROW]
        self.inner.states.load(extras, rows)
        pending = self._begin(step)
        self.inner.states.save(extras, rows)
        return pending

    def _begin(self, step: PackedStep) -> PendingStep | None:
        """Start a step, up to its logits if its masks come later."""
        if not step.defers_sampling:
            return self._start(step)
        self._late = self._compute(step, self._bucket_of(step))
        return None

    def _start(self, step: PackedStep) -> PendingStep:
        """Start a step that computes and samples at once."""
        bucket = self._bucket_of(step)
        if bucket is not None:
            if step.is_decode and not step.is_special:
                return self._sent(self._replay(step, bucket, self._decode))
            if step.has_drafts and not step.has_memory:
                return self._sent(self._replay(step, bucket, self._verify))
        computed = self._compute(step, bucket)
        self._sample(computed, None)
        return self._sent(computed)

    def _bucket_of(self, step: PackedStep) -> Bucket | None:
        """Return the smallest captured bucket that holds a step.

        It is None if no bucket does, if prompt tokens are scored, or if the step has drafts and rows with new sequences.
        """
        if step.is_decode:
            return self._decodes[step.fields.shape[1]]
        if step.scores.size or (step.has_drafts and step.sampling_updates.num_rows):
            return None
        return next((bucket for bucket in self._others[step.has_drafts] if bucket.holds(step)), None)

    def _replay(self, step: PackedStep, bucket: Bucket, work: Work) -> Computed:
        """Replay the captured `work` on a step."""
        numbers = step.fields.ravel() if step.is_decode else pad(step, bucket, self._setup.max_num_seqs)
        self._graph(bucket, work).replay(self._steps_in.stage(numbers))
        self._steps_in.mark()
        return Computed(step, self._logits[: step.num_samples], bucket=bucket)

    def _sent(self, computed: Computed) -> PendingStep:
        """Queue the copies of a step's tokens and log-probabilities to the host."""
        step = computed.step
        logprobs = self._gather_logprobs(computed.logits, step) if step.logprobs.size else None
        tokens, arrived = self._tokens_out.to_host(self._tokens[: step.num_samples])
        return PendingStep(step, tokens, arrived, logprobs, computed.scores, self._verifier)

    def _decode(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        """Run a whole decode step without filters and penalties, from its buffer to its tokens. This work is captured."""
        self._forward(bucket, numbers)
        self._one_pass(self._logits[: bucket.num_decodes], split(numbers, bucket.columns).fields)

    def _verify(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        """Run a whole step with drafts. This work is captured."""
        self._forward(bucket, numbers)
        self._sample_drafts(bucket, numbers)

    def _forward(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        """Run a step up to its logits, or with prompts up to its hidden states. This work is captured."""
        parts, longest = split(numbers, bucket.columns), self._setup.max_model_len
        if bucket.is_decode:
            batch = self._tables.unpack_decode(parts.fields, longest)
            self.inner.forward(batch, out=self._logits[: bucket.num_decodes])
            return
        if bucket.has_drafts:
            self._tables.enter_blocks(parts.updates)
            self._resolve(parts.tokens)
        batch = self._tables.unpack(parts, bucket.num_decodes, bucket.num_tokens, longest, None)
        batch.is_padded, batch.has_drafts = True, bucket.has_drafts
        last = self._last_hidden[: bucket.num_samples]
        torch.index_select(self.inner.forward_hidden(batch), 0, batch.logits_indices, out=last)
        if bucket.has_drafts:
            self.model.lm_head(last, self._logits[: bucket.num_samples])

    def _compute(self, step: PackedStep, bucket: Bucket | None) -> Computed:
        """Run any step up to its logits. It also queues the copy of prompts' log-probabilities to the host."""
        if bucket is not None and (step.is_decode or step.has_drafts):
            return self._replay(step, bucket, self._forward)
        parts, padded = self._upload(step, bucket)
        if bucket is not None:
            self._graph(bucket, self._forward).replay(padded)
            return Computed(step, self.model.lm_head(self._last_hidden[: step.num_samples]), parts.samples)
        logits, scores = self._compute_eagerly(step, parts)
        return Computed(step, logits, parts.samples, scores)

    def _upload(self, step: PackedStep, bucket: Bucket | None) -> tuple[Parts[torch.Tensor], torch.Tensor]:
        """Copy a step's buffer, and its padded buffer in `bucket`, to the device. Returns the step's parts and the padded buffer.

        It also enters new blocks and the sampling state of new rows, and resolves placeholder ids.
        """
        flat = step.flatten()
        padded = flat[:0] if bucket is None else pad(step, bucket, self._setup.max_num_seqs)
        buffer, more = self._steps_in.to_device(np.concatenate([flat, padded])).tensor_split([len(flat)])
        parts = split(buffer, step.columns)
        if (new := step.sampling_updates).num_rows:
            self._row_sampler.set_rows(parts.sampling_updates, new.num_rows, new.num_with_line)
        if step.updates.size:
            self._tables.enter_blocks(parts.updates)
        if step.has_drafts:
            self._resolve(parts.tokens)
        return parts, more

    def _resolve(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32."""
        if self._verifier is not None:
            self._verifier.resolve_on_device(tokens)

    def _compute_eagerly(
        self, step: PackedStep, parts: Parts[torch.Tensor]
    ) -> tuple[torch.Tensor, SampledLogprobs | None]:
        """Run the model eagerly on a step that is not captured. Returns its logits, and the log-probabilities of prompts if wanted."""
        if step.num_samples > len(self._tokens):
            raise RuntimeError(f"a step samples {step.num_samples} tokens, and there is room for {len(self._tokens)}")
        host = step.fields
        longest, most = int(host[Field.QUERY_LEN].max()), int(host[Field.SEQ_LEN].max())
        batch = self._tables.unpack(parts, step.num_decodes, longest, most, host)
        batch.logits_indices = batch.logits_indices.long()
        batch.only_last = not (step.scores.size or step.has_drafts)
        hidden = self.inner.forward_hidden(batch)
        logits = self.model.compute_logits(hidden, batch)
        if not step.scores.size:
            return logits, None
        after, tokens = parts.scores[1:3].long()
        logits_after, k = partial(self.inner.logits_after, hidden, batch), int(step.scores[3].max())
        found = score(logits_after, after, tokens, k, self._setup.vocab_size)
        return logits, found.to_host(non_blocking=True)

    def _sample(self, computed: Computed, masks: TokenBitmasks | None) -> None:
        """Sample for a step that has its logits, with its `masks` if it has any."""
        step, samples = computed.step, computed.samples
        if masks is not None:
            self._set_masks(step, masks)
        if step.has_drafts and step.has_memory:
            self._sample_levels(computed)
        elif samples is None:
            assert computed.bucket is not None
            self._replay(step, computed.bucket, self._sample_decode if step.is_decode else self._sample_drafts)
        elif not step.is_special and masks is None:
            self._one_pass(computed.logits, samples)
        elif step.has_drafts:
            self._sample_all(computed.logits, samples)
        else:
            self._sample_rows(computed.logits, samples)

    def _set_masks(self, step: PackedStep, masks: TokenBitmasks) -> None:
        """Copy the masks of a step's samples to the device."""
        places = masks.places(step.fields[Field.ROW, : step.num_seqs] if step.is_decode else step.samples[Sample.ROW])
        numbers = self._steps_in.to_device(np.concatenate([places.astype(np.int32), masks.bits.ravel()]))
        samples, bits = numbers.tensor_split([len(places)])
        self._row_sampler.set_masks(samples, bits.view(masks.bits.shape))

    def _sample_decode(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        """Sample for any rows of a decode step that has its logits. This work is captured."""
        self._sample_rows(self._logits[: bucket.num_decodes], split(numbers, bucket.columns).fields)

    def _one_pass(self, logits: torch.Tensor, samples: torch.Tensor, out: torch.Tensor | None = None) -> None:
        """Sample a token for each row of `logits` without filters and penalties, into `out` and the table of last tokens."""
        self._step_sampler.one_pass(logits, samples, self._tokens if out is None else out, self._tables.last_token)

    def _sample_rows(self, logits: torch.Tensor, samples: torch.Tensor, out: torch.Tensor | None = None) -> None:
        """Sample a token for each row of `logits` with its filters and penalties, and record it. A row has one sample."""
        logits, rows, positions = self._step_sampler.full_logits(logits), samples[Sample.ROW], samples[Sample.POSITION]
        out = self._tokens if out is None else out
        tokens = self._row_sampler.sample(logits, rows, positions, out, self._tables.last_token)
        self._row_sampler.record(tokens, rows, positions, samples[Sample.COUNTS])

    # --- drafts: a row has several samples, and no step begins before the host knows which of them are accepted ---

    def _sample_drafts(self, bucket: Bucket, numbers: torch.Tensor) -> None:
        """Sample for a step with drafts that has its logits. This work is captured."""
        self._sample_all(self._logits[: bucket.num_samples], split(numbers, bucket.columns).samples)

    def _sample_all(self, logits: torch.Tensor, samples: torch.Tensor) -> None:
        """Sample from the logits [R, V] of all samples at once, without recording the tokens. Device work only."""
        rows, positions = samples[Sample.ROW], samples[Sample.POSITION]
        self._row_sampler.sample(self._step_sampler.full_logits(logits), rows, positions, self._tokens)

    def _sample_levels(self, computed: Computed) -> None:
        """Sample level by level: the first sample of each sequence, then the second ones, and so on.

        So penalties and bad words see all tokens before a sample. Tokens after a rejected draft token are not recorded.
        """
        step, samples, logits = computed.step, computed.samples, self._step_sampler.full_logits(computed.logits)
        if samples is None:
            samples = self._steps_in.to_device(step.samples.ravel()).view(step.samples.shape)
        self._resolve(samples[Sample.DRAFT])
        right = torch.ones(step.num_seqs, dtype=torch.int32, device=logits.device)
        for at in sample_levels(step.samples):
            index = self._steps_in.to_device(at.astype(np.int32)).long()
            these = samples[:, index]
            rows, positions, of = these[Sample.ROW], these[Sample.POSITION], these[Sample.SEQUENCE].long()
            sampled = self._row_sampler.sample(logits[index], rows, positions, masks=self._row_sampler.masks[index])
            self._tokens[index] = sampled
            self._row_sampler.record(sampled, rows, positions, right[of])
            right[of] &= (sampled == these[Sample.DRAFT]).int()

    def _gather_logprobs(self, logits: torch.Tensor, step: PackedStep) -> SampledLogprobs:
        """Queue the copy of log-probabilities to the host, for the samples whose requests want them."""
        index, count = step.logprobs
        at = self._steps_in.to_device(index).long()
        found = gather_logprobs(self._step_sampler.full_logits(logits[at]), self._tokens[at], int(count.max()))
        return found.to_host(non_blocking=True)
