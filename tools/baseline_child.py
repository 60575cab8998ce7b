"""One engine of one tree, for `tools.baseline`: works come as lines of JSON, and each is answered with a line of figures.

It knows the public face alone (`LLM`, `SamplingParams`, `StructuredOutputsParams`), so that it measures old trees and new ones.
PYTHONPATH says which tree. A figure is seconds or bytes, or a list of tokens, which must be the same in both trees.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "speculation"


class Engine:
    """An `LLM`, and what can be measured of it."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        """A configuration of a model among the settings becomes a folder with random weights."""
        import folovllm

        self._api = folovllm
        if config := settings.pop("config", None):
            (folder / "config.json").write_text(json.dumps(config))
            settings |= {"model": str(folder), "random_weights": True, "tokenizer": "stories-5m"}
        self._llm = folovllm.LLM(**settings, use_tqdm=False)

    def first_token(self, seed: int) -> dict[str, Any]:
        """The process's age and its peak memory behind the first token."""
        self._generate([(32, 1)], seed)
        return {"peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}

    def tokens(self, seed: int) -> dict[str, Any]:
        """What is answered greedily and by a seed, to prompts that share a beginning and to others."""
        prompts = ["Once upon a time", "Once upon a time there was a red kite", "Tom", "The little dog ran to"]
        rules = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
        return {
            "tokens": [self._tokens(prompts, [self._params(48, 7, **each)] * 4) for each in ({"temperature": 0}, rules)]
        }

    def forms(self, seed: int) -> dict[str, Any]:
        """What is answered in a form: a choice, an expression, an object."""
        fields = {"name": {"type": "string"}, "age": {"type": "integer"}}
        schema = {"type": "object", "properties": fields, "required": ["name", "age"]}
        forms = {"choice": ["red", "blue"]}, {"regex": "[a-z]{3,9}!"}, {"json": schema}
        params = [self._params(48, 7, form, temperature=0.9) for form in forms]
        return {"tokens in a form": self._tokens(["Once upon a time"] * 3, params)}

    def at_once(self, seed: int, count: int, prompt: int, answer: int) -> dict[str, Any]:
        """Seconds of requests of one shape."""
        return {f"{count} of {prompt} + {answer}": self._generate([(prompt, answer)] * count, seed)}

    def grammars(self, seed: int, count: int) -> dict[str, Any]:
        """Seconds of requests with a grammar each: 300 letters and spaces."""
        params = self._params(256, seed, {"regex": "[a-z ]{300}"}, temperature=0.8)
        began = time.perf_counter()
        self._tokens(["Once upon a time"] * count, [params] * count)
        return {f"{count} with a grammar": time.perf_counter() - began}

    def bad_words(self, seed: int, count: int, prompt: int, answer: int) -> dict[str, Any]:
        """Seconds of requests that forbid words of two tokens."""
        words = ["red kite", "little dog", "the park", "her mom"]
        return {f"{count} with bad words": self._generate([(prompt, answer)] * count, seed, bad_words=words)}

    def nano(self, seed: int, count: int = 256, most: int = 1024) -> dict[str, Any]:
        """Seconds of nano-vllm's benchmark: requests and answers of 100 to 1,024 tokens."""
        lengths = random.Random(0)
        least = min(100, most // 4)
        shapes = [(lengths.randint(least, most), lengths.randint(least, most)) for _ in range(count)]
        return {"nano-vllm's": self._generate(shapes, seed)}

    def texts(self, seed: int, name: str, batch: int) -> dict[str, Any]:
        """Seconds a token of a set of tasks, greedily, some at a time."""
        tasks = json.loads((TASKS / f"{name}.json").read_text())
        began, num_tokens = time.perf_counter(), 0
        for i in range(0, len(tasks), batch):
            part = tasks[i : i + batch]
            params = [self._params(task["max_tokens"], None, task["form"], temperature=0) for task in part]
            outputs = self._llm.chat([task["messages"] for task in part], params, use_tqdm=False)
            num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return {f"{name} by {batch}, a token": (time.perf_counter() - began) / num_tokens}

    def _params(self, max_tokens: int, seed: int | None, form: dict[str, Any] | None = None, **rules: Any) -> Any:
        """Parameters of sampling, with a grammar if there is a `form`."""
        grammar = self._api.StructuredOutputsParams(**form) if form else None
        return self._api.SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=grammar, **rules)

    def _tokens(self, prompts: list[Any], params: list[Any]) -> list[list[int]]:
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _generate(self, shapes: list[tuple[int, int]], seed: int, **rules: Any) -> float:
        """Seconds of requests of so many prompt tokens and answer tokens each."""
        die = random.Random(seed)
        prompts = [{"prompt_token_ids": [die.randint(300, 3900) for _ in range(prompt)]} for prompt, _ in shapes]
        params = [self._params(answer, seed, temperature=0.6, ignore_eos=True, **rules) for _, answer in shapes]
        began = time.perf_counter()
        self._tokens(prompts, params)
        return time.perf_counter() - began


def main() -> None:
    """Do the works of standard input with the engine that the first argument describes."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(json.loads(sys.argv[1]), Path(folder))
        for line in sys.stdin:
            name, seed, arguments = json.loads(line)
            print("\n" + json.dumps(getattr(engine, name)(seed, *arguments)), flush=True)


if __name__ == "__main__":
    main()
