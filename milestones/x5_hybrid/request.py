"""One request to a hybrid model: what `read x5` traces."""

from collections.abc import Callable

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Answer a prompt over the engine of a preset, which finds out from the checkpoint that layers keep states."""
    from folovllm import LLM, SamplingParams
    from folovllm.models.files import ASSETS

    if not (ASSETS / "stories-hybrid").is_dir():
        raise SystemExit("stories-hybrid is not there: python -m tools.train_tiny.hybrid trains it on a GPU")
    enter("putting the engine together")
    with LLM("stories-hybrid", milestone=preset, use_tqdm=False) as llm:
        enter("one request")
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        enter("the end")
