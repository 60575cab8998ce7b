"""What others get: the wheel, which works without the clone, and the workflows, which run the Makefile's own commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What a command prints. Fails with its last words if it does."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_wheel_tells_a_story_in_an_empty_folder(tmp_path: Path) -> None:
    """Built and installed without its dependencies, which are there; the course is not in it."""
    source, wheels, site, empty = (tmp_path / name for name in ("source", "wheels", "site", "empty"))
    empty.mkdir()
    run("git", "clone", "-q", ROOT, source, cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", wheels, cwd=tmp_path)
    (wheel,) = wheels.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "folovllm",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }
    run(*pip, "install", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    command = (sys.executable, "-P", "-m", "folovllm", "generate", "Once upon a time", "--raw", "--max-tokens", "20")
    said = run(*command, cwd=empty, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    assert said.startswith("Once upon a time") and len(said.split()) > 12
    where = run(
        sys.executable, "-P", "-c", "import folovllm; print(folovllm.__file__)", cwd=empty, PYTHONPATH=str(site)
    )
    assert Path(where.strip()).is_relative_to(site)


def commands(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_runs_what_there_is(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["steps"] and {*([job["needs"]] if "needs" in job else [])} <= {*workflow["jobs"]}
    for command in commands(workflow):
        words = command.split()
        assert (
            (words[0] == "make" and {*words[1:]} <= TARGETS)
            or (ROOT / words[0]).exists()
            or words[0].startswith(".venv")
            or words[:3] == ["python", "-m", "pip"]  # on Windows, which has no make
            or (words[:2] == ["python", "-m"] and (ROOT / f"{words[2].replace('.', '/')}.py").is_file())
        )


def test_no_workflow_names_an_address() -> None:
    """Where the project will be published is for whoever publishes it to say."""
    for file in WORKFLOWS:
        assert "http" not in file.read_text()
