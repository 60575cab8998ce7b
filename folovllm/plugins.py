"""The one table of electives: what the core may load of each, by strings, and what turns it on.

The core names an elective here and nowhere else (`tests/project/test_floors.py`). A module is imported when its hook is asked
for, and each package may be missing: then a hook does nothing, or says which package is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import Field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

from folovllm.engine.require import check_fields

# Parts of an engine: by the option that asks for them, where their `engine.extension.Extension` is.
EXTENSIONS = {
    "speculative_config": "folovllm.electives.spec_decode.extension:SpeculativeDecoding",
    "batch_invariant": "folovllm.electives.rollouts.extension:BatchInvariance",
}
# What brings K/V from elsewhere, likewise: functions of (setup, executor, kv) that make a `cache.connector:KVConnector`.
CONNECTORS = {"kv_offload": "folovllm.electives.kv_transfer.offload:OffloadConnector"}
# Keywords of `EngineConfig` that electives own: dataclasses of them (`Options`).
OPTIONS = (
    "folovllm.electives.quantization.options:QuantizationOptions",
    "folovllm.electives.spec_decode.options:SpeculationOptions",
    "folovllm.electives.moe.options:ExpertOptions",
    "folovllm.electives.hybrid.options:HybridOptions",
    "folovllm.electives.rollouts.options:RolloutOptions",
    "folovllm.electives.kv_transfer.options:TransferOptions",
)
# Structured output (X1): a module with `add_grammar(engine, sequences)`, for a request that asks for it, and `manager_of(engine)`.
STRUCTURED_OUTPUT = "folovllm.electives.structured_output.masked_executor"
# ... and what makes its parameters of what a user passes, or raises ValueError.
STRUCTURED_PARAMS = "folovllm.electives.structured_output.params:as_params"
# Modules with commands: each has `add_to(app)`.
COMMANDS = (
    "folovllm.electives.server.cli",
    "folovllm.electives.kv_transfer.cli",
    "folovllm.apps.inspector.cli",
    "folovllm.electives.quantization.quantizer.cli",
    "folovllm.electives.rollouts.cli",
    "folovllm.apps.bench.cli",
)

# Quantization (X2): a `folovllm.models.quantization:Quantization`.
QUANTIZATION = "folovllm.electives.quantization.config:CheckpointQuantization"
# Tensors of a checkpoint for which a model has no place: from a tensor's name to what takes it (`models.extra_tensors.WeightLoader`), or None.
EXTRA_TENSORS = ("folovllm.electives.quantization.checkpoint_kv_scales:weight_loader_of",)
# What measures the scales of an FP8 cache and sets them, a function of the `ModelRunner`.
CALIBRATION = "folovllm.electives.quantization.calibrate:calibrate"

# Weight sources: what returns the folder of a model, `find(name)`, which `find(name, download=True)` may fetch ...
DOWNLOADS = dict.fromkeys(("smollm2", "smollm2-gguf"), "folovllm.electives.quantization.smollm2:smollm2_dir")
# ... or of a file with this suffix, `find(path)`.
FILE_FORMATS = {".gguf": "folovllm.electives.quantization.gguf_file:gguf_dir"}

# Methods of `LLM` and of its engine by name: functions of the engine. Rollouts (X6) change its weights, or let it sleep.
CALLS = {
    "prepare_structured_outputs": "folovllm.electives.structured_output.masked_executor:prepare",
    "expert_load": "folovllm.electives.moe.expert_load:expert_load",
    "update_weights": "folovllm.electives.rollouts.weights:update_weights",
    "get_weights": "folovllm.electives.rollouts.weights:get_weights",
    "sleep": "folovllm.electives.rollouts.sleep:sleep",
    "wake_up": "folovllm.electives.rollouts.sleep:wake_up",
}
# Routes of a server with `--enable-sleep-mode`: path, method, and "module:function". That function gets the engine and the query of the
# address, and returns what JSON can say, or None. Its ValueError is the client's mistake.
SLEEP_ROUTES = "folovllm.electives.rollouts.routes:ROUTES"
# What a server with `--role` has beside its engine (X7): an asynchronous context, whose value a request waits for before it is queued.
ROLE = "folovllm.electives.kv_transfer.peers:role"

# Models by the architecture that `config.json` names: the module that has a class of this name.
MODELS = {
    "MixtralForCausalLM": "folovllm.electives.moe.models",
    "Qwen2MoeForCausalLM": "folovllm.electives.moe.models",
    "Qwen3MoeForCausalLM": "folovllm.electives.moe.models",
    "Qwen3NextForCausalLM": "folovllm.electives.hybrid.models",
    "Qwen3_5ForCausalLM": "folovllm.electives.hybrid.models",
    "Qwen3_5MoeForCausalLM": "folovllm.electives.hybrid.models",
}
# Layers with states (X5): what keeps the states of sequences, a `worker.runner.StepHook`, of (setup, model, free bytes).
STATE_POOL = "folovllm.electives.hybrid.state_layer:StatePool"
# ... and what makes a cache manager that finds prefixes as far as there are snapshots of states.
SNAPSHOTS = "folovllm.electives.hybrid.snapshots:with_snapshots"
# Mixture of experts (X4): a module with `with_experts` (from a model's class to the same with experts in the places of its MLPs),
# `expert_shapes` and `keep_experts_whole`.
EXPERTS = "folovllm.electives.moe.models"

# Kernels for cards of one compute capability: the plain kernel that they stand for, and a `KernelVariant`.
KERNEL_VARIANTS = {
    "prefill": ((9, 0), "folovllm.electives.hopper.prefill:VARIANT"),
    "grouped_linear": ((9, 0), "folovllm.electives.hopper.grouped:VARIANT"),
}


class Options(Protocol):
    """A dataclass of an elective's keywords of `EngineConfig`, each with its default and a sentence under "Attributes".

    It raises ValueError for a bad value when it is made; the types of switches, texts and counts are checked before. It may have
    a static `check_model(extras, hf_config)`, which raises ValueError if the model cannot have what `EngineConfig.extras` asks for.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def check(self, config: Any) -> None:
        """Raise ValueError where the values do not fit the rest of the `EngineConfig`."""


def option_classes() -> list[type[Any]]:
    """The `Options` of the electives that are installed."""
    return [named(place) for place in OPTIONS if is_installed(place)]


def option_default(name: str) -> Any:
    """The default of a keyword that an elective owns. Raises AttributeError if none does."""
    for options in option_classes():
        if (own := options.__dataclass_fields__.get(name)) is not None:
            return own.default
    raise AttributeError(f"EngineConfig has no {name!r}")


def make_options(given: dict[str, Any]) -> list[Options]:
    """Make the options of which some are given. Takes what is given out of `given`: what is left is nobody's."""
    made = []
    for kind in option_classes():
        names = kind.__dataclass_fields__
        if own := {name: given.pop(name) for name in names if name in given}:
            check_fields(kind, own)
            made.append(kind(**own))
    return made


def options_of(own: Collection[str], given: dict[str, Any], extras: dict[str, Any]) -> list[Options]:
    """Make the electives' options that are given, as keywords or as the `extras` of another configuration, which become theirs.

    Takes out of `given` what is none of our `own` fields. Raises TypeError for a name that nobody knows.
    """
    from folovllm.engine.vllm_arguments import drop_neutral

    others = extras | {name: given.pop(name) for name in given.keys() - own}
    options = make_options(others)
    drop_neutral("engine", others)
    if others:
        raise TypeError(f"EngineConfig got an unexpected keyword argument {next(iter(others))!r}")
    extras.clear()
    for each in options:
        extras |= changed(each)
    return options


def check_model(config: Any, hf_config: Any) -> None:
    """Raise ValueError if an `EngineConfig` asks for an option of an elective that this model cannot have."""
    for kind in option_classes():
        if (check := getattr(kind, "check_model", None)) is not None:
            check(config.extras, hf_config)


def changed(options: Options) -> dict[str, Any]:
    """The values that are not the defaults."""
    values = {name: (getattr(options, name), own.default) for name, own in options.__dataclass_fields__.items()}
    return {name: value for name, (value, default) in values.items() if value != default}


def is_installed(place: str) -> bool:
    """Whether the package of a module is there: each elective may be deleted. What Python left in its folder does not count."""
    try:
        spec = find_spec(package_of(place))
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def package_of(place: str) -> str:
    """The package that may be deleted with a module: "folovllm.electives.moe" of "folovllm.electives.moe.models:with_experts"."""
    return ".".join(place.partition(":")[0].split(".")[:3])


def named(place: str) -> Any:
    """Import and return what stands at "module:name", or the module "module"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def load_elective(place: str, purpose: str) -> Any:
    """Return what stands at `place` (`named`). Raises ValueError if its package is not installed: `purpose` needs it."""
    if not is_installed(place):
        raise ValueError(f"{purpose} needs the package {package_of(place)}, which is not installed here")
    return named(place)
