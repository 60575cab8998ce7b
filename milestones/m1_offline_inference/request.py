"""What `read m1` traces: one request through Hugging Face's model, which the preset takes, and one through our own layers."""

from collections.abc import Callable

from folovllm import LLM, SamplingParams
from milestones.trace import OWN_SETUP, PROMPT, SETUP

PARAMS = SamplingParams(max_tokens=8, temperature=0.8, top_k=50, top_p=0.95)  # with both filters


def run(preset: str, enter: Callable[[str], None]) -> None:
    """`enter` begins a phase."""
    enter(SETUP)
    llm = LLM(milestone=preset)
    enter("one request")
    llm.generate(PROMPT, PARAMS)
    enter(OWN_SETUP)
    own = LLM(milestone=preset, model_impl="native")
    enter('the same request through our own layers (model_impl="native")')
    own.generate(PROMPT, PARAMS)
