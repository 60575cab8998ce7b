"""Damage a model's files at random, and load what is left: it must work, or end in a `ValueError` of one line.

`python -m tests.fuzz_files --format gguf --mutations 2000` tries one format, or all, and prints what failed with the seed that
makes it again (`--seed S --mutations 1`). A refusal that ran out of memory, or anything that took more than 5 s of work, has failed too.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from folovllm import LLM, SamplingParams
from folovllm.electives.quantization.gguf_reader import read_gguf
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
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), 2**31 - 1, 2**31, 2**63, 2**70,
    "", "x", "../x", "/etc/passwd", "\x00", "\ud800", "a" * 5000, "{{", "re:(", [], {}, [None], [1], ["x"], [[1]], {"a": 1},
    {"x": None}, [0] * 1000,
]  # fmt: skip


def nested(rng: Random) -> Any:
    """A list or object in many others."""
    value: Any = 1
    for _ in range(rng.choice((50, 900))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


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
    """One place of a JSON value: another value, no more there, under another name, or exchanged with a second one."""
    places = [
        (parent, key) for parent in inner(content)
        for key in (list(parent) if isinstance(parent, dict) else range(min(len(parent), 20)))
    ]  # fmt: skip
    if not places or rng.random() < 0.02:
        return rng.choice([*VALUES, nested(rng)])
    outer = [(parent, key) for parent, key in places if parent is content]
    parent, key = rng.choice(outer if outer and rng.random() < 0.4 else places)
    match rng.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice((f"{key}x", key.upper(), "", *parent))] = parent.pop(key)
        case 2:
            other, name = rng.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                parent[key], other[name] = other[name], parent[key]
        case _:
            parent[key] = rng.choice([*VALUES, nested(rng)])
    return content


def inner(content: Any) -> Iterator[Any]:
    """All lists and objects within a JSON value, itself included; of long lists the beginning."""
    if isinstance(content, dict | list):
        yield content
        for value in list(content.values())[:400] if isinstance(content, dict) else content[:20]:
            yield from inner(value)


def json_of(rng: Random, file: Path) -> None:
    """Alter a JSON file in some places, or name a key twice."""
    content = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 1, 3))):
        content = altered(rng, content)
    text = as_json(content)
    if rng.random() < 0.05 and isinstance(content, dict) and content:
        text = f"{{{json.dumps(rng.choice(list(content)))}: {json.dumps(rng.choice(VALUES))}, {text.lstrip()[1:]}"
    put(file, text.encode("utf-8", "surrogatepass"))


def as_json(content: Any) -> str:
    """The text of a value. What has been put into itself becomes a word."""
    try:
        return json.dumps(content)
    except (ValueError, RecursionError):
        return '{"loop": 1}'


def header_of(rng: Random, file: Path) -> None:
    """Alter what a safetensors file says of its tensors."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = as_json(altered(rng, json.loads(data[8 : 8 + size]))).encode("utf-8", "surrogatepass")
    put(file, struct.pack("<Q", len(header)) + header + data[8 + size :])


def tensors_of(rng: Random, file: Path) -> None:
    """Alter the tensors themselves: names, shapes, dtypes, numbers."""
    tensors = load_file(file)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        stem, _, kind = name.rpartition(".")
        dtypes = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float64, torch.float8_e4m3fn, torch.bool)
        match rng.randrange(12):
            case 0:
                del tensors[name]
            case 1:
                tensors[
                    rng.choice((f"{name}x", f"{stem}.bias", f"{stem}.g_idx", f"{stem}.qweight", kind, "", "a" * 999))
                ] = tensors.pop(name)
            case 2:
                tensors[rng.choice(sorted(tensors))] = tensor.clone()
            case 3:
                tensors[name] = tensor.flatten()
            case 4:
                tensors[name] = tensor[..., None].clone()
            case 5:
                tensors[name] = tensor.float().to(rng.choice(dtypes))
            case 6:
                tensors[name] = tensor[:0].clone() if tensor.dim() else tensor[None].clone()
            case 7:
                tensors[name] = tensor.t().contiguous() if tensor.dim() == 2 else tensor.repeat(2)
            case 8:
                tensors[name] = torch.full_like(tensor, rng.choice((0, 1, 2, 7, 100)))
            case 9:
                tensors[name] = tensor[: rng.randrange(len(tensor) + 1)].clone() if tensor.dim() else tensor.double()
            case 10:
                tensors[
                    f"model.layers.{rng.choice(('0', '999', '-1', 'x', '9' * 30))}.{stem.rpartition('layers.')[2]}.{kind}"
                ] = tensor.clone()
            case _:
                tensors[name] = torch.tensor(rng.choice((0.0, -1.0, float("nan"), 5.0)))
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def index_of(rng: Random, folder: Path) -> None:
    """Alter which file holds what."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    shards, name = sorted(folder.glob("model-*.safetensors")), rng.choice(sorted(weight_map))
    match rng.randrange(7):
        case 0:
            weight_map[name] = rng.choice(
                ("../x", "/etc/passwd", "sub/x", "..", "", ".", "\x00", 5, None, [], "no.safetensors")
            )
        case 1:
            weight_map[name] = rng.choice(shards).name
        case 2:
            rng.choice(shards).unlink()
        case 3:
            shard = rng.choice(shards)
            shard.unlink()
            shard.symlink_to(
                rng.choice((shard, folder, Path("/dev/zero"), Path("/etc/passwd"), shards[0], Path("nowhere")))
            )
        case 4:
            one, other = rng.sample(shards, 2)
            put(one, other.read_bytes())
        case 5:
            content["weight_map"] = dict.fromkeys(weight_map, rng.choice(shards).name)
        case _:
            content = altered(rng, content)
    put(index, as_json(content).encode("utf-8", "surrogatepass"))


def values_of(rng: Random, file: Path) -> None:
    """Write a GGUF file with other values, or other tensors."""
    values, tensors = read_gguf(file)
    infos = {name: [tensor.tensor_type.value, *tensor.shape.tolist()] for name, tensor in tensors.items()}
    altered(rng, values if rng.random() < 0.6 else infos)
    data, places = bytearray(), bytearray()
    for name, info in infos.items():
        kind, *sizes = info if info and isinstance(info, list) else [0, 32]
        packed = packed_text(name) + struct.pack("<I", len(sizes)) + b"".join(map(packed_number, sizes))
        places += packed + packed_number(kind)[:4] + struct.pack("<Q", len(data))
        if name in tensors:
            data += tensors[name].data.tobytes() + bytes(-tensors[name].data.nbytes % 32)
    head = b"".join(packed_text(key) + packed_value(value) for key, value in values.items())
    whole = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(values)) + head + places
    put(file, whole + bytes(-len(whole) % 32) + data)


def packed_text(text: Any) -> bytes:
    """A text as GGUF has it."""
    data = str(text).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def packed_number(number: Any) -> bytes:
    """Eight bytes that hold a number, or something else."""
    return struct.pack("<Q", int(number) % 2**64 if isinstance(number, int) else 2**63)


def packed_value(value: Any, depth: int = 0) -> bytes:
    """A value as GGUF has it, behind its kind; lists may hold lists."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return (
                struct.pack("<I", 4 if 0 <= value < 2**32 else 10)
                + packed_number(value)[: 4 if 0 <= value < 2**32 else 8]
            )
        case float():
            return struct.pack("<Id", 12, value)
        case list():
            items = [packed_value(item, depth + 1) for item in value]
            kind = items[0][:4] if items else struct.pack("<I", 4)
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
        case _:
            return struct.pack("<I", 8) + packed_text(value)


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
    "gguf": (gguf, [("*.gguf", bytes_of), ("*.gguf", values_of), ("*.gguf", values_of)], ("native",)),
    "gptq": (partial(coded, INT4["gptq"]), CODES, ("native",)),
    "gptq-sorted": (partial(coded, INT4["gptq sorted"]), CODES, ("native",)),
    "awq": (partial(coded, INT4["awq"]), CODES, ("native",)),
    "fp8": (partial(coded, INT8["fp8 blocks"]), CODES, ("hf", "native")),
    "compressed-tensors": (partial(coded, INT4["packed"]), CODES, ("hf", "native")),
    "compressed-tensors-8": (partial(coded, INT8["int8 channel"]), CODES, ("hf", "native")),
    "tokenizer": (
        with_template,
        [
            ("tokenizer.json", json_of),
            ("t*.json", json_of),
            ("[ast]*.json", json_of),
            ("[ast]*.json", bytes_of),
            ("*.jinja", bytes_of),
        ],
        ("hf", "native"),
    ),
    "config": (
        with_template,
        [("config.json", json_of), ("[cg]*.json", json_of), ("[cg]*.json", bytes_of)],
        ("hf", "native", "quantize"),
    ),
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


def main() -> None:
    """Run the formats that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print each refusal, too")
    given = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    gc.collect = lambda *_: 0  # type: ignore[assignment]  # an engine collects as it starts, which takes half a second
    for name in given.format or FORMATS:
        with tempfile.TemporaryDirectory() as work:
            counts: Counter[str] = Counter()
            for seed, done, result in fuzz(name, range(given.seed, given.seed + given.mutations), Path(work)):
                counts[result.split(":")[0]] += 1
                if given.show or result.startswith("FAILED"):
                    print(f"{name} {seed} ({done}): {result}", flush=True)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(f"{name}: {given.mutations} tried, {dict(counts)}; at most {peak:.1f} GB of memory", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
