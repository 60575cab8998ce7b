"""M1 to M6 stand alone: in a copy of the tree without any elective, their exercises' tests pass, and errors say what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from milestones.manifest import Course
from tests.project.test_floors import ELECTIVES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PARTS = ("milestones", "tests", "tools", "pyproject.toml", "README.md")
# A quantized checkpoint, one with experts, and names that only a weight source knows: each error names the package to install.
ERRORS = """
import json, sys
from pathlib import Path
from folovllm import LLM
from folovllm.models.files import resolve_model

folder = Path(sys.argv[1])
config = json.loads((resolve_model("stories-5m") / "config.json").read_text())
for change in ({"quantization_config": {"quant_method": "fp8"}}, {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}):
    (folder / "config.json").write_text(json.dumps(config | change))
    try:
        LLM(str(folder), milestone="m2", tokenizer="stories-5m", device="cpu", use_tqdm=False, random_weights=True)
    except ValueError as error:
        print(error)
try:
    resolve_model("smollm2")
except ValueError as error:
    print(error)
llm = LLM(device="cpu", milestone="m6", max_model_len=128, use_tqdm=False)
print(repr(llm.generate("Once upon a time")[0].outputs[0].text))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without the electives: packages, milestones and tests."""
    root = tmp_path_factory.mktemp("core")
    no_bytecode = shutil.ignore_patterns(
        "__pycache__", "x[0-9]*", "assets", *(name.split(".")[1] for name in ELECTIVES)
    )
    shutil.copytree(ROOT / "folovllm", root / "folovllm", ignore=no_bytecode)
    (root / "folovllm" / "assets").symlink_to(ROOT / "folovllm" / "assets", target_is_directory=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__", "x[0-9]*"))
        else:
            shutil.copy(ROOT / part, root / part)
    assert not any((root / "folovllm" / package.replace(".", "/")).exists() for package in ELECTIVES)
    return root


def run(core: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in that copy."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FOLOVLLM_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(core)}
    return subprocess.run([sys.executable, *command], cwd=core, env=env, capture_output=True, text=True, timeout=550)


def test_exercises_of_m1_to_m6(core: Path) -> None:
    tests = [test for exercise in Course(ROOT).exercises if exercise.id.startswith("m") for test in exercise.tests]
    assert len(tests) > 35
    done = run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", *dict.fromkeys(tests))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_errors_name_the_package(core: Path, tmp_path: Path) -> None:
    done = run(core, "-c", ERRORS, str(tmp_path))
    *errors, source, _ = done.stdout.splitlines()
    assert done.returncode == 0 and len(errors) == 2, done.stdout + done.stderr[-3000:]
    assert (
        "a quantized model (`quantization_config`) needs the package folovllm.electives.quantization, which is"
        in errors[0]
    )
    assert "Qwen3MoeForCausalLM needs the package folovllm.electives.moe, which is not installed here" in errors[1]
    assert source == "the model smollm2 needs the package folovllm.electives.quantization, which is not installed here"
