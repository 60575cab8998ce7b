"""The whole engine on kernels: interpreted here, a few tokens only; on a GPU, M3's workloads."""

import pytest
import torch

from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import ARRIVALS, KINDS, MAX_MODEL_LEN, Request, make_engine, serve, workload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_few_tokens_equal_m3s():
    """Two layers, prompts on both sides of a block, one sequence longer than the others; fused layers included."""
    model = tiny_checkpoint("qwen3", num_hidden_layers=2)
    requests = [
        Request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts([1, 7, 18]), (6, 3, 5), strict=True)
    ]
    outputs = {}
    for backend in ("torch_paged", "triton"):
        engine = make_engine(model, milestone="m4", attention_backend=backend, max_num_seqs=4, device=DEVICE)
        outputs[backend] = [output.outputs[0].token_ids for output in serve(engine, requests)]
    assert outputs["triton"] == outputs["torch_paged"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrival", ARRIVALS)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_m3s_workloads(kind, arrival, block_size):
    """Every request, however it arrives, in float32, where M1's answers hold up to close calls."""
    expected = workload(kind)
    engine = make_engine(
        expected.model, milestone="m4", attention_backend="triton", dtype="float32", block_size=block_size,
        device="cuda", num_kv_blocks=32 * -(-MAX_MODEL_LEN // block_size),
    )  # fmt: skip
    expected.check(serve(engine, expected.requests, arrival))
