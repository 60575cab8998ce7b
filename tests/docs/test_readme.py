"""README's commands work in README's order, in one fresh environment: each with what came before, and nothing else."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.docs.test_commands import PRELUDE

README = ROOT / "README.md"
REASONS = ("installs", "opens a browser", "downloads")  # why a block of README may be left out elsewhere
MODEL = "--model Qwen/Qwen3-0.6B"
# The tests run this one; and it would run this test.
LEFT_TO_CI = "make test"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_place(line: str, port: int) -> str:
    """What is executed for a line: the embedded model for one to download, a free port, and an end where a person would end it."""
    line = line.replace(MODEL, "--model stories-5m").replace("localhost:8000", f"localhost:{port}")
    if line.startswith(LEFT_TO_CI):
        return ""
    if line.startswith("folovllm chat"):
        return f"echo Hello | {line}"
    if line.startswith("folovllm inspect"):
        return (
            f"{line.partition('#')[0]} --port {port} --no-browser &\nanswers localhost:{port}\nkill $!\nwait $! || true"
        )
    if line.startswith("folovllm serve"):
        command = line.partition("&")[0]
        return f"{command} --port {port} & trap 'kill $!' EXIT\nanswers localhost:{port}/health"
    return line


ANSWERS = """
answers() {
    for _ in $(seq 300); do curl -sfo /dev/null "$1" && return; sleep 0.2; done
    echo "nobody answers at $1"; return 1
}
"""


def test_a_block_that_is_left_out_says_why() -> None:
    reasons = [block.no_run for block in blocks(README) if block.no_run]
    assert all(reason.startswith(REASONS) for reason in reasons), reasons


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("curl"), reason="README's commands are Linux's, with curl"
)
def test_its_commands_work_in_its_order(tmp_path: Path) -> None:
    copy = shutil.copytree(
        ROOT, tmp_path / "folovllm", ignore=shutil.ignore_patterns(".*", "mine", "site", "*.egg-info")
    )
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("FOLOVLLM_", "PYTEST_", "MAKE", "MFLAGS", "PYTHON"))
    }
    without = [
        entry for entry in kept["PATH"].split(os.pathsep) if not entry.startswith(str(Path(sys.executable).parent))
    ]
    environment = kept | {
        "PATH": os.pathsep.join(without),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MODEL": "stories-5m",
        "PIP_COMPILE": "0",  # of all that is installed little is ever imported, and compiled then: a minute less
    }
    script = ["set -euo pipefail", "trap 'echo \"fails: $BASH_COMMAND\"' ERR", PRELUDE, ANSWERS]
    for number, block in enumerate(blocks(README)):
        if block.language == "python":
            (copy / f"block_{number}.py").write_text(block.code, "utf-8")
            script.append(f"python block_{number}.py")
        else:
            code = re.sub(r"\\\n\s*", "", block.code)
            port = free_port()
            script += [block.before, *(in_place(line, port) for line in code.splitlines())]
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=copy, env=environment, stdin=subprocess.DEVNULL, timeout=1100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert '"delta"' in done.stdout, "the server's stream is README's last answer but for the course's"


def test_the_wrong_answer_that_is_shown_is_the_courses_own() -> None:
    """What the page shows of m3.1: the answer gives these slots, and the mistake has this sentence."""
    text = README.read_text("utf-8").partition("## An exercise")[2]
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)[:2]
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert f"yours:    {scope['slots']([5, 1], 4, 2, 6).tolist()}" in shown
    wrong = ROOT / "milestones/m3_paged_kv/wrong/m3.1_contiguous.py"
    assert ast.get_docstring(ast.parse(wrong.read_text("utf-8"))) in shown
