"""What `folovllm generate` prints: answers on stdout, times on stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from folovllm.engine.inputs import Prompt
    from folovllm.llm import LLM
    from folovllm.outputs import RequestOutput
    from folovllm.sampling_params import SamplingParams


def tolerate_encodings() -> None:
    """Set up the standard streams so that no character ends a command: one that the output cannot have is printed as `\\u2615`.

    Bytes that are not in the input's encoding become surrogates; a prompt that has some is refused, in a sentence. A byte
    order mark is dropped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = "utf-8-sig" if sys.stdin.encoding.lower() == "utf-8" else None
        sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")


def stream(llm: LLM, request_id: str, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
    """Ask, and return the outputs of each step. Ctrl-C ends the answer between two steps, by "abort"."""
    from folovllm.engine.ctrl_c import ctrl_c

    engine = llm.engine
    engine.add_request(request_id, prompt, params)

    def outputs() -> Iterator[RequestOutput]:
        with ctrl_c() as pressed:
            while engine.has_unfinished_requests():
                yield from [engine.abort_request(request_id)] if pressed.is_set() else engine.step()

    return outputs()


def stream_answer(llm: LLM, prompt: Prompt, params: SamplingParams, opening: str) -> None:
    """What `llm.generate` does with one prompt, for a terminal: `opening`, then the answer as it grows, on stdout.

    After Ctrl-C the text so far stays.
    """
    outputs = stream(llm, "0", prompt, params)
    Console(highlight=False).print(Text(opening, style="bold"), soft_wrap=True, end="")
    for output in outputs:
        print(output.outputs[0].delta_text, end="", flush=True)
    print()
    show_times(output, llm)
    if output.outputs[0].finish_reason == "abort":
        raise KeyboardInterrupt


def print_answer(output: RequestOutput, llm: LLM, between: str) -> None:
    """Prompt and answers on stdout, the times on stderr."""
    for answer in output.outputs:
        text = Text.assemble((f"{output.prompt}{between}", "bold"), answer.text)
        Console(highlight=False).print(text, soft_wrap=True)
    show_times(output, llm)


def show_times(output: RequestOutput, llm: LLM) -> None:
    """On stderr `37 tokens · TTFT 12.0 ms · TPOT 3.1 ms · 290.1 tokens/s`, on a CPU with the number of threads; what there is not, is left out."""
    metrics, threads = output.metrics, llm.engine.num_threads
    parts = [f"{metrics.num_generated_tokens} tokens"]
    for name, seconds in (("TTFT", metrics.ttft), ("TPOT", metrics.tpot)):
        parts += [f"{name} {seconds * 1e3:.1f} ms"] if seconds is not None else []
    parts += [f"{metrics.tokens_per_second:.1f} tokens/s"] if metrics.tokens_per_second else []
    parts += [f"{threads} thread{'s' * (threads > 1)}"] if threads else []
    stderr().print(" · ".join(parts), style="dim")


def as_json_line(output: RequestOutput) -> str:
    """An output as JSON, times in seconds, with every character as it is where stdout can have it."""
    answers = [asdict(answer) for answer in output.outputs]
    for answer in answers:
        del answer["delta_text"], answer["delta_token_ids"]  # of the last step: no one streams here
    measured = ("ttft", "tpot", "latency", "tokens_per_second", "num_prompt_tokens", "num_generated_tokens")
    fields = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": answers,
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": {name: getattr(output.metrics, name) for name in measured},
    }
    return json.dumps(fields, ensure_ascii=not (sys.stdout.encoding or "utf-8").lower().startswith("utf"))


def stderr() -> Console:
    return Console(stderr=True, highlight=False)  # made when needed: tests and shells replace sys.stderr
