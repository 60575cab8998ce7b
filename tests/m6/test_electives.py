"""The hooks of `folovllm.plugins`, and those by which an elective changes an engine, with doubles that are no electives."""

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import folovllm
from folovllm import LLM, EngineConfig, SamplingParams, plugins
from folovllm.engine import extension as extensions
from folovllm.engine.extension import Extension
from folovllm.engine.scheduler import Scheduler
from folovllm.kernels import variants
from folovllm.kernels.variants import KernelVariant, kernel_variant
from folovllm.layers.fusable import FusablePlain
from folovllm.layers.linear import LinearBase
from folovllm.models import files, registry, sources
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.quantization import Quantization
from folovllm.models.written_files import cache_dir
from folovllm.worker.graph_runner import GraphRunner
from tests.helpers import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def llm(**fields: Any) -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m6", device="cpu", num_kv_blocks=40, use_tqdm=False, **fields)


class Halved(FusablePlain):
    """Weights that the checkpoint has twice as large."""

    def loaded(self, layer: LinearBase) -> None:
        layer.weight.data /= 2


class Halving(Quantization):
    """A way of quantizing of which the engine is told by `quantization="halved"`."""

    asked: ClassVar[list[str]] = []

    def configured(self, hf_config: Any, config: Any) -> Any:
        assert config.quantization == "halved"
        hf_config.quantization_config = {"quant_method": "halved"}
        return hf_config

    def linear_methods_of(self, hf_config: Any, packed: Any, renamed: Any) -> Any:
        assert packed["qkv_proj"] == ["q_proj", "k_proj", "v_proj"]
        self.asked.append("linear_methods_of")
        return lambda name: Halved() if name.endswith("o_proj") else None

    def check(self, hf_config: Any, part: Any, config: Any) -> None:
        self.asked.append("check")


class TestOptions:
    """Keywords of `EngineConfig` that electives own."""

    def test_they_are_carried_as_extras(self) -> None:
        config = EngineConfig(kv_cache_dtype="fp8", batch_invariant=True, num_snapshots=None, milestone="m3")
        assert config.extras == {"kv_cache_dtype": "fp8_e4m3", "batch_invariant": True}, "what is not the default"
        assert (config.kv_cache_dtype, config.batch_invariant, config.snapshot_interval) == ("fp8_e4m3", True, 512)
        for copy in (replace(config), pickle.loads(pickle.dumps(config))):
            assert copy == config and copy.extras == config.extras
        assert replace(config, extras={}) == EngineConfig(milestone="m3")

    def test_an_owner_checks_them_beside_the_rest(self) -> None:
        for fields, says in (
            ({"num_snapshots": 0}, "num_snapshots must be at least 1"),
            ({"batch_invariant": "no"}, "batch_invariant must be True or False"),
            ({"kv_cache_dtype": "fp8", "milestone": "m1"}, "leave kv_cache_dtype out"),
            ({"count_experts": True, "kv_cache": "growing", "max_num_seqs": 1, "milestone": "m1"}, "needs batches"),
        ):
            with pytest.raises(ValueError, match=says):
                EngineConfig(**fields)

    def test_a_name_of_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'batch_size'"):
            EngineConfig(batch_size=1)
        with pytest.raises(AttributeError, match="batch_size"):
            _ = EngineConfig().batch_size
        monkeypatch.setattr(plugins, "OPTIONS", ("folovllm.gone.options:Options",))
        with pytest.raises(TypeError, match="'batch_invariant'"):  # the package that owns it is not installed
            EngineConfig(batch_invariant=True)


class TestQuantization:
    def test_each_layer_gets_its_linear_method(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "QUANTIZATION", f"{__name__}:Halving")
        monkeypatch.setattr(Halving, "asked", [])
        with llm(quantization="halved") as engine:
            runner = engine.engine.executor._worker.runner
            kinds = {
                name.split(".")[-1]: type(m.linear_method)
                for name, m in runner.model.named_modules()
                if isinstance(m, LinearBase)
            }
        assert kinds.pop("o_proj") is Halved and Halved not in kinds.values()
        assert Halving.asked[0] == "check" and "linear_methods_of" in Halving.asked

    def test_none_is_asked_for_a_plain_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "QUANTIZATION", "folovllm.gone:Quantization")
        with llm() as engine:
            assert len(engine.generate("Once", GREEDY)[0].outputs[0].token_ids) == 6

    def test_the_package_that_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "QUANTIZATION", "folovllm.gone:Quantization")
        with pytest.raises(ValueError, match=r"a quantized model .* needs the package folovllm\.gone"):
            llm(quantization="int4", random_weights=True)
        config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
        with pytest.raises(ValueError, match=r"needs the package folovllm\.gone"):
            registry.quantization_hook(config)


class TestModels:
    def test_a_model_of_another_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "MODELS", {"Twin": __name__})
        assert registry.get_model_class(SimpleNamespace(architectures=["Twin"])) is Twin

        monkeypatch.setattr(registry, "MODELS", {"Twin": "folovllm.gone.twin"})
        with pytest.raises(ValueError, match=r"a model of architecture Twin needs the package folovllm\.gone"):
            registry.get_model_class(SimpleNamespace(architectures=["Twin"]))


class Twin(LlamaForCausalLM):
    """A model of another package."""


def find(name: str | Path, download: bool = False) -> Path:
    """A weight source."""
    return cache_dir() / Path(name).stem


def test_weight_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "DOWNLOADS", {"by-name": f"{__name__}:find", "lost": "folovllm.gone:find"})
    monkeypatch.setattr(sources, "FILE_FORMATS", {".own": f"{__name__}:find"})
    (tmp_path / "model.own").touch()
    assert files.resolve_model("by-name") == cache_dir() / "by-name"
    assert files.resolve_model(str(tmp_path / "model.own")) == cache_dir() / "model"
    with pytest.raises(ValueError, match=r"the model lost needs the package folovllm\.gone"):
        files.resolve_model("lost")


VARIANT = KernelVariant(is_supported=lambda n: n > 1, launch=lambda n: torch.ones(n))


class TestKernelVariants:
    @pytest.fixture(autouse=True)
    def _fresh(self) -> Any:
        kernel_variant.cache_clear()
        yield
        kernel_variant.cache_clear()

    def test_it_is_for_cards_of_its_capability_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(variants, "KERNEL_VARIANTS", {"one": ((9, 0), f"{__name__}:VARIANT")})
        for number, capability in enumerate([(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
            found = kernel_variant("one", torch.device("cuda", number))
            assert (found is VARIANT) is (capability == (9, 0))
        assert kernel_variant("one", torch.device("cpu")) is None

    def test_without_its_package_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(variants, "KERNEL_VARIANTS", {"one": ((9, 0), "folovllm.gone.one:VARIANT")})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert kernel_variant("one", torch.device("cuda")) is None


def test_every_place_of_the_table_is_there() -> None:
    """Whatever is installed can be found under the name that the table has for it."""
    places = [plugins.QUANTIZATION, *plugins.EXTRA_TENSORS, plugins.CALIBRATION]
    places += [*plugins.DOWNLOADS.values(), *plugins.FILE_FORMATS.values()]
    places += [f"{module}:{name}" for name, module in plugins.MODELS.items()]
    pytest.importorskip("triton.experimental.gluon", reason="Triton is for Linux only")
    places += [place for _, place in plugins.KERNEL_VARIANTS.values()]
    for place in filter(plugins.is_installed, places):
        assert plugins.named(place) is not None


@dataclass
class Options:
    """The keywords that turn an elective on."""

    counting: bool = False
    counting_too: bool = False

    def check(self, config: Any) -> None:
        """They go with everything."""


class Counts(Extension):
    """Puts a subclass in each place, and notes which hooks were called."""

    called: ClassVar[list[str]] = []

    def prepare(self) -> None:
        self.called.append("prepare")

    def num_samples(self) -> int:
        self.called.append("num_samples")
        return super().num_samples()

    def attention_backend(self, usual: Any) -> Any:
        self.called.append("attention_backend")
        return super().attention_backend(usual)

    def graph_runner(self, usual: Any) -> Any:
        self.called.append("graph_runner")
        return type("Own", (usual,), {})

    def scheduler(self, usual: Any, executor: Any) -> Any:
        self.called.append(f"scheduler of {executor.num_kv_blocks} blocks")
        return type("Own", (usual,), {})

    def close(self) -> None:
        self.called.append("close")


def test_what_it_returns_stands_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with llm() as plain:
        expected = plain.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    monkeypatch.setattr(Counts, "called", [])
    monkeypatch.setattr(plugins, "OPTIONS", (f"{__name__}:Options",))
    monkeypatch.setattr(extensions, "EXTENSIONS", {"counting": f"{__name__}:Counts"})
    with llm(counting=True) as own:
        scheduler, runner = own.engine.scheduler, own.engine.executor._worker.runner
        for part, kind in ((scheduler, Scheduler), (runner, GraphRunner)):
            assert isinstance(part, kind) and type(part).__name__ == "Own"
        assert own.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids == expected
    assert Counts.called[0] == "prepare" and Counts.called[-2:] == ["scheduler of 40 blocks", "close"]
    assert {"num_samples", "attention_backend", "graph_runner"} <= {*Counts.called}


def test_two_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "OPTIONS", (f"{__name__}:Options",))
    monkeypatch.setattr(extensions, "EXTENSIONS", dict.fromkeys(("counting", "counting_too"), f"{__name__}:Counts"))
    with pytest.raises(ValueError, match="counting and counting_too do not work together"):
        llm(counting=True, counting_too=True)


def test_a_package_of_which_only_bytecode_is_left_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(folovllm, "__path__", [*folovllm.__path__, str(tmp_path)])
    assert plugins.is_installed("folovllm.electives.server.cli") and not plugins.is_installed("folovllm.gone.cli")


def test_without_structured_output_a_request_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("folovllm.engine.llm_engine.STRUCTURED_OUTPUT", "folovllm.gone.matchers")
    with llm() as engine:
        assert len(engine.generate("Once", GREEDY)[0].outputs[0].token_ids) == 6
        with pytest.raises(ValueError, match="not installed"):
            engine.generate("Once", SamplingParams(structured_outputs=folovllm.StructuredOutputsParams(choice=["a"])))
