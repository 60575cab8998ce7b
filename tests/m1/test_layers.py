"""RMSNorm, RotaryEmbedding, SiluAndMul and the linears against PyTorch's and transformers' own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding, rope_amplitude, rope_frequencies, rotate
from tests.tiny import worked_case

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARNS = {
    "yarn": YARN,
    "yarn, given amplitude": {**YARN, "attention_factor": 0.7},
    "yarn, both mscales": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.6},
    "yarn, other borders": {**YARN, "beta_fast": 4, "beta_slow": 2, "truncate": False},
    "yarn, borders in one place": {**YARN, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "yarn, by nothing": {**YARN, "factor": 1.0},
    "yarn, trained at the whole context": {"rope_type": "yarn", "factor": 2.0},
}


def rms_norm(size: int, eps: float = 1e-6) -> RMSNorm:
    norm = RMSNorm(size, eps).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    return norm


class TestRMSNorm:
    def test_a_worked_case(self) -> None:
        """The sum is [1, 7]: its squares 1 and 49, their mean 25, the root 5; the weights are 1 and 10."""
        norm = RMSNorm(2, eps=0.0).requires_grad_(False)
        norm.weight.copy_(torch.tensor([1.0, 10.0]))
        x, residual = torch.tensor([0.0, 3.0]), torch.tensor([1.0, 4.0])
        normed, stream = norm(x, residual)
        got = {"normed": normed, "passed on": stream, "x afterwards": x, "residual afterwards": residual}
        expected = {
            "normed": [0.2, 14.0], "passed on": [1.0, 7.0], "x afterwards": [0.0, 3.0], "residual afterwards": [1.0, 4.0]
        }  # fmt: skip
        says = "[0, 3] + [1, 4] = [1, 7], divided by its root mean square, which is 5, then times the weights [1, 10]"
        worked_case("m1.3", got, expected, says)

    def test_squares_do_not_overflow_in_float16(self) -> None:
        norm = RMSNorm(2, eps=0.0).requires_grad_(False).half()
        norm.weight.fill_(1.0)
        out = norm(torch.tensor([300.0, 300.0], dtype=torch.float16))
        says = "300 over the root mean square of 300 and 300 is 1; the mean is done in float32, for the square, 90,000, is beyond float16"
        worked_case("m1.3 float16", out, [1.0, 1.0], says)

    @pytest.mark.parametrize("shape", [(5, 16), (3, 4, 16)])
    @pytest.mark.parametrize("eps", [1e-6, 0.1])
    def test_equals_pytorch(self, shape: tuple[int, ...], eps: float) -> None:
        norm, x = rms_norm(16, eps), torch.randn(shape)
        says = f"x / sqrt(mean(x^2) + eps) * weight over the last dimension of {[*shape]}, eps = {eps} under the root"
        torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, eps), msg=lambda said: f"{says}\n{said}")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_equals_transformers_bit_for_bit(self, dtype: torch.dtype) -> None:
        norm, theirs, x = rms_norm(64).to(dtype), LlamaRMSNorm(64).to(dtype), torch.randn(7, 64).to(dtype)
        theirs.weight.data = norm.weight.data
        out, (with_residual, total) = norm(x), norm(x, x)
        assert out.dtype == dtype, f"the result has the dtype of x, {dtype}, not {out.dtype}"
        assert total.dtype == dtype, f"the sum has the dtype of x, {dtype}, not {total.dtype}: it is the next residual"
        unrounded = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * norm.weight).to(dtype)
        clause = "the result returns to the dtype of x before it is multiplied by the weight"
        if not torch.equal(out, unrounded):
            clause = "the mean and the division are done in float32"
        off = int((out != theirs(x)).sum())
        assert not off, f"{off} of {out.numel()} numbers differ from transformers' in {dtype}: {clause}"
        assert torch.equal(with_residual, theirs(x + x)), "with a residual, the sum is normalised in the same way"


def llama_config(rope: dict[str, Any] | None = None, head_dim: int = 32) -> LlamaConfig:
    parameters = {"rope_type": "default", "rope_theta": 5000.0, **(rope or {})}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 512}
    return LlamaConfig(**sizes, rope_parameters=parameters)


def hf_rotated(config: LlamaConfig, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor):
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    return apply_rotary_pos_emb(query, key, cos[0], sin[0], unsqueeze_dim=1)


class TestRotary:
    def test_a_worked_case(self) -> None:
        """Cosines and sines are no angle's here, so that each product shows in the result."""
        out = rotate(torch.tensor([[[1.0, 2, 3, 4]]]), torch.tensor([[[5.0, 7.0]]]), torch.tensor([[[10.0, 100.0]]]))
        says = "the pairs are (1, 3) and (2, 4), (a, b) becomes (a cos - b sin, b cos + a sin), cos is (5, 7), sin is (10, 100)"
        worked_case("m1.2", out.flatten(), [5.0 - 30, 14.0 - 400, 15.0 + 10, 28.0 + 200], says)

    @pytest.mark.parametrize(
        "rope",
        [None, LLAMA3, {"rope_theta": 1e6}, *YARNS.values()],
        ids=["plain", "llama3", "theta 1e6", *YARNS],
    )
    @pytest.mark.parametrize("head_dim", [32, 64, 128])
    def test_equals_transformers(self, rope: dict[str, Any] | None, head_dim: int) -> None:
        config = llama_config(rope, head_dim)
        query, key = torch.randn(40, 4, head_dim), torch.randn(40, 2, head_dim)
        positions = torch.cat((torch.arange(20), torch.arange(492, 512)))
        frequencies = rope_frequencies(config, head_dim)
        torch.testing.assert_close(frequencies, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)
        rotary = RotaryEmbedding(frequencies, 512, rope_amplitude(config))
        # An angle of 500 has an ulp of 3e-5. Yarn's frequencies are blended, with a rounding more, and its results longer.
        tol = 3e-4 if rope in YARNS.values() else 1e-4
        expected, given = hf_rotated(config, positions, query, key), query.clone()
        for ours, theirs in zip(rotary(positions, query, key), expected, strict=True):
            says = f"heads of {head_dim}: pair (i, i + {head_dim // 2}) turns by the angle of its position, as in transformers"
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tol, msg=says)
        assert torch.equal(query, given), "what was given is left as it was"

    def test_bfloat16_is_rotated_in_float32(self) -> None:
        query = torch.randn(20, 4, 32).bfloat16()
        rotary = RotaryEmbedding(rope_frequencies(llama_config(), 32), 512)
        out, _ = rotary(torch.arange(400, 420), query, query)
        exact, _ = rotary(torch.arange(400, 420), query.float(), query.float())
        assert out.dtype == torch.bfloat16, "the result has the dtype of x"
        assert torch.equal(out, exact.bfloat16()), "cos, sin and the products are float32; only the result is rounded"

    def test_cache_is_float32_cosines_then_sines(self) -> None:
        rotary = RotaryEmbedding(rope_frequencies(llama_config(), 32), 100)
        assert rotary.cos_sin_cache.shape == (100, 32), "a row for each position: D/2 cosines, then D/2 sines"
        assert rotary.cos_sin_cache.dtype == torch.float32, "angles of thousands need float32"
        torch.testing.assert_close(rotary.cos_sin_cache[3, 16], torch.tensor(3.0).sin())
        assert "cos_sin_cache" not in rotary.state_dict(), "it follows from the configuration: no checkpoint has it"

    def test_both_places_of_rope_theta(self) -> None:
        def found(**fields: Any) -> torch.Tensor:
            return rope_frequencies(SimpleNamespace(max_position_embeddings=512, **fields), 16)

        old = found(rope_theta=7.0, rope_scaling=None)
        modern = found(rope_parameters={"rope_theta": 7.0, "rope_type": "default"})
        assert torch.equal(modern, old), "theta is found in the new place and in the old one"
        scaled = found(rope_theta=7.0, rope_scaling={**LLAMA3})
        modern_scaled = found(rope_parameters={"rope_theta": 7.0, **LLAMA3})
        assert torch.equal(scaled, modern_scaled), "the same scaling gives the same frequencies, from either place"
        assert not torch.equal(scaled, old), "the scaling is not overlooked"

    @pytest.mark.parametrize("extra", [{"rope_type": "longrope", "factor": 4.0}, {"partial_rotary_factor": 0.5}])
    def test_what_is_not_built_in_is_refused(self, extra: dict[str, Any]) -> None:
        config = SimpleNamespace(rope_parameters={"rope_theta": 1e4, **extra})
        with pytest.raises(ValueError, match="not supported"):
            rope_frequencies(config, 32)
