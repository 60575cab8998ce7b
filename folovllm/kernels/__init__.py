"""The Triton kernels, one file each: a `@triton.jit` function that does the work, and a typed function that launches it.

All of them run without a GPU in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported), in float32
and float16. None is autotuned: sizes come from small tables, so no kernel is compiled after the warm-up.
"""

import warnings
from importlib.util import find_spec

if find_spec("triton") is None:  # macOS, Windows
    from folovllm.learn import numpy_triton

    numpy_triton.install()

# A GPU overflows to infinity without a word, and masked lanes do so on purpose: numpy, under the interpreter, would warn the user.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
