"""The registry of attention backends, and the two that M1 and M2 run on, at the level of their contract."""

import importlib
import sys

import pytest

from folovllm.attention.backends.abstract import BackendUnavailable
from folovllm.attention.backends.registry import BACKENDS, get_backend


class TestRegistry:
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
