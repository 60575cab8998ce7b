"""The registry of attention backends, and the two that M1 and M2 run on, at the level of their contract."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from folovllm import LLM
from folovllm.attention.backends import registry
from folovllm.attention.backends.abstract import AttentionBackend, BackendUnavailable
from folovllm.attention.backends.registry import BACKENDS, get_backend
from tests.helpers import Driver, assert_logits_equal, prompts, tiny_checkpoint


class TestRegistry:
    @pytest.mark.parametrize("name", ["torch_cat", "torch_naive"])
    def test_by_name(self, name: str) -> None:
        backend = get_backend(name)
        assert issubclass(backend, AttentionBackend)
        assert backend.name == name
        assert backend.supports_block_size(1)
        assert not backend.supports_cuda_graph

    def test_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'torch_nave'.*torch_cat, torch_naive"):
            get_backend("torch_nave")

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(BACKENDS, "exotic", "no_such_package.attention:Backend")
        with pytest.raises(BackendUnavailable, match=r"'exotic' needs the package 'no_such_package'"):
            get_backend("exotic")

    def test_nothing_is_imported_before_it_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def ours() -> set[str]:
            return {m for m in sys.modules if m.partition(".")[0] in ("folovllm", "flash_attn", "flashinfer", "triton")}

        with monkeypatch.context() as patch:
            for name in ours():
                patch.delitem(sys.modules, name)
            importlib.import_module("folovllm.attention.backends.registry").get_backend("torch_naive")
            found = ours()
            for name in found:
                del sys.modules[name]
        assert "folovllm.attention.backends.torch_naive" in found
        assert not [name for name in found if "kernels" in name or not name.startswith("folovllm")]

    def test_names_are_data(self) -> None:
        assert all(target.count(":") == 1 for target in registry.BACKENDS.values())


class TestTorchCat:
    @pytest.mark.parametrize("name", ["torch_cat", "torch_cat,torch_paged"])
    def test_is_refused_where_the_cache_is_one_tensor(self, name: str) -> None:
        with pytest.raises(BackendUnavailable, match="comes with kv_cache"):
            LLM(str(tiny_checkpoint()), milestone="m3", attention_backend=name, device="cpu", use_tqdm=False)

    def test_reset_begins_another_sequence(self) -> None:
        driver = Driver(tiny_checkpoint("qwen3"), "torch_cat", max_seqs=1)
        first, second = prompts([20, 15])
        driver.step({0: first})
        for module in driver.model.modules():
            if hasattr(module, "kv_cache"):
                module.kv_cache.reset()
        driver.cached[0] = 0
        fresh = Driver(tiny_checkpoint("qwen3"), "torch_cat", max_seqs=1)
        assert_logits_equal(driver.step({0: second})[0], fresh.step({0: second})[0])


class TestTorchNaive:
    def test_reads_the_cache_and_nothing_else(self) -> None:
        """`forward` sees only what `store` wrote: a key changed in the cache afterwards changes the result."""
        driver = Driver(tiny_checkpoint("qwen3"), block_size=4)
        batch = driver.batch({0: [1], 1: [2, 3, 4]})
        kv_cache, query = driver.kv_cache[0], torch.randn(4, 4, 32)
        key, value = torch.randn(4, 2, 32), torch.randn(4, 2, 32)
        driver.backend.store(key, value, kv_cache, batch.slot_mapping)
        before = driver.backend.forward(query, kv_cache, batch)
        slot = int(batch.slot_mapping[1])
        kv_cache[1, slot // 4, slot % 4] += 1.0
        after = driver.backend.forward(query, kv_cache, batch)
        assert torch.equal(after[0], before[0])
        assert not torch.isclose(after[1:], before[1:]).all(dim=(1, 2)).any()
        assert before.shape == query.shape

    def test_other_sequences_and_unused_slots_are_never_read(self) -> None:
        driver = Driver(tiny_checkpoint("qwen3"), block_size=4)
        batch = driver.batch({0: [1] * 5, 1: [2] * 6})
        kv_cache = driver.kv_cache[0]
        driver.backend.store(torch.randn(11, 2, 32), torch.randn(11, 2, 32), kv_cache, batch.slot_mapping)
        query = torch.randn(11, 4, 32)
        before = driver.backend.forward(query, kv_cache, batch)
        assert not before.isnan().any()  # all other slots hold NaN
        for slot in driver.slots(1, 0, 6).tolist():
            kv_cache[:, slot // 4, slot % 4] = torch.nan
        assert torch.equal(driver.backend.forward(query, kv_cache, batch)[:5], before[:5])
