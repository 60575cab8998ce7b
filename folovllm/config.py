"""`EngineConfig`: every choice of the engine in one validated dataclass, and the six milestones as presets of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import Any

from folovllm import plugins
from folovllm.require import ENGINE, also_takes, is_whole

DEFAULT_MODEL = "stories-5m"  # embedded in the package
DEFAULT_MAX_MODEL_LEN = 4096

# A milestone is a preset of options; the options select the classes (`folovllm.build`).
PRESETS: dict[str, dict[str, Any]] = {
    "m1": {"model_impl": "hf", "kv_cache": "growing", "max_num_seqs": 1},
    "m2": {"kv_cache": "slots", "attention_backend": "torch_naive", "max_num_seqs": 16},
    "m3": {"kv_cache": "paged", "attention_backend": "torch_paged"},
    "m4": {"kv_cache": "paged"},
    "m5": {"kv_cache": "paged", "enable_prefix_caching": True, "enable_chunked_prefill": True},
    "m6": {
        "kv_cache": "paged",
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "enforce_eager": False,
        "async_scheduling": True,
    },
}
LATEST = "m6"

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "model_impl": ("hf", "native"),
    "kv_cache": ("growing", "slots", "paged"),
    "scheduling": ("fcfs", "priority"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
}
KINDS = {"str": (str, "a text"), "bool": (bool, "True or False"), "float": (Real, "a number")}  # by annotation
# None: the engine decides
MAY_BE_OPEN = ("max_model_len", "max_num_batched_tokens", "block_size", "num_kv_blocks", "num_threads", "num_snapshots")
# the least values, where they are not 1; max_model_len: a token of the prompt and one of the answer
LEAST = {"long_prefill_token_threshold": 0, "max_logprobs": 0, "max_model_len": 2}
COUNTS = (
    *MAY_BE_OPEN, "max_num_seqs", "kv_cache_memory", "tensor_parallel_size", "long_prefill_token_threshold", "max_n",
    "max_logprobs", "snapshot_interval",
)  # fmt: skip

OTHER_NAMES = {"half": "float16", "float": "float32", "fp8": "fp8_e4m3"}  # of dtypes


@also_takes(ENGINE)
@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """What to run and how; each field is also a keyword of `LLM` and a flag of the command line.

    Other engine arguments of vLLM's are accepted where they change nothing; elsewhere a ValueError says why not.

    Attributes:
        model: a local directory or GGUF file, a hub id, or one of the names "stories-5m", "stories-moe" and
            "stories-hybrid" (embedded), "smollm2" and "smollm2-gguf" (downloaded).
        tokenizer: a directory or hub id with another tokenizer than the model's own.
        milestone: "m1" to "m6": the preset for whatever is not said here; if left out, the latest.
        model_impl: "hf" runs transformers' model, "native" ours.
        kv_cache: "growing" (one request at a time, cache by concatenation), "slots" (a contiguous block of
            `max_model_len` tokens per sequence) or "paged".
        dtype: "float32" (or "float"), "bfloat16", "float16" (or "half"), or "auto": float32 on a CPU, the checkpoint's own
            on a GPU.
        device: "cuda" or "cpu"; if left out, CUDA where there is one.
        seed: the seed of the engine's own noise (requests without a seed, random weights).
        max_model_len: longest prompt plus answer, in tokens; if left out, the smaller of the model's and 4,096.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; if left out, at least one whole prompt fits.
        block_size: tokens a block holds; if left out, the smallest from 16 up that the attention backend accepts.
        num_kv_blocks: blocks of the KV cache, instead of measuring how many fit; at least what a sequence of
            `max_model_len` needs.
        gpu_memory_utilization: fraction of the card's memory that the engine may fill.
        kv_cache_memory: bytes of the KV cache on a CPU.
        kv_cache_dtype: "auto" is the model's own; "fp8_e4m3" (or "fp8") keeps K/V in 8 bits, half of what 16 bits take.
        calculate_kv_scales: choose the scales of K/V in 8 bits by running made-up tokens, instead of taking the
            checkpoint's, or 1.
        attention_backend: "torch_naive", "torch_paged", "triton", "flash_attn", or "auto": the fastest that runs here. Two
            names with a comma between them are for prefill and for decode.
        scheduling: "fcfs" (first come, first served) or "priority" (smaller first).
        enable_prefix_caching: find the K/V of prefixes that were computed before.
        snapshot_interval: with prefix caching, in a model with layers of linear attention: keep a snapshot of a sequence's
            state every so many tokens, rounded up to whole blocks. A prefix is found up to its last snapshot.
        num_snapshots: the most snapshots that are kept; if left out, `max_num_seqs`, at least 16. Each takes as much memory as the state
            of a sequence.
        enable_chunked_prefill: compute long prompts over several steps, beside the decodes of others.
        long_prefill_token_threshold: most tokens of one prompt in one step; 0 sets no bound.
        enforce_eager: no CUDA graphs.
        async_scheduling: schedule a step while the one before it runs.
        compile: put element-wise layers and sampling through torch.compile instead of our kernels.
        num_threads: threads of torch, in the whole process; ranks divide them. If left out on a CPU: one for a small model,
            else as many as a short measurement shows to be of use, at most `OMP_NUM_THREADS`.
        max_n: most answers to one prompt that a request may ask for.
        max_logprobs: most likely tokens, beside the chosen one, whose log-probabilities a request may ask for.
        tensor_parallel_size: GPUs (or, on CPU, processes) that share each layer.
        enable_expert_parallel: in a mixture of experts, each of these GPUs holds some experts whole, not a part of each.
        count_experts: in a mixture of experts, count the tokens routed to each expert, for `/metrics` and `--show-steps`.
        trust_remote_code: run code that comes with a checkpoint. Off unless asked for.
        random_weights: make weights up instead of loading them (for timing a geometry).
        quantization: how the weights are kept, which a checkpoint says by itself: "fp8", "compressed-tensors", "gptq", "awq".
            With `random_weights` the kind to make up: "fp8" (in blocks of 128 x 128), "int8" (a scale for each output) or
            "int4" (one for each 128 inputs of an output).
        quantize_activations: of a model with weights in FP8, multiply FP8 by FP8: faster for many sequences, slower for one,
            and less exact. Needs compute capability 8.9, with weights in blocks exactly 9.0 and CUDA 12.9; elsewhere it is
            less exact and slower.
        use_tqdm: show progress while loading (and, on the command line, while answering).
        speculative_config: how draft tokens are proposed, as a dict with vLLM's keys, or one in JSON, such as
            {"method": "draft_model", "model": "stories-draft"}; see `SpeculativeConfig`.
        speculative_method: the method alone: "ngram", "suffix", or several joined by "+", which are asked in turn
            ("ngram+suffix"). "draft_model" needs a model, which only the configuration above can name.
        num_speculative_tokens: the most draft tokens that a step verifies for one sequence.
        batch_invariant: compute each request with the same bits whatever else is in the batch. It is slower.
        builders: components of your own instead of the engine's, by name and separated by commas: "block_manager" is
            `BlockManager` in mine/folovllm/builders/block_manager.py.

    Raises:
        ValueError: a value is out of range or two do not fit together; the sentence says what does.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    milestone: str | None = None
    model_impl: str | None = None
    kv_cache: str | None = None
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int = 1 << 30
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False
    attention_backend: str | None = None
    scheduling: str = "fcfs"
    enable_prefix_caching: bool | None = None
    snapshot_interval: int = 512
    num_snapshots: int | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    enforce_eager: bool | None = None
    async_scheduling: bool | None = None
    compile: bool = False
    num_threads: int | None = None
    max_n: int = 128
    max_logprobs: int = 20
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    count_experts: bool = False
    trust_remote_code: bool = False
    random_weights: bool = False
    quantization: str | None = None
    quantize_activations: bool = False
    use_tqdm: bool = True
    speculative_config: Any = field(default=None, metadata={"flag_type": str})  # as it comes; `spec_decode` parses it
    speculative_method: str | None = None
    num_speculative_tokens: int | None = None
    batch_invariant: bool = False
    builders: str | None = None

    def __post_init__(self) -> None:
        name = str(self.dtype).removeprefix("torch.")  # a torch.dtype is taken too
        self.dtype = OTHER_NAMES.get(name, name)
        self.kv_cache_dtype = OTHER_NAMES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        self._gather_speculation()
        check_kinds(self)
        preset = PRESETS.get(self.milestone or LATEST)
        if preset is None:
            raise ValueError(f"unknown milestone {self.milestone!r}: choose one of {', '.join(PRESETS)}")
        defaults = {
            "model_impl": "native",
            "max_num_seqs": 256,
            "attention_backend": "auto",
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "enforce_eager": True,
            "async_scheduling": False,
        }
        if self.attention_backend == "torch_naive":  # M1 with it: our layers, for transformers' model attends by itself
            preset = {**preset, "model_impl": "native"}
        for name, value in {**defaults, **preset}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        check_values(self)
        check_combinations(self)

    @classmethod
    def for_milestone(cls, milestone: str, **overrides: Any) -> EngineConfig:
        """The preset of one milestone, with single choices changed."""
        return cls(milestone=milestone, **overrides)

    def _gather_speculation(self) -> None:
        """Let the elective that owns these three fields make one of them. It stays None if all three are None."""
        if (self.speculative_config, self.speculative_method, self.num_speculative_tokens) != (None, None, None):
            gather = plugins.require(plugins.SPECULATION, "speculative decoding")
            self.speculative_config = gather(
                self.speculative_config, self.speculative_method, self.num_speculative_tokens
            )
            self.speculative_method = self.num_speculative_tokens = None

    @property
    def packed_steps(self) -> bool:
        """Whether a step travels to the device as one buffer, which graphs, overlap and several ranks build on."""
        return self.async_scheduling is True or self.enforce_eager is False or self.tensor_parallel_size > 1

    @property
    def builder_names(self) -> tuple[str, ...]:
        """The names in `builders`, which are separated by commas."""
        return tuple(name.strip() for name in (self.builders or "").split(",") if name.strip())

    def resolve_max_model_len(self, model_limit: int) -> int:
        """The context in tokens, given the model's own limit."""
        if self.max_model_len is None:
            return min(model_limit, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > model_limit:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the model's context of {model_limit} tokens: lower it"
            )
        return self.max_model_len

    def resolve_max_num_batched_tokens(self, max_model_len: int) -> int:
        """The token budget of a step. Unless prompts come in chunks, the longest must fit."""
        budget = self.max_num_batched_tokens
        if budget is None:
            return 8192 if self.enable_chunked_prefill else max(max_model_len, 8192)
        if budget < max_model_len and not self.enable_chunked_prefill:
            raise ValueError(
                f"max_num_batched_tokens {budget} is below max_model_len {max_model_len}, so the longest prompt could "
                "never be computed in one step: raise it, lower max_model_len, or set enable_chunked_prefill"
            )
        return budget


def check_kinds(config: EngineConfig) -> None:
    """Raise ValueError if a text, switch or fraction has another type: any text would count as True. Whole numbers: `check_values`."""
    for own in fields(config):
        kind, _, may_be_open = str(own.type).partition(" | ")
        value, (types, says) = getattr(config, own.name), KINDS.get(kind, (object, ""))
        if not isinstance(value, types) and not (value is None and may_be_open):
            raise ValueError(f"{own.name} must be {says}, not {value!r}")


def check_values(config: EngineConfig) -> None:
    """Raise ValueError for a value out of range."""
    for name, known in CHOICES.items():
        if (value := getattr(config, name)) not in known:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
    for name in COUNTS:
        value, least = getattr(config, name), LEAST.get(name, 1)
        if value is None and name in MAY_BE_OPEN:
            continue
        if not (is_whole(value) and value >= least):
            raise ValueError(f"{name} must be at least {least} (a whole number), not {value!r}")
    if not is_whole(config.seed) or not 0 <= config.seed < 2**63:
        raise ValueError(f"seed must be a whole number between 0 and 2**63 - 1, not {config.seed!r}")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {config.gpu_memory_utilization}")


def check_combinations(config: EngineConfig) -> None:
    """Raise ValueError for two choices that do not fit together; the sentence says what does."""
    if config.model_impl == "hf" and config.kv_cache != "growing":
        raise ValueError('model_impl="hf" keeps its own growing cache: use milestone="m1", or model_impl="native"')
    if config.kv_cache == "growing" and config.scheduling != "fcfs":
        raise ValueError(
            'kv_cache="growing" serves in the order of arrival: leave scheduling at "fcfs", or use milestone="m2"'
        )
    if config.kv_cache == "growing" and config.max_num_seqs != 1:
        raise ValueError(
            'kv_cache="growing" serves one request at a time: leave max_num_seqs at 1, or use milestone="m2"'
        )
    if config.kv_cache == "growing" and config.kv_cache_dtype != "auto":
        raise ValueError(
            'kv_cache="growing" keeps K/V in the dtype of the model: leave kv_cache_dtype out, or use milestone="m2"'
        )
    if config.calculate_kv_scales and config.kv_cache_dtype == "auto":
        raise ValueError('calculate_kv_scales is of use with kv_cache_dtype="fp8_e4m3" only')
    if config.enable_prefix_caching and config.kv_cache != "paged":
        raise ValueError('enable_prefix_caching needs blocks: kv_cache="paged", as from milestone m3 on')
    if config.enable_chunked_prefill and config.kv_cache == "growing":
        raise ValueError("enable_chunked_prefill needs batches: take milestone m2 or later")
    if config.packed_steps and config.kv_cache != "paged":
        raise ValueError(
            'CUDA graphs, async_scheduling and tensor_parallel_size need kv_cache="paged", as from milestone m3 on'
        )
    if config.compile and config.model_impl == "hf":
        raise ValueError('compile needs model_impl="native": it is our layers that are compiled')
    if config.random_weights and config.model_impl == "hf":
        raise ValueError('random_weights needs model_impl="native"')
    if config.quantize_activations and config.model_impl == "hf":
        raise ValueError('quantize_activations needs model_impl="native"')
    if config.count_experts and config.kv_cache == "growing":
        raise ValueError("count_experts needs batches: take milestone m2 or later")
    if config.speculative_config is not None and config.kv_cache == "growing":
        raise ValueError("speculative_config needs steps of several tokens: take milestone m2 or later")
    if config.speculative_config is not None and "scheduler" in config.builder_names:
        raise ValueError("speculative_config needs the engine's own scheduler: leave it out of builders")
    if config.builder_names:
        from folovllm import builders  # here, for few engines have any

        for name in config.builder_names:
            builders.require_place(name, config)


EngineArgs = EngineConfig  # vLLM's name


@dataclass(slots=True)
class ModelConfig:
    """The fields of the model alone, for code that keeps them apart from the engine's arguments."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False

    def for_engine(self, **overrides: Any) -> EngineConfig:
        """The whole configuration: the latest milestone's, with `overrides`."""
        return EngineConfig(**{**asdict(self), **overrides})
