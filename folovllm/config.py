"""`EngineConfig`: every choice of the engine in one validated dataclass, and the six milestones as presets of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from folovllm import plugins
from folovllm.engine.require import ABOVE_0, Limits, check_fields, require

DEFAULT_MODEL = "stories-5m"  # embedded in the package
DEFAULT_MAX_MODEL_LEN = 4096

REUSE = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
# A milestone is a preset of options; the options select the classes (`folovllm.build`).
PRESETS: dict[str, dict[str, Any]] = {
    "m1": {"model_impl": "hf", "kv_cache": "growing", "max_num_seqs": 1},
    "m2": {"kv_cache": "slots", "attention_backend": "torch_naive", "max_num_seqs": 16},
    "m3": {"kv_cache": "paged", "attention_backend": "torch_paged"},
    "m4": {"kv_cache": "paged"},
    "m5": {"kv_cache": "paged", **REUSE},
    "m6": {"kv_cache": "paged", **REUSE, "enforce_eager": False, "async_scheduling": True},
}
LATEST = "m6"

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "model_impl": ("hf", "native"),
    "kv_cache": ("growing", "slots", "paged"),
    "scheduling": ("fcfs", "priority"),
}
LIMITS = {  # of numbers; others are counts of at least 1
    "seed": Limits(0, works="between 0 and 2**63 - 1"),
    "max_model_len": Limits(2, works="at least 2"),  # a token of the prompt and one of the answer
    "long_prefill_token_threshold": Limits(0, works="at least 0"),
    "max_logprobs": Limits(0, works="at least 0"),
    "gpu_memory_utilization": Limits(ABOVE_0, 1, "above 0 and at most 1"),
}
DEFAULTS = {  # of what a preset may leave open
    "model_impl": "native",
    "max_num_seqs": 256,
    "kv_cache": "paged",
    "attention_backend": "auto",
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "enforce_eager": True,
    "async_scheduling": False,
}

OTHER_NAMES = {"half": "float16", "float": "float32"}  # of dtypes


@dataclass(slots=True, init=False)
class EngineConfig:
    """What to run and how; each field, and each option of an elective, is a keyword of `LLM` and a flag of the command line.

    Attributes:
        model: a local directory or GGUF file, a hub id, or one of the names "stories-5m", "stories-moe" and
            "stories-hybrid" (embedded), "smollm2" and "smollm2-gguf" (downloaded).
        tokenizer: a directory or hub id with another tokenizer than the model's own.
        milestone: "m1" to "m6": the preset for whatever is not said here; if left out, the latest.
        model_impl: "hf" runs transformers' model, "native" ours.
        kv_cache: "growing" (one request at a time, cache by concatenation), "slots" (M2: a contiguous
            region of `max_model_len` tokens for each sequence) or "paged".
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, the checkpoint's own on a GPU.
        device: "cuda" or "cpu"; if left out, CUDA where there is one.
        seed: the seed of the engine's own noise (requests without a seed, random weights).
        max_model_len: longest prompt plus answer, in tokens; if left out, the smaller of the model's and 4,096.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; if left out, at least one whole prompt fits.
        block_size: tokens a block holds; if left out, the smallest from 16 up that the attention backend accepts.
        num_kv_blocks: blocks of the KV cache, instead of measuring how many fit.
        gpu_memory_utilization: fraction of the card's memory that the engine may fill.
        kv_cache_memory: bytes of the KV cache on a CPU.
        attention_backend: "torch_naive", "torch_paged", "triton", "flash_attn", or "auto": the fastest that runs here.
        scheduling: "fcfs" (first come, first served) or "priority" (smaller first).
        enable_prefix_caching: find the K/V of prefixes that were computed before.
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
        trust_remote_code: run code that comes with a checkpoint. Off unless asked for.
        random_weights: make weights up instead of loading them (for timing a geometry).
        use_tqdm: show progress while loading (and, on the command line, while answering).
        builders: components of your own instead of the engine's, by name and separated by commas: "block_manager" is
            `BlockManager` in mine/folovllm/learn/builders/block_manager.py.
        extras: the options of electives (`folovllm.plugins`), where they are not the defaults.

    Raises ValueError if a value is out of range, or two do not fit together.
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
    attention_backend: str | None = None
    scheduling: str = "fcfs"
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    enforce_eager: bool | None = None
    async_scheduling: bool | None = None
    compile: bool = False
    num_threads: int | None = None
    max_n: int = 128
    max_logprobs: int = 20
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    random_weights: bool = False
    use_tqdm: bool = True
    builders: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict, metadata={"flag": False})  # `apps.cli` makes none

    def __init__(self, **given: Any) -> None:
        """Takes the fields by name, electives' options (none at M1), and those arguments of vLLM's that change nothing."""
        own = {each.name: each for each in fields(self)}
        options: list[plugins.Options] = []
        extras = dict(given.pop("extras", {}))
        if extras or not given.keys() <= own.keys():
            options = plugins.options_of(own.keys(), given, extras)  # moves electives' options from `given` to `extras`
        given["extras"] = extras
        for name, field_ in own.items():
            setattr(self, name, given.get(name, field_.default))
        self._resolve()
        for each in options:
            each.check(self)

    def _resolve(self) -> None:
        """Take the preset for what is not said, and check all."""
        dtype = str(self.dtype).removeprefix("torch.")  # a torch.dtype is taken too
        self.dtype = OTHER_NAMES.get(dtype, dtype)
        check_values(self)
        preset = PRESETS.get(LATEST if self.milestone is None else self.milestone)
        if preset is None:
            raise ValueError(f"unknown milestone {self.milestone!r}: choose one of {', '.join(PRESETS)}")
        if self.attention_backend == "torch_naive":  # M1 with it: our layers, for transformers' model attends by itself
            preset = {**preset, "model_impl": "native"}
        for name, value in {**DEFAULTS, **preset}.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        check_combinations(self)

    def __getattr__(self, name: str) -> Any:
        """The value of an option that an elective owns, so `config.batch_invariant` works. The core reads `extras`."""
        if name == "extras" or name.startswith("_"):
            raise AttributeError(name)
        return self.extras[name] if name in self.extras else plugins.option_default(name)

    @staticmethod
    def options() -> list[Any]:  # whose fields are flags, too (`apps.cli.flags`)
        return list(plugins.option_classes())

    @classmethod
    def for_milestone(cls, milestone: str, **overrides: Any) -> EngineConfig:
        return cls(milestone=milestone, **overrides)

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
            says = f"exceeds the model's context of {model_limit} tokens: lower it"
            raise ValueError(f"max_model_len {self.max_model_len} {says}")
        return self.max_model_len

    def resolve_max_num_batched_tokens(self, max_model_len: int) -> int:
        """The token budget of a step. Unless prompts come in chunks, the longest must fit."""
        budget = self.max_num_batched_tokens
        if budget is None:
            return 8192 if self.enable_chunked_prefill else max(max_model_len, 8192)
        if budget < max_model_len and not self.enable_chunked_prefill:
            is_small = f"max_num_batched_tokens {budget} is below max_model_len {max_model_len}"
            says = "so the longest prompt could never be computed in one step: raise it, lower max_model_len, or set"
            raise ValueError(f"{is_small}, {says} enable_chunked_prefill")
        return budget


def check_values(config: EngineConfig) -> None:
    values = {own.name: getattr(config, own.name) for own in fields(config)}
    check_fields(EngineConfig, values, LIMITS)
    for name in ("milestone", "tokenizer", "device", "attention_backend", "builders"):
        require(values[name] != "", f"{name} is an empty text: give a name, or leave it out")
    for name, known in CHOICES.items():
        value, says = values[name], f"choose one of {', '.join(known)}"
        require(value in known or (value is None and name in DEFAULTS), f"unknown {name} {value!r}: {says}")


def check_combinations(config: EngineConfig) -> None:
    """Raise ValueError for two choices that do not fit together."""
    growing, unpaged, hf = config.kv_cache == "growing", config.kv_cache != "paged", config.model_impl == "hf"
    fcfs, batches, prefixes = config.scheduling == "fcfs", config.max_num_seqs != 1, config.enable_prefix_caching
    attends = config.attention_backend == "auto" or (config.attention_backend == "torch_naive" and not hf)
    m2, packed = 'or use milestone="m2"', "CUDA graphs, async_scheduling and tensor_parallel_size need"
    rules = (
        (hf and not growing, 'model_impl="hf" keeps its own growing cache: use milestone="m1", or model_impl="native"'),
        (growing and not fcfs, f'kv_cache="growing" serves in the order of arrival: leave scheduling at "fcfs", {m2}'),
        (growing and batches, f'kv_cache="growing" serves one request at a time: leave max_num_seqs at 1, {m2}'),
        (
            growing and not attends,
            'kv_cache="growing" attends naively with our layers, and in its own way with those of transformers: leave '
            f'attention_backend out, take "torch_naive" and model_impl="native", {m2}',
        ),
        (unpaged and prefixes, 'enable_prefix_caching needs blocks: kv_cache="paged", as from milestone m3 on'),
        (growing and config.enable_chunked_prefill, "enable_chunked_prefill needs batches: take milestone m2 or later"),
        (unpaged and config.packed_steps, f'{packed} kv_cache="paged", as from milestone m3 on'),
        (hf and config.compile, 'compile needs model_impl="native": it is our layers that are compiled'),
        (hf and config.random_weights, 'random_weights needs model_impl="native"'),
    )
    for is_wrong, sentence in rules:
        require(not is_wrong, sentence)
    if config.builder_names:
        from folovllm.learn import builders  # here, for few engines have any

        for name in config.builder_names:
            builders.require_place(name, config)


EngineArgs = EngineConfig  # vLLM's name
