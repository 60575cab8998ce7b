"""FoloVLLM: a mini-vLLM that you grow in six milestones, and the engine that results.

from folovllm import LLM, SamplingParams
print(LLM().generate("Tell me a story about Lily and a red kite.")[0].outputs[0].text)
"""

import importlib as _importlib
import os as _os

if _os.environ.get("FOLOVLLM_MINE"):  # the learner's files first; in every process, hence here
    from folovllm.learn import overlay as _overlay

    _overlay.install()

if not (_os.path.exists("/dev/nvidiactl") or _os.path.exists("/dev/dxg")):
    # No GPU: kernels run in Triton's interpreter, if it is told so before it is imported.
    _os.environ.setdefault("TRITON_INTERPRET", "1")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from folovllm.config import EngineConfig
    from folovllm.llm import LLM
    from folovllm.outputs import RequestOutput
    from folovllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]

_HOMES = {"LLM": "llm", "EngineConfig": "config", "RequestOutput": "outputs", "SamplingParams": "sampling_params"}
_HOMES |= {"ModelConfig": "compat"}  # a name of the texts this course grew from; the others are vLLM's
_HOMES |= {"LLMEngine": "engine.llm_engine", "EngineArgs": "config", "RequestOutputKind": "sampling_params"}
_HOMES |= {"TextPrompt": "engine.prompt_forms", "TokensPrompt": "engine.prompt_forms", "CompletionOutput": "outputs"}
_HOMES |= {"StructuredOutputsParams": "electives.structured_output.params"}
_HOMES |= {"BeamSearchParams": "engine.beam_search", "AsyncEngine": "electives.server.async_engine"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import folovllm` stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'folovllm' has no attribute {name!r}")
    return getattr(_importlib.import_module(f"folovllm.{_HOMES[name]}"), name)
