"""One request with drafts, by prompt lookup: what `read x3` traces."""

from collections.abc import Callable

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Answer a prompt that repeats itself, over the engine of a preset."""
    from folovllm import LLM, SamplingParams

    drafts = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    enter("putting the engine together")
    with LLM(milestone=preset, use_tqdm=False, speculative_config=drafts) as llm:
        enter("one request")
        llm.generate([3 * f"{PROMPT} "], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        enter("the end")
