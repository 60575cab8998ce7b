"""Capturing and replaying, on CPU and (marked) on a GPU."""

import pytest
import torch

from folovllm.worker.step_graph import POISON, CpuGraph, CudaGraph, decode_buckets
from tests.tiny import worked_case


class TestCpuGraph:
    def test_a_worked_case_of_capture(self) -> None:
        seen: list[list[int]] = []
        graph = CpuGraph(torch.tensor([1, 2]))
        graph.capture(lambda x: seen.append(x.tolist()))
        got = {"the work ran on": seen, "the input afterwards": graph.static_input}
        says = "a capture runs the work once, on what is in the static input, and poisons that afterwards"
        worked_case("m6.1 capture", got, {"the work ran on": [[1, 2]], "the input afterwards": [POISON, POISON]}, says)

    def test_a_worked_case_of_replay(self) -> None:
        seen: list[object] = []
        static, value = torch.tensor([1, 2]), torch.tensor([3, 4])
        graph = CpuGraph(static)
        graph.capture(lambda x: seen.append([x.tolist(), x.data_ptr() == static.data_ptr()]))
        seen.clear()
        graph.replay(value)
        got = {"ran on, in the static input": seen, "the input afterwards": static, "the caller's": value}
        says = "a replay copies [3, 4] into the static input, runs there, and poisons it; the caller's tensor stays"
        worked_case("m6.1 replay", got, dict(zip(got, [[[[3, 4], True]], [POISON, POISON], [3, 4]], strict=True)), says)

    def test_every_replay_does_the_captured_work_on_new_input(self) -> None:
        graph, out = CpuGraph(torch.zeros(3, dtype=torch.int32)), torch.zeros(3, dtype=torch.int32)
        graph.capture(lambda x: out.copy_(2 * x))
        for value in ([1, 2, 3], [4, 5, 6]):
            graph.replay(torch.tensor(value, dtype=torch.int32))
            assert out.tolist() == [2 * x for x in value], "the captured work, on the newest input"
            assert (graph.static_input == POISON).all(), "what a replay leaves behind is poison"

    def test_a_replay_of_nothing_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="capture"):
            CpuGraph(torch.zeros(1)).replay(torch.zeros(1))


@pytest.mark.gpu
def test_a_cuda_graph_does_what_the_cpu_graph_does() -> None:
    static, out = torch.zeros(3, dtype=torch.int32, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    graph = CudaGraph(static, torch.cuda.graph_pool_handle(), torch.cuda.Stream(), had_dry_run=False)
    graph.capture(lambda x: out.copy_(2 * x))
    graph.replay(torch.tensor([1, 2, 3], dtype=torch.int32).pin_memory())
    assert out.tolist() == [2, 4, 6]


@pytest.mark.gpu
def test_a_kernel_that_no_dry_run_met_is_loaded_while_it_is_captured() -> None:
    from folovllm.kernels.activation import silu_and_mul

    static, out = torch.zeros(3, 2 * 77, device="cuda"), torch.zeros(3, 77, device="cuda")
    graph = CudaGraph(static, torch.cuda.graph_pool_handle(), torch.cuda.Stream(), had_dry_run=True)
    graph.capture(lambda x: out.copy_(silu_and_mul(x) + 1))
    assert not out.any(), "a capture runs nothing"
    value = torch.randn(3, 2 * 77)
    graph.replay(value.pin_memory())
    gate, up = value.chunk(2, 1)
    assert torch.allclose(out.cpu(), torch.nn.functional.silu(gate) * up + 1, atol=1e-5)


@pytest.mark.parametrize(
    ("most", "widths"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (40, [1, 2, 4, 8, 16, 32, 40])]
)
def test_buckets_end_with_the_largest_batch(most: int, widths: list[int]) -> None:
    assert decode_buckets(most) == widths
