"""Programs of which each of two ranks runs one, on a GPU each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from folovllm.distributed.group import child_environment

ROOT = Path(__file__).parents[2]


def on_two_gpus(program: Path, flag: str, seconds: float) -> list[str]:
    """Run `program FLAG FOLDER` in two processes that torchrun starts; each writes into a file named for its rank: their texts."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    where = ["--nnodes=1", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", *where, str(program), flag, folder]
        subprocess.run(command, check=True, env=child_environment() | {"PYTHONPATH": path}, timeout=seconds)
        return [Path(folder, str(rank)).read_text() for rank in range(2)]
