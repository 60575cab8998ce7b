"""Every kernel compiles for the cards people have, and fits their shared memory: no GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("milestone", "count"), [("m4", 7), pytest.param("m6", 9, marks=pytest.mark.m6)])
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90])
def test_compiles_and_fits(capability, milestone, count):
    """In a process of its own, since here Triton may be interpreting. Compiled kernels stay in Triton's cache."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("offline_compile.py")
    done = subprocess.run(
        [sys.executable, script, str(capability), milestone], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len({name.split()[0] for name, *_ in rows}) == count
    too_large = [f"{name}: {shared} of {limit} bytes" for name, shared, limit, _ in rows if shared > limit]
    assert not too_large
    spilled = [f"{name}: {stack} bytes a thread" for name, _, _, stack in rows if stack and "small_linear" in name]
    assert not spilled, "weights that a program asks for ahead of time must stay in registers"
