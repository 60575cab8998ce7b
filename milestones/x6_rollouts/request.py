"""One rollout, an update of the weights, and a rollout again: what `read x6` traces."""

from collections.abc import Callable

from milestones.trace import PROMPT


def run(preset: str, enter: Callable[[str], None]) -> None:
    """Answer a prompt over the batch-invariant engine of a preset, before and after its weights are given back to it."""
    from folovllm import LLM, SamplingParams

    enter("putting the engine together")
    with LLM(milestone=preset, batch_invariant=True, use_tqdm=False) as llm:
        params = SamplingParams(temperature=1.0, seed=0, max_tokens=4, ignore_eos=True, logprobs=0)
        enter("one rollout")
        llm.generate([PROMPT], params)
        enter("new weights")
        llm.update_weights(llm.get_weights())
        enter("the next rollout")
        llm.generate([PROMPT], params)
        enter("the end")
