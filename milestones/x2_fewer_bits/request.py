"""A model in 4 bits, from its quantiser to an answer over a cache in 8: what `read x2` traces."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Quantise the embedded model with a little text, and answer one prompt by the engine of a preset."""
    from folovllm import LLM, SamplingParams
    from folovllm.config import DEFAULT_MODEL
    from folovllm.electives.quantization.quantizer.options import QuantizeOptions
    from folovllm.electives.quantization.quantizer.run import quantize

    with tempfile.TemporaryDirectory() as folder:
        enter("quantising")
        options = QuantizeOptions(format="gptq", samples=1, length=32)
        report = quantize(DEFAULT_MODEL, options, Path(folder, "model"), use_tqdm=False)
        enter("putting the engine together")
        llm = LLM(
            str(report.folder),
            milestone=preset,
            kv_cache_dtype="fp8",
            calculate_kv_scales=True,
            max_model_len=64,
            num_kv_blocks=8,
            use_tqdm=False,
        )
        enter("one request")
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        enter("the end")
        llm.close()
