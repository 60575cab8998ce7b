"""Serve the same work with FoloVLLM and with vLLM, one after the other on one machine: `python tools/beside_vllm.py`.

Random weights of some shape, fresh prompts in every pass, both engines through their `LLM` with their own defaults but for
steps of at most 16,384 tokens and, if asked, the cache's number format. Each work is done once to warm up and then `--passes` times; a line tells the seconds of each
pass, and the last table the ratio of the best ones (above 1: ours is faster). vLLM must be there to import.

Three other comparisons come with a flag:

- `--rates 8,16,32 --model Qwen/Qwen3-0.6B`: the servers, over HTTP: `folovllm serve` and `vllm serve`, each under the loads of
  `folovllm bench serve`, which prints a table of each. Nobody caches prefixes.
- `--speculate 5 15`: n-gram speculation with at most so many draft tokens a step. The embedded model answers
  `tools/speculation/repetitive.json` greedily, 1 and 16 requests at once, plain and with drafts, an engine with each setting
  in a process of its own. The same prompts come in each pass, so that both find them in their prefix caches. vLLM needs numba and,
  for the grammars, lmformatenforcer.
- `--transformers 1 32`: Hugging Face's `generate`, so many of nano-vLLM's requests at a time, as they come, padded on the left
  to the longest prompt, 8 seconds each. A batch runs until its longest answer is over; a request's tokens count up to the length
  that it asked for. It prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from folovllm.bench.contenders import GEOMETRIES, write_geometry
from folovllm.bench.workload import load_workload, mixed_workload
from folovllm.models.files import ASSETS

WORKS = {  # requests at once, tokens of a prompt, tokens of an answer
    **{f"{n} at once": (n, 512, 256) for n in (1, 4, 16, 64, 256)},
    "32 x 8,000": (32, 8000, 32),
    "8 x 15,000": (8, 15_000, 32),
    "1 x 8,000": (1, 8000, 1),
}
AT_ONCE = (1, 16)  # requests, with --speculate
TASKS = Path(__file__).parent / "speculation" / "repetitive.json"
NANO, BURST = "nano-vllm", "burst"
ENGINES = ("folovllm", "vllm")
SERVERS = {"folovllm": [sys.executable, "-m", "folovllm", "serve"], "vllm": ["vllm", "serve"]}
SERVED = ["--max-num-batched-tokens", "16384", "--max-model-len", "4096", "--no-enable-prefix-caching"]
START = 300.0  # seconds that a server has until it is healthy
COMMON: dict[str, Any] = {"max_num_batched_tokens": 16_384, "max_model_len": 16_384, "dtype": "bfloat16"}


def start(engine: str, model: Path, gpus: int, kv_cache_dtype: str) -> tuple[Any, type]:
    """The engine, and its class of sampling parameters."""
    if engine == "vllm":
        from vllm import LLM, SamplingParams

        own: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        # Hybrid models: states in float32 as ours (Qwen3.5's own configuration asks for it), and kernels that need no flashinfer.
        own |= {"mamba_ssm_cache_dtype": "float32", "additional_config": {"gdn_prefill_backend": "triton"}}
    else:
        from folovllm import LLM, SamplingParams
        from folovllm.config import DEFAULT_MODEL

        own = {"random_weights": True, "tokenizer": DEFAULT_MODEL, "model_impl": "native", "milestone": "m6"}
    asked = {"tensor_parallel_size": gpus, "kv_cache_dtype": kv_cache_dtype}
    return LLM(model=str(model), **asked, **COMMON, **own), SamplingParams


def requests_of(work: str, seed: int) -> list[tuple[list[int], int]]:
    """Prompts and the lengths of their answers. Of nano-vllm and a burst, prompts of another seed have the same lengths.

    No prompt begins as one of another work or pass does, so nothing is found in a prefix cache.
    """
    rng = random.Random(f"{work}, {seed}")
    if work in (NANO, BURST):  # a burst: short and long ones at once, so that parts of prompts stand beside decodes
        load = load_workload(NANO, 1 << 20) if work == NANO else mixed_workload(128, 0, (64, 8000), (16, 256))
        lengths = [(len(one.prompt), one.output_len) for one in load.requests]
    else:
        count, prompt, answer = WORKS[work]
        lengths = [(prompt, answer)] * count
    return [([rng.randint(0, 10_000) for _ in range(prompt)], answer) for prompt, answer in lengths]


def serve(engine: str, model: Path, args: argparse.Namespace) -> None:
    """Print a line of JSON for each work: the seconds of each pass."""
    began = time.perf_counter()
    llm, params = start(engine, model, args.gpus, args.kv_cache_dtype)
    print(json.dumps({"start": round(time.perf_counter() - began, 1)}), flush=True)
    for work in args.works:
        seconds = []
        for number in range(args.passes + 1):
            requests = requests_of(work, number)
            how = [
                params(temperature=0.6, ignore_eos=True, max_tokens=answer, detokenize=False) for _, answer in requests
            ]
            began = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], how, use_tqdm=False)
            seconds.append(round(time.perf_counter() - began, 4))
            got = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert got == sum(answer for _, answer in requests), f"{engine} wrote {got} tokens"
        print(json.dumps({"work": work, "seconds": seconds[1:]}), flush=True)


def speculate(engine: str, most: int, args: argparse.Namespace) -> None:
    """Print a line of JSON for each number at once: the tokens a second of each pass."""
    from transformers import AutoTokenizer

    if engine == "vllm":
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
    else:
        from folovllm import LLM, SamplingParams
        from folovllm.structured_outputs import StructuredOutputsParams
    config = {"method": "ngram", "num_speculative_tokens": most} if most else None
    model = str(ASSETS / "stories-5m")
    llm = LLM(model=model, max_num_seqs=max(AT_ONCE), max_model_len=4096, speculative_config=config)
    tasks = json.loads(TASKS.read_text())
    render = partial(
        AutoTokenizer.from_pretrained(model).apply_chat_template, add_generation_prompt=True, return_dict=True
    )
    prompts = [{"prompt_token_ids": render(task["messages"])["input_ids"]} for task in tasks]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=task["max_tokens"],
            structured_outputs=StructuredOutputsParams(**task["form"]),
        )
        for task in tasks
    ]
    for batch in AT_ONCE:
        order, rates = [i % len(tasks) for i in range(max(batch, len(tasks)))], []
        for _ in range(args.passes + 1):
            num_tokens, began = 0, time.perf_counter()
            for start in range(0, len(order), batch):
                these = order[start : start + batch]
                outputs = llm.generate([prompts[i] for i in these], [params[i] for i in these], use_tqdm=False)
                num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            rates.append(round(num_tokens / (time.perf_counter() - began)))
        print(json.dumps({"at once": batch, "tokens a second": rates[1:], "tokens": num_tokens}), flush=True)


def compare_speculation(args: argparse.Namespace) -> None:
    """Print a line for each engine and number at once: the best pass plain, and with drafts."""
    for engine in ENGINES:
        found: dict[int, dict[int, int]] = {}
        for n in (0, *args.speculate):
            told = told_by(child_of(engine, args, "--speculate", str(n)), f"{engine:9} {n:2} draft tokens")
            found[n] = {result["at once"]: max(result["tokens a second"]) for result in told}
        for batch, plain in found[0].items():
            best = [(n, found[n][batch]) for n in args.speculate if batch in found[n]]
            gains = ", ".join(f"{n} draft tokens {rate} ({rate / plain:.2f} x)" for n, rate in best)
            print(f"{engine}, {batch} at once: {plain} tokens a second; {gains}", flush=True)


def generate(model: Path, args: argparse.Namespace) -> None:
    """Print a line of JSON: the tokens a second of Hugging Face's `generate` for each number of requests at a time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new length of the keys anew, 35 ms each
    config = AutoConfig.from_pretrained(model)
    with torch.device(device):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens_a_second(hf, config.vocab_size, 1, 1.0)  # warm
    speeds = {batch: tokens_a_second(hf, config.vocab_size, batch, 8.0) for batch in args.transformers}
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(json.dumps({"device": name, "model": args.geometry, "tokens a second": speeds}))


def tokens_a_second(model: Any, vocab_size: int, batch: int, seconds: float) -> float:
    """Useful output tokens a second, `batch` requests at a time, for about `seconds`."""
    import torch

    class Until:
        """Ends a batch when the time is over, and counts its steps."""

        steps = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.steps += 1
            return torch.full((len(input_ids),), time.monotonic() > start + seconds, device=input_ids.device)

    requests = load_workload(NANO, vocab_size).requests
    start, useful = time.monotonic(), 0
    for group in (requests[i : i + batch] for i in range(0, len(requests), batch)):
        longest, width = max(request.output_len for request in group), max(len(request.prompt) for request in group)
        padded = [[0] * (width - len(request.prompt)) + request.prompt for request in group]
        mask = [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in group]
        ids, mask = (torch.tensor(rows, device=model.device) for rows in (padded, mask))
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=0.6, top_k=0, min_new_tokens=longest,
            max_new_tokens=longest, pad_token_id=0, stopping_criteria=[until := Until()],
        )  # fmt: skip
        useful += sum(min(request.output_len, until.steps) for request in group)
        if time.monotonic() > start + seconds:
            break
    return useful / (time.monotonic() - start)


def child_of(engine: str, args: argparse.Namespace, *own: str) -> list[str]:
    """The command of a process that runs this engine alone."""
    return [sys.executable, __file__, "--engine", engine, "--passes", str(args.passes), *own]


def best_of(engine: str, args: argparse.Namespace) -> dict[str, float]:
    """The best seconds of each work, from a process that runs this engine alone."""
    own = ["--geometry", args.geometry, "--gpus", str(args.gpus), "--kv-cache-dtype", args.kv_cache_dtype]
    told = told_by(child_of(engine, args, *own, "--works", *args.works), f"{engine:9}")
    return {result["work"]: min(result["seconds"]) for result in told if "work" in result}


def told_by(command: list[str], who: str) -> Iterator[dict[str, Any]]:
    """The lines of JSON that a process of its own prints; each is shown as it comes, behind `who`."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                print(f"{who} {line.strip()}", flush=True)
                yield json.loads(line)
    if child.returncode:
        print(f"{who} ended with code {child.returncode}", flush=True)


def serve_over_http(engine: str, args: argparse.Namespace) -> None:
    """Start the engine's server, and print what `folovllm bench serve` finds of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [*SERVERS[engine], args.model, "--port", url.rpartition(":")[2], "--served-model-name", engine, *SERVED]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_healthy(url, server)
        load = ["--rates", args.rates, "--workload", args.workload, "--requests", str(args.requests)]
        subprocess.run(
            [*SERVERS["folovllm"][:-1], "bench", "serve", "--url", url, "--model", engine, *load], check=True
        )
    finally:
        server.terminate()
        server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return as soon as the server answers. TimeoutError if it does not within `START` seconds, or has ended."""
    end = time.monotonic() + START
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"{server.args} is not healthy after {START:.0f} s, or has ended")


def main() -> None:
    """Run both engines, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b", choices=GEOMETRIES)
    parser.add_argument("--gpus", type=int, default=1, help="of one model (tensor parallelism)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--works", nargs="+", default=[*WORKS, BURST, NANO], choices=[*WORKS, BURST, NANO])
    parser.add_argument("--passes", type=int, default=2, help="measured ones; the best counts")
    parser.add_argument("--engine", choices=ENGINES, help="this one alone, in this process")
    parser.add_argument("--speculate", type=int, nargs="+", metavar="N", help="compare n-gram speculation")
    parser.add_argument("--transformers", type=int, nargs="+", metavar="BATCH", help="measure transformers alone")
    parser.add_argument("--rates", help="requests a second: compare the servers at these loads")
    parser.add_argument("--model", help="what the servers serve: real weights, so that each token is text")
    parser.add_argument("--workload", default="mixed", help="of the servers, as `folovllm bench serve` has it")
    parser.add_argument("--requests", type=int, default=256, help="of the servers, at each rate")
    args = parser.parse_args()
    if args.rates:
        for engine in [args.engine] if args.engine else ENGINES:
            serve_over_http(engine, args)
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.speculate:
        speculate(args.engine, args.speculate[0], args) if args.engine else compare_speculation(args)
        return
    if args.transformers or args.engine:
        with tempfile.TemporaryDirectory() as folder:
            model = write_geometry(args.geometry, Path(folder))
            generate(model, args) if args.transformers else serve(args.engine, model, args)
        return
    ours, theirs = (best_of(engine, args) for engine in ENGINES)
    cache = "" if args.kv_cache_dtype == "auto" else f", cache in {args.kv_cache_dtype}"
    print(f"{args.geometry}, {args.gpus} GPU{cache}: {'FoloVLLM':>14} {'vLLM':>10} {'ratio':>8}")
    for work in (work for work in args.works if work in ours and work in theirs):
        print(f"{work:>18}: {ours[work]:>10.3f} s {theirs[work]:>8.3f} s {theirs[work] / ours[work]:>8.2f}")


if __name__ == "__main__":
    main()
