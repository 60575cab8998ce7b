"""A prefix that is evicted and brought back: what `read x7` traces."""

from collections.abc import Callable

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Answer a prompt twice in a cache that another prompt has filled meanwhile, with host memory for what is evicted."""
    from folovllm import LLM, SamplingParams

    enter("putting the engine together")
    options = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 16, "kv_offload": "1MiB"}
    with LLM(milestone=preset, use_tqdm=False, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        enter("a prompt")
        llm.generate([PROMPT * 3], params)
        enter("another one takes its blocks")
        llm.generate(["Tom liked to draw. " * 8], params)
        enter("the first one again")
        llm.generate([PROMPT * 3], params)
        enter("the end")
