"""A product that adds up over ranks in its last lines, beside the product and the sum that are kernels of their own."""

import faulthandler
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from folovllm.distributed.group import child_environment
from folovllm.distributed.one_shot_buffers import MOST_PROGRAMS, VALUES, OneShotBuffers, buffer_shape

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels.skinny_linear import kernel_config
from folovllm.kernels.summed_linear import can_handle, summed_linear

GEOMETRIES = [(1024, 1024), (1024, 1536), (2560, 2048), (2560, 4864), (4096, 2048), (4096, 6144), (8192, 14336)]


def one_shot_buffers(size: int) -> list[OneShotBuffers]:
    """Those of all ranks, in one process."""
    buffers = tuple(torch.zeros(buffer_shape(size), dtype=torch.int64) for _ in range(size))
    return [OneShotBuffers.of(rank, buffers) for rank in range(size)]


def add_up(
    ranks: list[OneShotBuffers], x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """What each rank gets of a whole product. In the interpreter no rank waits: each is asked until the others have sent."""
    size, before = len(ranks), [own.numbers.clone() for own in ranks]
    xs, weights = x.chunk(size, 1), [part.contiguous() for part in weight.chunk(size, 1)]
    for again in range(2):
        for own, numbers in zip(ranks, before, strict=True):
            own.numbers.copy_(numbers)
        results = [summed_linear(xs[r], weights[r], ranks[r], residual) for r in range(size)]
        assert again or results[0].isnan().all(), "the first rank did not wait for the others' values"
    return results


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of one process do not wait: for the interpreter")
class TestBuffers:
    @pytest.mark.parametrize(("size", "adds", "tokens"), [(2, True, 1), (2, True, 4), (3, False, 2)])
    def test_every_rank_has_the_whole_sum(self, size: int, tokens: int, adds: bool) -> None:
        """One sum after the other, of other numbers and other shapes, in buffers that nobody clears."""
        generator, ranks = torch.Generator().manual_seed(tokens), one_shot_buffers(size)
        for rows, width in ((7, 24), (5, 132), (7, 24)):
            x = torch.randn(tokens, size * width, generator=generator)
            weight = torch.randn(rows, size * width, generator=generator) / width**0.5
            residual = torch.randn(tokens, rows, generator=generator) if adds else None
            results = add_up(ranks, x, weight, residual)
            expected = (x.double() @ weight.double().T).float() + (0 if residual is None else residual)
            assert torch.allclose(results[0], expected, atol=1e-5)
            assert all(torch.equal(result, results[0]) for result in results), "to the last bit"
        assert ranks[0].numbers.max() == 4 and all(torch.equal(own.numbers, ranks[0].numbers) for own in ranks)

    def test_a_greeting_is_no_letter(self) -> None:
        ranks = one_shot_buffers(2)
        ranks[0].write_trial()
        assert not any(own.has_trials() for own in ranks)
        ranks[1].write_trial()
        assert all(own.has_trials() for own in ranks)
        assert add_up(ranks, torch.ones(1, 8), torch.ones(3, 8), None)[0].eq(8).all()

    def test_numbers_of_sums_go_round(self) -> None:
        ranks, x, weight = one_shot_buffers(2), torch.ones(1, 8), torch.ones(3, 8)
        for own in ranks:
            own.numbers.fill_(2**31 - 2)
        for _ in range(4):
            assert add_up(ranks, x, weight, None)[1].eq(8).all()
        assert ranks[0].numbers[0] == -(2**31) + 2

    def test_pairs_of_numbers(self) -> None:
        generator, ranks = torch.Generator().manual_seed(0), one_shot_buffers(2)
        x = torch.randn(2, 68, generator=generator).half()
        weight = torch.randn(5, 68, generator=generator).half()
        result = add_up(ranks, x, weight, None)[0]
        assert torch.allclose(result.double(), x.double() @ weight.double().T, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_the_boxes_are_large_enough(tokens: int) -> None:
    for rows, width in GEOMETRIES:
        weight = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
        _, per_program, _ = kernel_config(tokens, rows, 2 * width)
        assert can_handle(tokens, weight) and tokens * per_program <= VALUES and rows <= MOST_PROGRAMS * per_program
    assert not can_handle(tokens, torch.empty(8 * MOST_PROGRAMS, 64, dtype=torch.bfloat16, device="meta"))


@pytest.mark.multi_gpu
def test_on_two_gpus_as_two_kernels(tmp_path: Path) -> None:
    """Whole numbers, so that every order of a sum gives the same; then a captured chain of sums, 1,000 times."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", __file__, str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env=child_environment() | {"PYTHONPATH": path}, timeout=90)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["right"] * 2


def as_rank() -> str:
    """One of two ranks: what went wrong, or "right"."""
    from folovllm.distributed.group import ProcessGroup

    rank = int(os.environ["RANK"])
    group = ProcessGroup(rank, 2, torch.device("cuda", rank))
    if group.one_shot_buffers is None:
        return "no one_shot_buffers"
    generator = torch.Generator("cuda").manual_seed(0)  # all ranks know all numbers

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator, device="cuda").bfloat16()

    chain = []
    for tokens in (1, 2, 4):
        for rows, width in GEOMETRIES[:6]:
            x, weight = whole_numbers(tokens, 2 * width), whole_numbers(rows, 2 * width)
            residual = whole_numbers(tokens, rows)
            own_x, own_weight = (part.chunk(2, 1)[rank].contiguous() for part in (x, weight))
            expected = (x.double() @ weight.double().T + residual.double()).bfloat16()
            parts = group.all_reduce(own_x.float() @ own_weight.float().T) + residual.float()
            if not torch.equal(parts.bfloat16(), expected):
                return "the sum by a kernel of its own is wrong"
            chain.append((own_x, own_weight, residual, expected))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = [summed_linear(x, weight, group.one_shot_buffers, residual) for x, weight, residual, _ in chain]
    stream.synchronize()
    if not all(torch.equal(result, expected) for result, (*_, expected) in zip(results, chain, strict=True)):
        return "wrong"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [summed_linear(x, weight, group.one_shot_buffers, residual) for x, weight, residual, _ in chain]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for result in results:
            result.zero_()
        graph.replay()
        for result, (*_, expected) in zip(results, chain, strict=True):
            wrong += result.ne(expected).any()
    count = int(wrong)
    del graph
    group.close()
    return f"{count} wrong replays" if count else "right"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60, exit=True)  # who waits for a value in vain goes with its kernel
    Path(sys.argv[1], os.environ["RANK"]).write_text(as_rank())
