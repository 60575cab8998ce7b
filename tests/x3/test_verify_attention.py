"""The attention of checked rows: its work list, the kernel, and the backend that chooses it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.torch_naive import TorchNaiveBackend
from folovllm.attention.backends.triton import TritonBackend
from folovllm.config import EngineConfig
from folovllm.electives.spec_decode.attention import TritonVerifyBackend
from folovllm.electives.spec_decode.kernels.verify_attention import SplitKVVerify, tile_shape
from folovllm.engine import build_batch
from folovllm.engine.extension import extension_of
from folovllm.engine.setup import set_up
from folovllm.kernels.decode import DecodeConfig
from folovllm.sampling_params import SamplingParams
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.kv_format import FP8, UNSCALED, KVScales, decode, encode
from tests.helpers import prompts, tiny_checkpoint
from tests.m4.cases import DEVICE, Paged, assert_close, starts
from tests.m4.conftest import like_a_gpu  # noqa: F401
from tests.workloads import Request, serve
from tests.x3.engines import Pair, speculation_of
from tests.x3.test_lossless import capture_drafts
from tools.bench_attention import make_batch, verified

SMALL = DecodeConfig(tile=16, min_chunk=32, max_chunk=32, queue_chunk=32, merge_step=2)
LENS = [70, 1, 33, 16, 47, 0, 17, 130]  # tokens of each sequence; of which new:
NEW = [8, 1, 2, 5, 16, 0, 3, 6]  # across the border of a block and of a chunk, behind one, and all there are


def check(
    lens: list[int], new: list[int], heads: tuple[int, int] = (4, 2), dim: int = 16, block_size: int = 16, most: int = 8,
    dtype: torch.dtype = torch.float32, config: DecodeConfig | None = SMALL, num_programs: int | None = 3, turns: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, SplitKVVerify]:  # fmt: skip
    """Plan and run so many times (the counters must wind back); returns (out, reference, the object)."""
    torch.manual_seed(0)
    paged, query_start_loc = Paged.make(lens, block_size, heads[1], dim, dtype), starts(new)
    query = torch.randn(sum(new), heads[0], dim, device=DEVICE, dtype=dtype)
    kernel = SplitKVVerify(sum(new), most, *heads, dim, block_size, DEVICE, dtype.itemsize, False, config, num_programs)
    out = torch.empty_like(query)
    for _ in range(turns):
        out.fill_(float("nan"))
        kernel.plan(query_start_loc, paged.seq_lens, sum(new))
        kernel(query, paged.kv_cache, query_start_loc, paged.seq_lens, paged.block_tables, max(new), dim**-0.5, out)
        assert not kernel.queue.any()
    return out, paged.attention(query, new), kernel


class TestPlan:
    @given(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), min_size=1, max_size=5), st.sampled_from([2, 8])
    )
    @settings(max_examples=5, deadline=None)
    def test_every_new_token_is_in_one_tile(self, seqs: list[tuple[int, int]], most: int) -> None:
        """Sequences of (tokens before, new tokens); the last tile's last token sees all, and padding gets nothing."""
        new = [n for _, n in seqs] + [7]
        lens = [cached + n for cached, n in seqs] + [0]
        kernel = SplitKVVerify(sum(new), most, 2, 2, 16, 16, DEVICE, config=SMALL, num_programs=4)
        kernel.plan(starts(new), torch.tensor(lens, dtype=torch.int32, device=DEVICE), sum(new))
        expected = [
            (s, first + done, min(most, n - done), length - n + min(done + most, n))
            for s, (n, length, first) in enumerate(zip(new, lens, starts(new).tolist()[:-1], strict=True))
            for done in range(0, min(n, length), most)
        ]
        count = int(kernel.count[0])
        found = torch.cat([kernel.places[:count], kernel.ends[:count, None]], dim=1)
        assert [tuple(tile) for tile in found.tolist()] == expected and count <= kernel.num_tiles
        total, chunk = kernel.header.tolist()
        items = kernel.items.view(-1, 4)[: total // 2].tolist()
        chunks = [(t, c) for t, (*_, end) in enumerate(expected) for c in range(-(-end // chunk))]
        assert sorted((t, c) for t, c, _, _ in items) == chunks
        assert len({first + c for _, c, _, first in items}) == len(items), "partial results overlap"

    def test_a_tile_takes_what_its_registers_hold(self) -> None:
        assert tile_shape(5, 2, 256) == (8, 16)
        assert tile_shape(16, 7, 256) == (16, 128)
        assert tile_shape(16, 8, 512) == (8, 64), "wide heads"
        assert tile_shape(100, 1, 128) == (16, 16), "more is a prompt"
        assert tile_shape(3, 71, 128) == (1, 128)


@pytest.mark.usefixtures("like_a_gpu")
class TestKernel:
    """Chunks of 32 keys in tiles of 16; all that no sequence owns is NaN."""

    @pytest.mark.parametrize(
        ("lens", "new", "how"),
        [
            (LENS, NEW, {"heads": (2, 1), "block_size": 24, "turns": 2}),
            ([70, 33], [8, 2], {"block_size": 8}),
            ([70, 33], [8, 2], {"block_size": 64}),
            ([70, 9], [5, 8], {"heads": (2, 2), "dim": 64, "dtype": torch.float16}),
            ([70, 9], [5, 8], {"heads": (7, 1), "dim": 64, "dtype": torch.float16}),
            ([70, 9], [5, 8], {"heads": (8, 1), "dim": 128, "dtype": torch.float16}),
            ([18, 41, 17], [18, 9, 1], {"most": 4}),
            *(([300, 5], [5, 4], {"config": None, "num_programs": num}) for num in (1, 200, None)),
        ],
        ids=[
            "around every border, in blocks of no power of two, twice", "blocks shorter than a tile",
            "blocks longer than a chunk", "a head for each", "seven heads in a group", "wide heads",
            "a prompt, more than a tile has room for", "one program", "more programs than work", "its own sizes",
        ],
    )  # fmt: skip
    def test_equals_plain_attention(self, lens: list[int], new: list[int], how: dict[str, Any]) -> None:
        """In half precision, too: partial results stay in float32."""
        out, expected, _ = check(lens, new, **how)
        assert_close(out, expected)

    @pytest.mark.parametrize("rows", [2, 3, 5, 16])
    def test_one_long_and_one_short(self, rows: int) -> None:
        """Each length once at the end of a chunk, and once all but the first row behind it."""
        out, expected, kernel = check([160, 95 + rows, rows], [rows] * 3, heads=(2, 1), most=rows)
        assert kernel.tokens >= rows, "one tile each"
        assert_close(out, expected)


def batch_of(lens: list[int], new: list[int], paged: Paged, num_decodes: int) -> ForwardBatch:
    """A step as backends see it."""
    nothing = torch.zeros(sum(new), dtype=torch.int64, device=DEVICE)
    return ForwardBatch(
        input_ids=nothing, positions=nothing, slot_mapping=nothing, query_start_loc=starts(new), seq_lens=paged.seq_lens,
        block_tables=paged.block_tables, logits_indices=starts(new)[1:] - 1, num_seqs=len(lens), num_decodes=num_decodes,
        max_query_len=max(new), max_seq_len=max(lens), query_lens_host=new, seq_lens_host=lens,
    )  # fmt: skip


class TestBackend:
    CONFIG = AttentionConfig(4, 2, 32, torch.float32, DEVICE, 16, 8)

    @pytest.mark.parametrize(("seqs", "num_decodes", "is_its_own"), [
        ([(40, 1), (7, 1), (33, 5), (90, 2)], 2, True),
        ([(40, 1), (33, 17), (90, 2)], 1, False),
        ([(40, 1), (7, 1)], 2, False),
    ], ids=["checks", "with a prompt", "decodes"])  # fmt: skip
    def test_takes_steps_of_few_tokens(self, seqs: list[tuple[int, int]], num_decodes: int, is_its_own: bool) -> None:
        lens, new = map(list, zip(*seqs, strict=True))
        paged, query = Paged.make(lens, 16, 2, 32), torch.randn(sum(new), 4, 32, device=DEVICE)
        batch, backend = batch_of(lens, new, paged, num_decodes), TritonVerifyBackend(self.CONFIG, 6, 24)
        backend.plan(replace(batch, num_decodes=0, max_query_len=6))  # another step, which leaves no trace
        backend.plan(batch)
        assert (backend._verify.num_tiles > 0) is is_its_own
        expected = TorchNaiveBackend(self.CONFIG).forward(query, paged.kv_cache, batch)
        assert_close(backend.forward(query, paged.kv_cache, batch), expected)

    def test_the_benchmark_compares_like_with_like(self) -> None:
        """Both kernels are given the same captured step."""
        paged, query = Paged.make([40, 40], 16, 2, 32), torch.randn(8, 4, 32, device=DEVICE)
        step = verified(replace(make_batch([40, 40], 16, True, DEVICE), block_tables=paged.block_tables), 4)
        for backend in TritonBackend(self.CONFIG), TritonVerifyBackend(self.CONFIG, 4, 8):
            backend.plan(step)
            out = backend.forward(query, paged.kv_cache, step)
            assert_close(out, paged.attention(query, [4, 4]))

    def test_a_captured_step_writes_no_row_of_padding(self) -> None:
        """A prompt and drafts with room for two sequences and four tokens more; then nothing but padding."""
        paged, backend = Paged.make([30, 50, 0, 0], 16, 2, 32), TritonVerifyBackend(self.CONFIG, 6, 39)
        query, real = torch.randn(39, 4, 32, device=DEVICE), [30, 5]
        batch = replace(batch_of([30, 50, 0, 0], [*real, 0, 4], paged, 0), is_padded=True, has_drafts=True)
        backend.plan(batch)
        out = torch.full_like(query, float("nan"))
        arguments = batch.query_start_loc, paged.seq_lens, paged.block_tables, 39, 32**-0.5, out
        backend._verify(query, paged.kv_cache, *arguments)
        assert_close(out[:35], paged.attention(query[:35], [*real, 0, 0]))
        assert out[35:].isnan().all()
        backend.plan(replace(batch, seq_lens=torch.zeros_like(batch.seq_lens)))
        out.fill_(float("nan"))
        backend._verify(query, paged.kv_cache, *arguments)
        assert out.isnan().all() and not backend._verify.header[0]

    @pytest.mark.parametrize("is_padded", [False, True])
    def test_a_layer_with_a_window(self, is_padded: bool) -> None:
        """The step is planned once, for layers with and without; the prefill kernel is the one that knows windows."""
        lens, new, window = [70, 40, 0], [5, 6, 2], 12
        paged, query = Paged.make(lens, 16, 2, 32), torch.randn(sum(new), 4, 32, device=DEVICE)
        batch = replace(batch_of(lens, new, paged, 0), is_padded=is_padded, has_drafts=is_padded)
        backend, naive = TritonVerifyBackend(self.CONFIG, 6, 13), TorchNaiveBackend(self.CONFIG)
        layers = [(backend.of_layer(UNSCALED, size), naive.of_layer(UNSCALED, size)) for size in (window, None)]
        backend.plan(batch)
        assert backend._verify.num_tiles > 0
        real = replace(batch_of(lens[:2], new[:2], paged, 0), block_tables=paged.block_tables[:2])
        for ours, expected in layers:
            out = ours.forward(query, paged.kv_cache, batch)[:11]
            assert_close(out, expected.forward(query[:11], paged.kv_cache, real))

    def test_numbers_of_8_bits(self) -> None:
        """Their scales belong to a layer, the plan to the step: what is planned serves the copy with scales."""
        lens, new, scales = [75, 6, 33], [5, 6, 2], KVScales(0.25, 0.03)
        paged, query = Paged.make(lens, 16, 2, 32), torch.randn(sum(new), 4, 32, device=DEVICE)
        batch = batch_of(lens, new, paged, 0)
        factors = scales.key_factor, scales.value_factor
        cache = torch.stack([encode(part, f) for part, f in zip(paged.kv_cache, factors, strict=True)])
        backend = TritonVerifyBackend(replace(self.CONFIG, kv_dtype=FP8), 6, 13)
        backend.plan(batch)
        out = backend.of_layer(scales).forward(query, cache, batch)
        steps = zip(cache, (scales.key, scales.value), strict=True)
        whole = torch.stack([decode(part, scale, torch.float32) for part, scale in steps])
        assert_close(out, TorchNaiveBackend(self.CONFIG).forward(query, whole, batch))


class TestEngine:
    @pytest.mark.parametrize("drafts", [None, 3])
    def test_who_attends(self, drafts: int | None) -> None:
        """Without drafts the very class that was there before."""
        fields = {"device": str(DEVICE), "dtype": "float32", "attention_backend": "triton"}
        if drafts:
            fields |= {"speculative_method": "ngram", "num_speculative_tokens": drafts}
        setup = set_up(EngineConfig(model=str(tiny_checkpoint()), **fields))
        backend = build_batch.attention_backend(setup, extension_of(setup))
        assert type(backend) is (TritonVerifyBackend if drafts else TritonBackend)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="test_on_a_gpu.py does more")
    def test_a_captured_step_with_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same text as torch's, by the kernel that decodes and by the one that checks."""
        used: list[int] = []
        run = SplitKVVerify.__call__

        def watched(kernel: SplitKVVerify, query: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            used.append(len(query))
            return run(kernel, query, *rest, **more)

        capture_drafts(monkeypatch, 6)
        monkeypatch.setattr(SplitKVVerify, "__call__", watched)
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True)
        requests = [Request(prompt, params) for prompt in prompts([6, 3], seed=4)]
        model = str(tiny_checkpoint(num_heads=2, num_kv_heads=1, num_hidden_layers=1))
        fields: dict[str, Any] = {"model": model, "max_model_len": 16, "max_num_seqs": 2, "block_size": 4}
        pair = Pair.of(requests, milestone="m6", attention_backend="torch_paged", **fields)
        engine = pair.engine("right", k=2, attention_backend="triton")
        pair.check(serve(engine, requests))
        assert speculation_of(engine).num_accepted == 4 and 6 in used, "two sequences, three tokens each"
