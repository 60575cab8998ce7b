"""Several machines, or so it seems: two torchruns on the loopback interface, one rank each; and a rank for each of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from folovllm import LLM, SamplingParams
from tests.helpers import tiny_checkpoint

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def torchrun(node: int, port: int, model: str, folder: Path) -> subprocess.Popen[str]:
    """One of two nodes, with a rank each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    command += ["-m", "tests.m6.two_ranks", model, "write", str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names Linux's loopback interface")
def test_two_nodes(tmp_path: Path) -> None:
    model, port = str(tiny_checkpoint()), free_port()
    nodes = [torchrun(node, port, model, tmp_path) for node in range(2)]
    for node in nodes:
        output, _ = node.communicate(timeout=120)
        assert node.returncode == 0, output
    with LLM(model, device="cpu", max_model_len=128, max_num_seqs=4, use_tqdm=False) as alone:
        how = [SamplingParams(max_tokens=12, seed=5, ignore_eos=True), SamplingParams(max_tokens=9, seed=6, top_p=0.8)]
        answers = alone.generate([[1, 2, 3], [9] * 20], how, use_tqdm=False)
    expected = [answer.outputs[0].token_ids for answer in answers]
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [expected, expected]
