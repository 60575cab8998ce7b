"""`make` installs PyTorch's CPU build where there is no NVIDIA GPU, and the ordinary one where there is or where the index cannot be reached."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="PyTorch's builds for macOS and Windows bring no CUDA"),
]


def write_index(folder: Path, version: str) -> str:
    """A package index that has an empty wheel of torch of this version; its URL."""
    (folder / "torch").mkdir(parents=True)
    name = f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / "torch" / name, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "torch" / "index.html").write_text(f'<a href="{name.replace("+", "%2B")}">{name}</a>')
    return folder.as_uri()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-m", "venv", ".venv"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("gpu", "reachable", "version"), [(False, True, "2.13.0+cpu"), (True, True, "2.13.0"), (False, False, "2.13.0")]
)
def test_which_torch(clone: Path, tmp_path: Path, gpu: bool, reachable: bool, version: str) -> None:
    commands = tmp_path / "commands"  # what is on the path beside the system's own commands
    commands.mkdir()
    if gpu:
        (commands / "nvidia-smi").write_text("#!/bin/sh\n")
        (commands / "nvidia-smi").chmod(0o755)
    ordinary, cpu = write_index(tmp_path / "ordinary", "2.13.0"), write_index(tmp_path / "cpu", "2.13.0+cpu")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))}
    path = f"{commands}:{os.environ['PATH']}"
    environment = {**kept, "PATH": path, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": ordinary}
    command = ["make", "--always-make", ".venv/.torch"]
    if not gpu:  # the machine of the test may have one
        command.append(f"TORCH_INDEX={cpu if reachable else (tmp_path / 'nowhere').as_uri()}")
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    python = clone / ".venv/bin/python"
    found = subprocess.check_output([python, "-m", "pip", "list", "--format", "freeze"], text=True, env=environment)
    assert f"torch=={version}\n" in found, done.stdout
    assert ("cannot be reached" in done.stdout) == (not reachable)
    subprocess.run([python, "-m", "pip", "uninstall", "-qy", "torch"], check=True, env=environment)


def test_the_index_follows_the_gpu(tmp_path: Path) -> None:
    """Without an argument: PyTorch's CPU index, but where there is `nvidia-smi`."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for first, expected in (("", not shutil.which("nvidia-smi")), (f"{tmp_path}:", False)):
        environment = {**os.environ, "PATH": first + os.environ["PATH"]}
        shown = subprocess.check_output(["make", "-n", "-B", ".venv/.torch"], cwd=ROOT, env=environment, text=True)
        assert ("whl/cpu" in shown) == expected
