"""What a GPU does and the interpreter does not, put into the interpreter."""

import numpy as np
import pytest


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Masked places with no `other` are NaN, and float32 products TF32 unless told otherwise; lists the loads' caching.

    A GPU leaves such places undefined; the interpreter fills in zeros. An int32 that overflows is an error here (of
    Python's own memory otherwise). Where kernels are compiled this changes nothing.
    """
    from triton._C.libtriton import ir  # not at the top: there are platforms without Triton
    from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle, interpreter_builder

    load, dot, caching = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_dot, []

    def poisoned_load(builder, ptrs, mask, other, cache_modifier, *rest):
        result = load(builder, ptrs, mask, other, cache_modifier, *rest)
        if np.issubdtype(result.data.dtype, np.floating):
            caching.append(cache_modifier)
            if other is None:
                result = TensorHandle(np.where(mask.data, result.data, np.nan).astype(result.data.dtype), result.dtype)
        return result

    def rounded_dot(builder, a, b, d, input_precision, *rest):
        if input_precision == ir.INPUT_PRECISION.TF32:
            a, b = (TensorHandle(_tf32(x.data), x.dtype) if x.data.dtype == np.float32 else x for x in (a, b))
        return dot(builder, a, b, d, input_precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", poisoned_load)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", rounded_dot)
    monkeypatch.setattr(interpreter_builder, "options", InterpreterOptions(debug=True))
    return caching


@pytest.fixture
def loads(monkeypatch):
    """What the interpreter loads, in order: "ids", or K/V and queries, "masked" or "plain". Empty where kernels are compiled."""
    from triton.runtime.interpreter import InterpreterBuilder

    noted = []
    plain, masked = InterpreterBuilder.create_load, InterpreterBuilder.create_masked_load

    def noting(work, kind):
        def run(builder, ptrs, *rest):
            count = len(noted)
            result = work(builder, ptrs, *rest)
            if result.data.size > 1 and len(noted) == count + (kind == "plain"):  # which is a masked one inside
                noted[count:] = [kind if np.issubdtype(result.data.dtype, np.floating) else "ids"]
            return result

        return run

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting(masked, "masked"))
    monkeypatch.setattr(InterpreterBuilder, "create_load", noting(plain, "plain"))
    return noted


def _tf32(x):
    """Ten bits of mantissa, cut off."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
