"""One engine of one tree, for `tools.baseline`: works come as lines of JSON, and each is answered with a line of figures.

It knows the public face alone (`LLM`, `SamplingParams`, the server's HTTP), so that it measures old trees and new ones.
PYTHONPATH says which tree. A figure is seconds or bytes, or a list of tokens, which must be the same in both trees.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
GEOMETRIES = {
    "qwen3-0.6b": QWEN,
    "qwen3-4b": QWEN
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
}
TASKS = Path(__file__).parent / "speculation"


def model_fields(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of an engine; a geometry becomes a folder with random weights."""
    fields = dict(settings)
    if geometry := fields.pop("geometry", None):
        (folder / "config.json").write_text(json.dumps(GEOMETRIES[geometry]))
        fields |= {"model": str(folder), "random_weights": True, "tokenizer": "stories-5m"}
    return fields


class Engine:
    """An `LLM`, and what can be measured of it."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        import folovllm

        self._api = folovllm
        self._llm = folovllm.LLM(**model_fields(settings, folder), use_tqdm=False)

    def first_token(self, seed: int) -> dict[str, Any]:
        """The process's age and its peak memory behind the first token."""
        self._generate([(32, 1)], seed)
        return {"peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}

    def tokens(self, seed: int) -> dict[str, Any]:
        """What is answered greedily and by a seed, to prompts that share a beginning and to others."""
        prompts = ["Once upon a time", "Once upon a time there was a red kite", "Tom", "The little dog ran to"]
        outputs = []
        for asked in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}):
            params = self._api.SamplingParams(max_tokens=48, seed=7, **asked)
            outputs += self._llm.generate(prompts, params, use_tqdm=False)
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}

    def forms(self, seed: int) -> dict[str, Any]:
        """What is answered in a form: a choice, an expression, an object."""
        from folovllm.structured_outputs import StructuredOutputsParams as Form

        schema = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        }
        params = [
            self._api.SamplingParams(max_tokens=48, seed=7, temperature=0.9, structured_outputs=Form(**form))
            for form in ({"choice": ["red", "blue"]}, {"regex": "[a-z]{3,9}!"}, {"json": schema})
        ]
        outputs = self._llm.generate(["Once upon a time"] * 3, params, use_tqdm=False)
        return {"tokens in a form": [list(output.outputs[0].token_ids) for output in outputs]}

    def at_once(self, seed: int, count: int, prompt: int, answer: int) -> dict[str, Any]:
        """Seconds of requests of one shape."""
        return {f"{count} of {prompt} + {answer}": self._generate([(prompt, answer)] * count, seed)}

    def nano(self, seed: int, count: int = 256, most: int = 1024) -> dict[str, Any]:
        """Seconds of nano-vllm's benchmark: requests and answers of 100 to 1,024 tokens."""
        lengths = random.Random(0)
        least = min(100, most // 4)
        shapes = [(lengths.randint(least, most), lengths.randint(least, most)) for _ in range(count)]
        return {"nano-vllm's": self._generate(shapes, seed)}

    def _generate(self, shapes: list[tuple[int, int]], seed: int) -> float:
        die = random.Random(seed)
        prompts = [{"prompt_token_ids": [die.randint(300, 3900) for _ in range(prompt)]} for prompt, _ in shapes]
        params = [
            self._api.SamplingParams(temperature=0.6, seed=seed, ignore_eos=True, max_tokens=n) for _, n in shapes
        ]
        began = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    def texts(self, seed: int, name: str, batch: int) -> dict[str, Any]:
        """Seconds a token of a set of tasks, greedily, some at a time."""
        from folovllm.structured_outputs import StructuredOutputsParams as Form

        tasks = json.loads((TASKS / f"{name}.json").read_text())
        began, num_tokens = time.perf_counter(), 0
        for i in range(0, len(tasks), batch):
            part = tasks[i : i + batch]
            params = [
                self._api.SamplingParams(
                    temperature=0,
                    max_tokens=task["max_tokens"],
                    structured_outputs=Form(**task["form"]) if task["form"] else None,
                )
                for task in part
            ]
            outputs = self._llm.chat([task["messages"] for task in part], params, use_tqdm=False)
            num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return {f"{name} by {batch}, a token": (time.perf_counter() - began) / num_tokens}


class Served:
    """A server in a process, and the time between tokens that its clients see."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        fields = model_fields(settings, folder)
        flags = [f"--{k.replace('_', '-')}" + ("" if v is True else f"={v}") for k, v in fields.items() if k != "model"]
        command = [sys.executable, "-m", "folovllm", "serve", fields["model"], "--port", "0", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        line = next(line for line in self._process.stdout if "http://" in line)
        self._port = int(re.findall(r"http://[^:]+:(\d+)", line)[0])

    def tpot(self, seed: int, clients: int) -> dict[str, Any]:
        """Seconds between tokens, on average over the answers of clients that stream at once."""
        return {f"time a token, {clients} over HTTP": asyncio.run(self._load(seed, clients))}

    async def _load(self, seed: int, clients: int) -> float:
        die = random.Random(seed)
        prompts = [[die.randint(300, 3900) for _ in range(128)] for _ in range(clients)]
        times = await asyncio.gather(*map(self._ask, prompts))
        return sum(times) / len(times)

    async def _ask(self, prompt: list[int], answer: int = 256) -> float:
        body = json.dumps({"prompt": prompt, "max_tokens": answer, "ignore_eos": True, "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        first = last = 0.0
        while b"[DONE]" not in (piece := await reader.readuntil(b"\n\r\n")):
            if b"data:" in piece:
                last = time.perf_counter()
                first = first or last
        writer.close()
        return (last - first) / (answer - 1)


def main() -> None:
    """Serve the works of standard input with what the first argument describes."""
    kind, settings = json.loads(sys.argv[1])
    makers: dict[str, Callable[[dict[str, Any], Path], Any]] = {"engine": Engine, "server": Served}
    with tempfile.TemporaryDirectory() as folder:
        subject = makers[kind](settings, Path(folder))
        for line in sys.stdin:
            name, seed, arguments = json.loads(line)
            print("\n" + json.dumps(getattr(subject, name)(seed, *arguments)), flush=True)


if __name__ == "__main__":
    main()
