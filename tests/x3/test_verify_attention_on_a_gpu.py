"""The attention of checked rows on a GPU: half precision, 8 bits, captured graphs, races."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.electives.spec_decode.kernels.verify_attention import SplitKVVerify
from folovllm.kernels.decode import DecodeConfig
from folovllm.step.kv_format import UNSCALED, KVScales, decode, encode
from tests.m4.cases import DEVICE, Paged, assert_close, starts

pytestmark = pytest.mark.gpu
LENS = [8, 17, 64, 65, 255, 256, 257, 0, 512, 513, 1000, 2047, 4095]
NEW = [8, 2, 5, 3, 1, 16, 4, 0, 9, 16, 2, 8, 5]
# B, Hq, Hkv, D
SHAPES = [(16, 16, 8, 128), (256, 9, 3, 64), (48, 4, 4, 32), (16, 14, 2, 64), (16, 32, 4, 128), (16, 8, 1, 256)]
SHORT = DecodeConfig(min_chunk=64, max_chunk=64, queue_chunk=64, merge_step=4)


class Checks:
    """Rows to check over poisoned blocks, and where the answer goes."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, lens: list[int], new: list[int], most: int = 16,
        scales: KVScales | None = None, config: DecodeConfig | None = None, num_programs: int | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        block_size, *heads, dim = shape
        self.paged, self.new, self.starts = Paged.make(lens, block_size, heads[1], dim, dtype), new, starts(new)
        self.cache, self.scales = self.paged.kv_cache, scales or UNSCALED
        if scales is not None:
            factors = scales.key_factor, scales.value_factor
            self.cache = torch.stack([encode(part, f) for part, f in zip(self.cache, factors, strict=True)])
            parts = [decode(part, f, dtype) for part, f in zip(self.cache, (scales.key, scales.value), strict=True)]
            self.paged.kv_cache = torch.stack(parts)
        self.query = torch.randn(sum(new), heads[0], dim, device=DEVICE, dtype=dtype)
        self.kernel = SplitKVVerify(
            len(self.query), most, heads[0], heads[1], dim, block_size, DEVICE, dtype.itemsize, scales is not None, config, num_programs
        )  # fmt: skip
        self.out = torch.empty_like(self.query)

    def step(self) -> None:
        """What a captured step does."""
        self.out.fill_(float("nan"))
        self.kernel.plan(self.starts, self.paged.seq_lens, len(self.query))
        self.kernel(
            self.query, self.cache, self.starts, self.paged.seq_lens, self.paged.block_tables, len(self.query),
            self.query.shape[-1] ** -0.5, self.out, scales=self.scales,
        )  # fmt: skip

    def captured(self) -> torch.cuda.CUDAGraph:
        """A graph of `step`, which has run before."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def wound_back(self) -> bool:
        """Whether the counters are as before."""
        return not self.kernel.queue.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("most", "num_programs"), [(16, None), (4, None), (16, 7)])
def test_it_equals_float64(shape: tuple[int, ...], dtype: torch.dtype, most: int, num_programs: int | None) -> None:
    if dtype == torch.float32 and shape[-1] == 256:
        pytest.skip("the backend has no tiles for so wide heads in float32")
    checks = Checks(shape, dtype, LENS, NEW, most, num_programs=num_programs)
    for _ in range(3):
        checks.step()
        assert checks.wound_back()
    assert_close(checks.out, checks.paged.attention(checks.query, NEW))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="numbers of 8 bits come with 8.9"
)
@pytest.mark.parametrize("shape", [(16, 16, 8, 128), (16, 32, 4, 128), (256, 9, 3, 64)], ids=str)
def test_numbers_of_8_bits(shape: tuple[int, int, int, int]) -> None:
    checks = Checks(shape, torch.bfloat16, LENS, NEW, scales=KVScales(0.25, 0.03125))
    checks.step()
    assert_close(checks.out, checks.paged.attention(checks.query, NEW))


@pytest.mark.parametrize("num_programs", [None, 132])
def test_the_merge_has_no_race(num_programs: int | None) -> None:
    """Thousands of replays, the output poisoned before each: every bit the same. Chunks are short."""
    checks = Checks((16, 16, 8, 128), torch.bfloat16, LENS, NEW, config=SHORT, num_programs=num_programs)
    checks.step()
    expected, differing = checks.out.clone(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    assert_close(expected, checks.paged.attention(checks.query, NEW))
    graph = checks.captured()
    for _ in range(2000):
        graph.replay()
        differing += (checks.out.view(torch.int16) != expected.view(torch.int16)).sum()
    assert differing.item() == 0 and checks.wound_back()


def test_one_graph_serves_all_steps() -> None:
    """Captured with padding alone, replayed with short, long and uneven sequences, and with a prompt among them."""
    longest, tokens = [4096] * 8, 64
    checks = Checks((16, 16, 8, 128), torch.bfloat16, [*longest, 0], [8] * 8 + [0], most=8)
    checks.paged.seq_lens.zero_()
    checks.step()
    graph = checks.captured()
    for lens, new in (
        ([0] * 8, [0] * 8), (longest, [8] * 8), ([9, 4096, 0, 0, 0, 0, 0, 0], [5, 2, 0, 0, 0, 0, 0, 0]),
        ([700, 1500, 33, 0, 64, 65, 1, 4000], [8, 1, 3, 0, 8, 8, 1, 8]),
        ([4000, 300, 5, 0, 0, 0, 0, 0], [3, 50, 5, 0, 0, 0, 0, 0]),
    ):  # fmt: skip
        real = sum(new)
        checks.paged.seq_lens.copy_(torch.tensor([*lens, 0]))
        checks.starts.copy_(starts([*new, tokens - real]))
        graph.replay()
        assert_close(checks.out[:real], checks.paged.attention(checks.query[:real], [*new, 0]))
        assert checks.out[real:].isnan().all() and checks.wound_back()
