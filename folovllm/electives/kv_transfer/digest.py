"""A digest of everything besides the tokens on which a model's K/V depend."""

from __future__ import annotations

import json
from collections.abc import Iterator

import xxhash

from folovllm.engine.setup import EngineSetup

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
HEADER = 1 << 16  # bytes at a weight file's beginning: names, shapes and places of its tensors
SAMPLES, SAMPLE = 64, 1 << 16  # parts of a weight file that stand for all of it, and their bytes
# Keywords that change the numbers in the cache.
NUMERIC = ("quantization", "quantize_activations", "kv_cache_dtype", "calculate_kv_scales", "batch_invariant")


def model_digest(setup: EngineSetup, by_time: bool = True) -> bytes:
    """16 bytes over the configuration, the weight files (name, header, size, time; of random weights the seed), and the form of a block.

    Two models of one shape have other files; the same file that was trained on has another time. Without `by_time` it has other
    numbers, of which samples are read: so copies of a file, on two hosts, are the same.
    """
    digest = xxhash.xxh3_128()
    for part in parts(setup, by_time):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def kv_dtype(setup: EngineSetup) -> str:
    """The dtype of the numbers in the cache."""
    return str(setup.attention.kv_dtype or setup.dtype)


def parts(setup: EngineSetup, by_time: bool) -> Iterator[bytes]:
    """What the digest is made of."""
    config, path = setup.config, setup.path
    fields = {name: value for name, value in setup.hf_config.to_dict().items() if name != "_name_or_path"}
    yield json.dumps(fields, sort_keys=True, default=str).encode()
    numeric = [str(config.extras.get(name)) for name in NUMERIC]
    yield json.dumps([config.tensor_parallel_size, setup.max_model_len, *numeric]).encode()
    if config.random_weights:
        yield f"random weights {config.seed} {setup.device.type}".encode()
        return
    folder = path if path.is_dir() else path.parent
    for file in sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS):
        info = file.stat()
        yield f"{file.name} {info.st_size} {info.st_mtime_ns if by_time else ''}".encode()
        with file.open("rb") as opened:
            yield opened.read(HEADER)
            for i in range(0 if by_time else SAMPLES):
                opened.seek(info.st_size * i // SAMPLES)
                yield opened.read(SAMPLE)
