"""One request to a model with experts: what `read x4` traces."""

from collections.abc import Callable

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Answer a prompt over the engine of a preset, which finds out from the checkpoint that there are experts."""
    from folovllm import LLM, SamplingParams

    enter("putting the engine together")
    with LLM("stories-moe", milestone=preset, use_tqdm=False) as llm:
        enter("one request")
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        enter("the end")
