"""`folovllm quantize`: what it writes runs in the engine and elsewhere and is as good as it says; what it refuses, in a sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm.apps.cli import main
from folovllm.electives.quantization.quantizer.calibration import read_texts, rows_of
from folovllm.electives.quantization.quantizer.folder import EMBEDDING, HEAD, NORM, PREFIX
from folovllm.electives.quantization.quantizer.methods import quantize_weight
from folovllm.electives.quantization.quantizer.one_layer import Inputs
from folovllm.electives.quantization.quantizer.options import CALIBRATED, QuantizeOptions
from folovllm.electives.quantization.quantizer.perplexity import Quality, compare, perplexity, token_losses
from folovllm.electives.quantization.quantizer.run import Report, quantize
from folovllm.electives.quantization.quantizer.whole import logits_of
from tests.helpers import Driver, assert_logits_equal, hf_model, prompts, tiny_checkpoint
from tests.workloads import make_engine, mixed_requests, serve
from tests.x2.quantized import Tensors, as_other_readers

UP = "model.layers.1.mlp.up_proj.weight"
KINDS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "int8": {},
    "gptq": {},
    "gptq asymmetric, act-order": {"asymmetric": True, "act_order": True},
    "gptq nearest": {"nearest": True},
    "awq": {},
}


def options(kind: str) -> QuantizeOptions:
    format = kind.split()[0]
    groups = {"group_size": 32} if format in CALIBRATED else {}
    return QuantizeOptions(format=format, samples=6, length=24, **groups, **KINDS[kind])


def run(kind: str, out: Path, text: Path | None = None, model: Path | None = None, device: str | None = None) -> Report:
    """Quantize the tiny model, or another."""
    return quantize(str(model or tiny()), options(kind), out, text, device, use_tqdm=False)


def tiny(family: str = "qwen3") -> Path:
    """64 to 128 inputs, in groups of 32, in several files; Llama has all biases and a head of its own."""
    more = {} if family == "qwen3" else {"attention_bias": True, "mlp_bias": True, "tied": False}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return tiny_checkpoint(family, max_shard_size="100KB", **sizes, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    generator = torch.Generator().manual_seed(0)
    lines = ["".join(chr(97 + c) for c in torch.randint(0, 26, (40,), generator=generator)) for _ in range(20)]
    file.write_text("\n".join(json.dumps({"text": line} if i % 2 else line) for i, line in enumerate(lines)))
    return file


def model_of(kind: str) -> Path:
    """Two kinds get a model with biases."""
    return tiny("llama" if kind in ("awq", "gptq nearest") else "qwen3")


@pytest.fixture(scope="module", params=list(KINDS))
def written(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Report]:
    """Each kind once for all tests."""
    kind: str = request.param
    return kind, run(kind, tmp_path_factory.mktemp("out") / "model", text, model_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_the_weights_that_they_were_made_of(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(64, 128, generator=generator), torch.randn(256, 128, generator=generator)
    inputs = Inputs(128, torch.device("cpu"))
    inputs.add(x * torch.linspace(0.5, 2, 128)[torch.randperm(128, generator=generator)])
    tensors, found = quantize_weight(options(kind), "mlp.down_proj", w, torch.float16, inputs)
    torch.testing.assert_close(as_other_readers(tensors), found)
    assert (found - w).norm() < 0.2 * w.norm(), "so much is off where codes or scales are in another's place"


def test_the_engine_runs_what_was_measured(written: tuple[str, Report], text: Path) -> None:
    """Its perplexity is the one that was printed, of the weights that the codes stand for."""
    kind, report = written
    coded = Driver(report.folder)
    rows = rows_of(report.folder, coded.config, options(kind), text)
    assert report.quality is not None
    losses = token_losses(logits_of(coded.model, rows[1]), rows[1])
    assert perplexity(losses) == pytest.approx(report.quality.after, rel=1e-5)
    assert report.quality.tokens == rows[1][:, 1:].numel()


SCALES = dict.fromkeys(("fp8", "int8"), "weight_scale")
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "int8": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq asymmetric, act-order": {"quant_method": "gptq", "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


def test_the_folder_is_that_of_the_format(written: tuple[str, Report]) -> None:
    """As GPTQModel 7.7, AutoAWQ 0.2.9, compressed-tensors 0.20 and Qwen's FP8 checkpoints have it; their tensors: `as_other_readers`."""
    kind, report = written
    index = json.loads((report.folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(report.folder / index[name := f"{PREFIX}1.self_attn.o_proj.{SCALES.get(kind, 'scales')}"])
    assert tensors[name].dtype == (torch.float32 if kind in SCALES else torch.float16)
    said = json.loads((report.folder / "config.json").read_text())["quantization_config"]
    assert CONFIGS.get(kind, CONFIGS["gptq"]).items() <= said.items()
    assert (report.folder / "tokenizer.json").is_file() and report.bytes_after < report.bytes_before
    files = {file.name for file in report.folder.glob("*.safetensors")}
    assert files == set(index.values()), "the index must name all files, and no others"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_transformers_reads_it(kind: str, text: Path, tmp_path: Path) -> None:
    """GPTQ and AWQ need GPTQModel there, which is a compiler's work: they are compared by their layout alone."""
    pytest.importorskip("compressed_tensors", reason="transformers reads this layout with compressed-tensors")
    from transformers import AutoModelForCausalLM

    out = run(kind, tmp_path / "out", text, tiny("llama")).folder
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for scheme in (getattr(module, "quantization_scheme", None) for module in theirs.modules()):
        if scheme is not None:
            scheme.input_activations = None  # the engine leaves inputs as they are
    (ids,) = prompts([20])
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert_logits_equal(Driver(out).step({0: ids})[0], expected)


def test_m1_runs_what_transformers_unpacks(tmp_path: Path) -> None:
    """It gives what was in codes the dtype that was asked for, and leaves norms and embedding in that of the file."""
    pytest.importorskip("compressed_tensors", reason="transformers reads this layout with compressed-tensors")
    out = to_int8("stories-5m", tmp_path)
    theirs, ours = (serve(make_engine(out, milestone=name), mixed_requests(count=2)) for name in ("m1", "m2"))
    assert [o.outputs[0].token_ids for o in theirs] == [o.outputs[0].token_ids for o in ours]


def test_what_cannot_be_written_is_refused_at_once(text: Path, tmp_path: Path) -> None:
    run("int8", tmp_path / "out", text)
    for out, says in (
        (tmp_path / "out", "is not empty"),
        (text / "out", "cannot write to the folder"),
        (text, "cannot write"),
    ):
        with pytest.raises(ValueError, match=says):
            run("int8", out, text)
    with pytest.raises(ValueError, match="quantized already"):
        run("int8", tmp_path / "twice", text, tmp_path / "out")


def test_rounding_needs_no_text(tmp_path: Path) -> None:
    report = run("int8", tmp_path / "out")
    assert report.quality is None and len(list(report.folder.glob("*.safetensors"))) == 3
    with pytest.raises(ValueError, match="--format awq needs a text: --calibration"):
        run("awq", tmp_path / "awq")


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    """One layer is built, and all weights go through it: it has one window, and no way to scale embeddings."""
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="Gemma scales its embeddings"):
        run("int8", out, model=tiny_checkpoint("gemma3_text"))
    slides = {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}
    with pytest.raises(ValueError, match=r"some layers see 12 tokens .* choose --length 12"):
        run("int8", out, model=tiny_checkpoint("qwen2", **slides))
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no text"),
        ('{"text": "a"}\n{"txt": "b"}', r'line 2: expected \{"text": "..."\}'),
        ("{", "line 1: Expecting property name"),
        ("[" * 100_000, "line 1: .*recursion"),
        ('"a"\n"b\\ud800"', "line 2: .*surrogates not allowed"),
        ('"a few words"', "too short for rows of 24 tokens"),
    ],
)
def test_a_bad_text_is_refused(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=says):
        run("gptq", tmp_path / "out", file)
    assert not (tmp_path / "out").exists()


def test_what_ends_lines_elsewhere_may_stand_in_a_text(tmp_path: Path) -> None:
    """JSON lines end with a newline alone; text from the web is full of other separators, which JSON need not escape."""
    file = tmp_path / "text.jsonl"
    text = "one\u2028two\x85three"
    file.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" + '"three"\n', encoding="utf-8")
    assert read_texts(file) == [text, "three"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--format gptq", "name the folder to write: -o DIR"),
        ("-o OUT", "choose a format: --format gptq, awq, fp8 or int8"),
        ("-o OUT --format int4", "unknown format 'int4'"),
        ("-o OUT --format fp8 --act-order", "--act-order belongs to --format gptq"),
        ("-o OUT --format fp8 --group-size 32", "--group-size belongs to --format gptq or awq, not to fp8"),
        ("-o OUT --format awq --damping 0.1", "--damping belongs to --format gptq, not to awq"),
        ("-o OUT --format gptq --nearest --damping 0.1", "alike: leave out --damping"),
        ("-o OUT --format gptq --group-size 48", "group_size must be 32, 64 or 128"),
        ("-o OUT --format gptq --damping 0", "damping must be above 0"),
        ("-o OUT --format gptq --calibration nowhere.jsonl", "cannot read the calibration text"),
        ("-o OUT --format gptq --length 9999", "too short for rows of 9999 tokens"),
    ],
)
def test_bad_input_is_one_sentence(given: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quantize", *(str(tmp_path / "out") if word == "OUT" else word for word in given.split())])
    assert ended.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_tells_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model has a text of its own, and hardly notices 8 bits."""
    with pytest.raises(SystemExit) as ended:
        main(["quantize", "--format", "int8", "-o", str(tmp_path / "out"), "--samples", "4", "--length", "128"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "from the last fifth of the text" in said and "│ perplexity │" in said
    before, after = (float(number) for number in re.search(r"perplexity │\s+([\d.]+) │\s+([\d.]+)", said).groups())  # type: ignore[union-attr]
    assert after == pytest.approx(before, rel=0.005)


@pytest.mark.slow
def test_gptq_is_better_than_rounding_on_a_real_model(tmp_path: Path) -> None:
    def quality(nearest: bool) -> Quality | None:
        asked = QuantizeOptions(format="gptq", nearest=nearest, samples=12, length=128)
        return quantize("stories-5m", asked, tmp_path / str(nearest), use_tqdm=False).quality

    gptq, nearest = map(quality, (False, True))
    assert gptq is not None and nearest is not None
    assert gptq.agreement > nearest.agreement > 0.95
    assert abs(gptq.after / gptq.before - 1) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gptq asymmetric, act-order", "awq", "fp8"])
def test_a_gpu_finds_as_good_codes(kind: str, text: Path, tmp_path: Path) -> None:
    here, there = (run(kind, tmp_path / device, text, tiny("llama"), device).quality for device in ("cpu", "cuda"))
    assert here is not None and there is not None
    assert there.before == pytest.approx(here.before, rel=1e-3) and there.after == pytest.approx(here.after, rel=0.05)


def test_the_loss_is_that_of_transformers() -> None:
    path = tiny_checkpoint()
    rows = torch.tensor(prompts([24, 24]))
    with torch.inference_mode():
        expected = hf_model(path)(rows, labels=rows).loss
    losses = token_losses(logits_of(Driver(path).model, rows), rows)
    assert losses.shape == (2, 23) and float(losses.mean()) == pytest.approx(float(expected), rel=1e-5)
    assert perplexity(losses) == pytest.approx(float(expected.exp()), rel=1e-5)


def test_a_comparison_by_hand() -> None:
    """Two places; at the second the other model prefers another token."""
    before = torch.tensor([[[0.0, 0.0, -99.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    after = torch.tensor([[[0.0, 0.0, -99.0], [0.0, 5.0, 0.0], [9.0, 0.0, 0.0]]])
    quality = compare([(before, after, torch.tensor([[2, 0, 0]]))])
    assert quality.tokens == 2 and quality.agreement == 0.5 and quality.before < quality.after
    assert perplexity(torch.full((3, 4), 2.0).log()) == pytest.approx(2.0)


def to_int8(model: Path | str, folder: Path) -> Path:
    """Quantize a model into `out` in a folder."""
    quantize(str(model), QuantizeOptions(format="int8"), folder / "out", use_tqdm=False)
    return folder / "out"


def changed(to: Path, change: Callable[[Tensors], object], **fields: Any) -> Path:
    """A copy of the tiny model whose tensors and config are changed."""
    shutil.copytree(tiny_checkpoint(), to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file({name: t.clone() for name, t in tensors.items()}, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return to


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[-1] = torch.nan
    return tensor


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no embedding": (lambda t: t.pop(EMBEDDING), "lacks model.embed_tokens.weight"),
    "no projection": (lambda t: t.pop(UP), f"lacks {UP}"),
    "a short norm": (lambda t: t.update({NORM: t[NORM][:8]}), r"norm.weight' has shape \[8\]"),
    "a tensor of no layer": (lambda t: t.update({"model.odd.weight": t[NORM]}), "hold 'model.odd.weight'"),
    "NaN in the embedding": (lambda t: t.update({EMBEDDING: with_nan(t[EMBEDDING])}), "embed_tokens.*holds NaN"),
    "codes": (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), f"{UP}' is stored as float8_e4m3fn"),
    "a head that is not tied": (lambda t: None, "lacks lm_head.weight"),
    "another head": (lambda t: t.update({HEAD: t[EMBEDDING] * 2}), "'lm_head.weight' of its own"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_any_work(damage: str, tmp_path: Path) -> None:
    change, says = DAMAGES[damage]
    model = changed(tmp_path / "model", change, tie_word_embeddings=damage != "a head that is not tied")
    with pytest.raises(ValueError, match=says):
        to_int8(model, tmp_path)
    assert not (tmp_path / "out").exists(), "nothing is written for a model that cannot be quantized"


def test_a_configuration_of_no_model(tmp_path: Path) -> None:
    model = changed(tmp_path / "model", lambda t: None, rope_parameters={"rope_theta": "default"})
    with pytest.raises(ValueError, match="cannot read the model in"):
        to_int8(model, tmp_path)


def test_what_else_a_checkpoint_holds_does_no_harm(tmp_path: Path) -> None:
    """A copy of the tied head; scales for K and V in 8 bits, which go from folder to folder."""
    names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(3) for kind in "kv"]
    more = dict.fromkeys(names, torch.tensor(0.25))
    model = changed(tmp_path / "model", lambda t: t.update(more | {HEAD: t[EMBEDDING].clone()}))
    layers = Driver(to_int8(model, tmp_path)).model.model.layers
    assert {(a.scales.key, a.scales.value) for a in (layer.self_attn.attn for layer in layers)} == {(0.25, 0.25)}


def test_an_embedded_model_takes_its_tokenizer_along(tmp_path: Path) -> None:
    """All of them share one, which lies in the folder of another."""
    to_int8("stories-draft", tmp_path)
    engine = make_engine(tmp_path / "out", milestone="m6")
    assert engine.tokenizer.decode(engine.tokenizer.encode("The dog")) == "The dog"


def test_awq_of_a_checkpoint_with_merged_matrices(text: Path, tmp_path: Path) -> None:
    """Phi-3's V and up are rows of other matrices: what they feed is left unscaled, and all else is done."""
    model = tiny_checkpoint("phi3", hidden_size=64, intermediate_size=96, num_kv_heads=4)
    options = QuantizeOptions(format="awq", group_size=32, samples=6, length=24)
    report = quantize(str(model), options, tmp_path / "out", text, use_tqdm=False)
    assert report.quality is not None and report.quality.after < 2 * report.quality.before
    assert Driver(report.folder).step({0: prompts([20])[0]})[0].isfinite().all()
