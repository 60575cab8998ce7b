"""Damage a model's files at random, and load what is left: it must work, or end in a `ValueError` of one line.

A refusal that ran out of memory, or anything that took more than 5 s of work, has failed too. A seed makes a damage again.
"""

import json
import random
import re
import shutil
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from folovllm import LLM, SamplingParams
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.electives.quantization.quantizer.run import quantize
from tests.helpers import CHAT_TEMPLATE, tiny_checkpoint
from tests.x2.quantized import BYTE_KINDS as INT8
from tests.x2.quantized import INT4_KINDS as INT4
from tests.x2.quantized import tiny, write_quantized
from tests.x2.test_gguf import write_gguf

SECONDS = 5.0
SHORT = SamplingParams(temperature=0, max_tokens=2)
Random = random.Random
DEEP: Any = 1
for _ in range(900):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), 2**31 - 1, 2**31, 2**63, 2**70,
    "", "x", "../x", "/etc/passwd", "\x00", "\ud800", "a" * 5000, "{{", "re:(", [], {}, [None], [1], ["x"], [[1]], {"a": 1},
    {"x": None}, [0] * 1000, DEEP,
]  # fmt: skip


# --- what is damaged ------------------------------------------------------------------------------------------------


def plain(folder: Path) -> Path:
    """One file of weights."""
    return copied(tiny_checkpoint("llama"), folder)


def sharded(folder: Path) -> Path:
    """Several, and an index."""
    return copied(tiny_checkpoint("qwen3", max_shard_size="100KB"), folder)


def coded(kind: tuple[Any, dict[str, Any]], folder: Path) -> Path:
    """A quantized model."""
    return write_quantized(tiny(), folder, *kind)[0]


def with_template(folder: Path) -> Path:
    """All small files that there may be."""
    path = copied(tiny_checkpoint("llama"), folder)
    special = {"eos_token": "<|endoftext|>"}
    for name, content in (("special_tokens_map.json", special), ("added_tokens.json", {"<|im_start|>": 257})):
        (path / name).write_text(json.dumps(content))
    (path / "generation_config.json").write_text('{"eos_token_id": [256, 258], "temperature": 0.7, "top_k": 5}')
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def gguf(folder: Path) -> Path:
    """A file with codes of several types."""
    folder.mkdir(parents=True)
    write_gguf(folder / "tiny.gguf", {"attn_output": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q4_0"})
    return folder / "tiny.gguf"


def copied(source: Path, folder: Path) -> Path:
    """A copy, without the links of its files."""
    shutil.copytree(source, folder)
    return folder


# --- how ------------------------------------------------------------------------------------------------------------


def put(file: Path, content: bytes) -> None:
    """Write a file anew: others may be linked to the old one."""
    file.unlink(missing_ok=True)
    file.write_bytes(content)


def bytes_of(rng: Random, file: Path) -> None:
    """Flip, cut, zero, repeat, or write a huge number."""
    data = bytearray(file.read_bytes())
    near = min(len(data), rng.choice((64, 4096, len(data)))) or 1
    for _ in range(rng.choice((1, 1, 4, 30))):
        at = rng.randrange(near)
        match rng.randrange(6):
            case 0 | 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data))))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice((0, 8, 9, 2**31, 2**32 - 1, 64)))
            case 4:
                data[at : at + rng.randrange(64)] = bytes(rng.randrange(64))
            case _:
                data = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data
    put(file, bytes(data))


def altered(rng: Random, content: Any) -> Any:
    """One place of a JSON value: another value, no more there, or under another name."""
    places = [
        (parent, key) for parent in inner(content)
        for key in (list(parent) if isinstance(parent, dict) else range(min(len(parent), 20)))
    ]  # fmt: skip
    if not places or rng.random() < 0.02:
        return rng.choice(VALUES)
    outer = [(parent, key) for parent, key in places if parent is content]
    parent, key = rng.choice(outer if outer and rng.random() < 0.4 else places)
    match rng.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice((f"{key}x", key.upper(), "", *parent))] = parent.pop(key)
        case _:
            parent[key] = rng.choice(VALUES)
    return content


def inner(content: Any) -> Iterator[Any]:
    """All lists and objects within a JSON value, itself included; of long lists the beginning."""
    if isinstance(content, dict | list):
        yield content
        for value in list(content.values())[:400] if isinstance(content, dict) else content[:20]:
            yield from inner(value)


def as_json(content: Any) -> bytes:
    return json.dumps(content).encode("utf-8", "surrogatepass")


def json_of(rng: Random, file: Path) -> None:
    """Alter a JSON file in some places."""
    content = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 1, 3))):
        content = altered(rng, content)
    put(file, as_json(content))


def header_of(rng: Random, file: Path) -> None:
    """Alter what a safetensors file says of its tensors."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = as_json(altered(rng, json.loads(data[8 : 8 + size])))
    put(file, struct.pack("<Q", len(header)) + header + data[8 + size :])


OTHERWISE: list[Callable[[torch.Tensor], torch.Tensor]] = [  # what may stand in a tensor's place
    lambda t: t.flatten(), lambda t: t[..., None].clone(), lambda t: t[:0].clone() if t.dim() else t[None].clone(),
    lambda t: t.t().contiguous() if t.dim() == 2 else t.repeat(2), lambda t: t[: len(t) // 2].clone() if t.dim() else t.double(),
    *(lambda t, x=x: torch.full_like(t, x) for x in (0, 1, 7, 100)), *(lambda t, x=x: torch.tensor(x) for x in (-1.0, float("nan"))),
    *(lambda t, dtype=dtype: t.float().to(dtype) for dtype in (
        torch.int8, torch.uint8, torch.int32, torch.int64, torch.float64, torch.float8_e4m3fn, torch.bool)),
]  # fmt: skip


def tensors_of(rng: Random, file: Path) -> None:
    """Alter the tensors themselves: names, shapes, dtypes, numbers; at times nothing, and the model works."""
    tensors = load_file(file)
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice(sorted(tensors))
        tensor, (stem, _, kind) = tensors[name], name.rpartition(".")
        layer = f"model.layers.{rng.choice(('0', '999', '-1', 'x'))}.{stem.rpartition('layers.')[2]}.{kind}"
        match rng.randrange(10):
            case 0:
                del tensors[name]
            case 1:
                tensors[rng.choice((f"{name}x", f"{stem}.bias", f"{stem}.qweight", kind, ""))] = tensors.pop(name)
            case 2:
                tensors[rng.choice((layer, *sorted(tensors)))] = tensor.clone()
            case _:
                tensors[name] = rng.choice(OTHERWISE)(tensor)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def index_of(rng: Random, folder: Path) -> None:
    """Alter which file holds what."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards, name = sorted(folder.glob("model-*.safetensors")), rng.choice(sorted(content["weight_map"]))
    one, other = rng.sample(shards, 2)
    match rng.randrange(6):
        case 0:
            strangers = ("../x", "/etc/passwd", "sub/x", "..", "", ".", "\x00", 5, None, [], "no.safetensors", one.name)
            content["weight_map"][name] = rng.choice(strangers)
        case 1:
            one.unlink()
        case 2:
            one.unlink()
            one.symlink_to(rng.choice((one, folder, Path("/dev/zero"), Path("/etc/passwd"), other, Path("nowhere"))))
        case 3:
            put(one, other.read_bytes())
        case _:
            content = altered(rng, content)
    put(index, as_json(content))


def one_file(rng: Random, folder: Path, *ways: tuple[str, Callable[[Random, Path], None]]) -> str:
    """Damage one of the files that fit a pattern, in the way that belongs to it."""
    pattern, way = rng.choice(ways)
    file = rng.choice(sorted(folder.glob(pattern))) if pattern else folder
    way(rng, file)
    return f"{way.__name__} {file.name}"


WEIGHTS = [("*.safetensors", way) for way in (bytes_of, header_of, tensors_of)]
CODES = [*WEIGHTS, ("*.safetensors", tensors_of), ("config.json", json_of)]
Format = tuple[Callable[[Path], Path], list[tuple[str, Callable[[Random, Path], None]]], tuple[str, ...]]
FORMATS: dict[str, Format] = {  # a folder, the ways to damage it, and who reads it
    "safetensors": (plain, WEIGHTS, ("hf", "native", "quantize")),
    "index": (sharded, [("", index_of), ("", index_of), ("*.index.json", bytes_of)], ("hf", "native", "quantize")),
    "gguf": (gguf, [("*.gguf", bytes_of)], ("native",)),
    "gptq": (partial(coded, INT4["gptq"]), CODES, ("native",)),
    "awq": (partial(coded, INT4["awq"]), CODES, ("native",)),
    "fp8": (partial(coded, INT8["fp8 blocks"]), CODES, ("hf", "native")),
    "compressed-tensors": (partial(coded, INT4["packed"]), CODES, ("hf", "native")),
    "tokenizer": (
        with_template,
        [("t*.json", json_of), ("[ast]*.json", json_of), ("[ast]*.json", bytes_of), ("*.jinja", bytes_of)],
        ("hf", "native"),
    ),
    "config": (with_template, [("[cg]*.json", json_of), ("[cg]*.json", bytes_of)], ("hf", "native", "quantize")),
}


# --- whether it is refused well -------------------------------------------------------------------------------------


def attempt(path: Path, reader: str) -> str:
    """Load a model and use it: "works", "refused: ...", or how it has failed."""
    begun = time.process_time(), time.monotonic()
    try:
        use(path, reader)
        result = "works"
    except ValueError as error:
        result = f"refused: {error}"
        if "\n" in str(error) or re.search("allocate memory|MemoryError|Bad file", str(error)):
            result = f"FAILED: {type(error).__name__}: {error}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = f"FAILED: {type(error).__name__}: {error} at {where.filename}:{where.lineno}"
    busy, passed = time.process_time() - begun[0], time.monotonic() - begun[1]
    if busy > SECONDS or passed > 10 * SECONDS:  # the machine may have other work
        result = f"FAILED: took {busy:.1f} s of {passed:.1f}, and {result}"
    return result


def use(path: Path, reader: str) -> None:
    """Quantize the model, or answer a prompt and a conversation with it."""
    if reader == "quantize":
        quantize(str(path), QuantizeOptions(format="int8"), path.parent / "out", use_tqdm=False)
        return
    llm = LLM(str(path), milestone="m1", model_impl=reader, device="cpu", use_tqdm=False)
    llm.get_default_sampling_params()
    llm.generate("Hello 1 é", SHORT, use_tqdm=False)
    if getattr(llm.tokenizer, "chat_template", None):
        llm.chat([{"role": "user", "content": "Hi"}], SHORT, use_tqdm=False)


def fuzz(name: str, seeds: range, work: Path) -> Iterator[tuple[int, str, str]]:
    """Damage the format's files once for each seed: the seed, what was done, and what came of it."""
    make, ways, readers = FORMATS[name]
    base = make(work / name)
    for seed in seeds:
        rng, root = Random(seed), work / "now"
        if base.is_dir():
            shutil.copytree(base, root / "model")
        else:
            (root / "model").mkdir(parents=True)
            shutil.copy(base, root / "model" / base.name)
        done, reader = one_file(rng, root / "model", *ways), rng.choice(readers)
        result = attempt(root / "model" if base.is_dir() else root / "model" / base.name, reader)
        yield seed, f"{done}, {reader}", result
        shutil.rmtree(root)
