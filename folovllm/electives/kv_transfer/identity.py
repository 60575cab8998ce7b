"""Which model an engine has: a digest that is the same on every host which has the same files."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from folovllm.engine.setup import EngineSetup

SAMPLES, SAMPLE = 64, 1 << 16  # pieces of a weight file that are read, and their bytes


def model_digest(setup: EngineSetup) -> str:
    """A digest of the configuration and the weights; of weights that are random, of their seed.

    Of a weight file it reads the length, the beginning, which names the tensors, and pieces all over: a fine-tuned model
    differs in each of them.
    """
    config = setup.config
    names = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    own = {name: value for name, value in setup.hf_config.to_dict().items() if name not in names}
    seed = config.seed if config.random_weights else None
    text = json.dumps([own, str(setup.dtype), config.extras.get("quantization"), seed], sort_keys=True, default=str)
    digest = xxhash.xxh3_128(text.encode())
    if seed is None:
        digest.update(files_digest(setup.path))
    return digest.hexdigest()


@lru_cache(8)
def files_digest(folder: Path) -> bytes:
    """A digest of the weight files in a folder, or of one file, by samples. It is read once: a server's weights stay."""
    digest = xxhash.xxh3_128()
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there are no weight files in {folder}, so peers cannot tell which model this is")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}\n".encode())
        with file.open("rb") as data:
            for i in range(SAMPLES):
                data.seek(max(0, size - SAMPLE) * i // (SAMPLES - 1))
                digest.update(data.read(SAMPLE))
    return digest.digest()
