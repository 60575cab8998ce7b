"""A public comparison's rules, applied to our decode step: `python tools/referee.py`, on one H100 or H200.

"Megakernels vs CUDA Graphs" (github.com/msaroufim/megakernels-vs-cuda-graphs, September 2026: `llama/docs/PROTOCOL.md`, `RESULTS.md`) times
Llama-3.2-1B, one request, and says whose logits count as right. Its rules, all kept here:

- *Work*: 32 prompt tokens, 128 of an answer, greedy, a cache for 16,384. The 127 dependent steps after the first token are one CUDA graph, from the
  embedding to the written token. Prefill, compiling and packing are outside the clock. (Ours also copies 6 KB of lengths and block ids to the card.)
- *Clock*: events around a replay, 5 replays to warm up, 10 timed, their mean. No cache is flushed (the 127 steps read 300 GB); clocks are noted, not fixed.
- *Check*: Hugging Face's eager model in float32 (of the bfloat16 weights, no TF32) writes a text, and all others get its tokens, step by step. Two errors
  against it, in float64: KL(float32 || other), and how far the next token's log-probability is off. From both, the errors of Hugging Face's own bfloat16
  are subtracted, and the differences are averaged by prompt. It passes if the upper end of both 95% intervals (10,000 bootstraps over prompts) is at most 0.
  There is no other tolerance, so an engine whose errors are as large as Hugging Face's fails: it must be better for certain.

What differs: weights and prompts are random, because the checkpoint is gated. So the text is sampled, not greedy (a random model repeats itself), and the
sizes of errors cannot be compared with theirs. Our engine computes the prefix itself; with them Hugging Face does it for all. All prompts run in one
process, theirs in three each. Their second check, of the last logits of each timed answer, is left out: here replays must give the tokens of the engine's
own steps. Their figures were measured on their card; this program measures our engine alone.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from statistics import mean
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from folovllm.apps.bench.contenders import GEOMETRIES
from folovllm.apps.bench.roofline import measure_rates
from folovllm.apps.bench.serve import running
from folovllm.config import DEFAULT_MODEL, EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from folovllm.step.packed import IN_FLIGHT, Field
from folovllm.step.schedule import Int32
from folovllm.worker.buckets import decode_bucket
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.step_graph import GraphPool, StepGraph

PROMPT, CAPACITY, WARM_UPS, TIMED = 32, 16_384, 5, 10
THEIRS = """\
                                   µs a step   less Hugging Face's: KL    log-probability
CUDA graphs and PDL, their H200       794.74               -2.4241e-04        -5.4033e-03   passes
megakernel, their H200                759.83               +8.3358e-03        +3.4794e-02   fails
the same two, loops in Python   817.83, 766.19"""  # `RESULTS.md`, 14 September 2026; the errors are those of "canonical graph"
LLAMA = GEOMETRIES["llama-3.2-1b"]
SHAPES = {"llama-3.2-1b": LLAMA, "tiny": LLAMA | {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320}}
Text = tuple[list[int], torch.Tensor, torch.Tensor]  # tokens [n], logits [n - 1, V] of float32 and of bfloat16


@torch.inference_mode()
def rollout(model: Any, prompt: list[int], count: int, given: list[int]) -> tuple[list[int], torch.Tensor]:
    """Generate `count` tokens, one a step: those `given`, or sampled. Returns them, and the logits [count - 1, V] of all but the first one."""
    cache, tokens, logits, generator = DynamicCache(), list[int](), [], torch.Generator().manual_seed(0)
    for i in range(count):
        ids = torch.tensor([tokens[-1:] or prompt], device=model.device)
        logits.append(model(ids, past_key_values=cache, use_cache=True).logits[0, -1].float().cpu())
        tokens.append(given[i] if given else int(logits[-1].softmax(-1).multinomial(1, generator=generator)))
    return tokens, torch.stack(logits[1:])


def references(folder: str, shape: str, device: str, prompts: list[list[int]], count: int) -> list[Text]:
    """Write a random model to a folder; return each prompt's text."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(device)
        for dtype in (torch.float32, torch.bfloat16)
    )
    texts = []
    for prompt in prompts:
        tokens, logits = rollout(exact, prompt, count, [])
        texts.append((tokens, logits, rollout(rounded, prompt, count, tokens)[1]))
    return texts


def errors(logits: torch.Tensor, reference: torch.Tensor, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return both errors of `logits` [steps, V], each the mean over the steps. `tokens` [steps] are the next tokens."""
    got, true = (x.double().log_softmax(-1) for x in (logits, reference))
    off = (true - got).gather(1, torch.tensor(tokens)[:, None]).abs()
    return np.array([(true.exp() * (true - got)).sum(-1).mean(), off.mean()])


def upper_end(values: np.ndarray[Any, Any]) -> float:
    """Return the upper end of the 95% interval of the mean of `values` [prompts], by bootstrap."""
    means = np.random.default_rng(2731).choice(values, (10_000, len(values))).mean(1)
    return float(np.quantile(means, 0.975, method="lower"))


def own_steps(engine: LLMEngine, runner: GraphRunner, prompt: list[int], count: int) -> tuple[list[int], Int32, float]:
    """Answer a prompt. Returns the tokens, the packed steps [count - 1, 12], and the mean seconds of one, the host's work included."""
    fields, execute, tokens, arrivals = list[Int32](), runner.execute_model, list[int](), list[float]()

    def execute_model(step: Any) -> Any:
        fields.extend([step.fields.ravel()] * step.is_decode)
        return execute(step)

    runner.execute_model = execute_model  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    engine.add_request("one", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            arrivals.append(time.perf_counter())
    runner.execute_model = execute  # type: ignore[method-assign]
    packed = np.pad(np.stack(fields), ((0, 0), (0, -len(Field) % 4)))  # kernels expect a step to begin at 16 bytes
    return tokens, packed, (arrivals[-1] - arrivals[0]) / (count - 1)


def record(runner: GraphRunner, device: torch.device, steps: Int32) -> Iterator[tuple[StepGraph, torch.Tensor]]:
    """Yield two graphs of all steps, each with its output: one that samples, with the tokens [steps]; one that is given the tokens, with the logits [steps, V]."""
    bucket, vocab_size = decode_bucket(1), runner.model.lm_head.weight.shape[0]
    tokens = torch.zeros(len(steps), 2, dtype=torch.int64, device=device)  # 16 bytes apart
    logits = torch.zeros(len(steps), vocab_size, device=device)

    def free(numbers: torch.Tensor) -> None:
        for i, step in enumerate(numbers.view(len(steps), -1)):
            runner._forward(bucket, step)
            runner._one_pass(runner._logits[:1], step[: len(Field), None], tokens[i])

    def forced(numbers: torch.Tensor) -> None:
        for i, step in enumerate(numbers.view(len(steps), -1)):
            runner._forward(bucket, step)
            logits[i].copy_(runner._logits[0])

    for work, result in ((free, tokens[:, 0]), (forced, logits)):
        yield GraphPool(device).capture(steps.ravel().copy(), work), result


def replay(graph: StepGraph, steps: Int32, tokens: list[int]) -> float:
    """Run all steps, first with the given `tokens`, then with those that are sampled. Returns the GPU's seconds, 0 on a CPU."""
    steps[:, Field.TOKEN] = tokens + [IN_FLIGHT] * (len(steps) - len(tokens))
    numbers = torch.from_numpy(steps.ravel())
    if graph.static_input.device.type == "cpu":
        graph.replay(numbers)
        return 0.0
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay(numbers)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def judge(engine: LLMEngine, prompts: list[list[int]], texts: list[Text]) -> Iterator[str]:
    """Yield the lines about our engine."""
    runner: GraphRunner = engine.executor.collective_rpc(lambda worker: worker.runner)[0]
    _, steps, _ = own_steps(engine, runner, prompts[0][::-1], len(texts[0][0]))  # of another prompt, to warm up
    (free, sampled), (forced, logits) = record(runner, engine.setup.device, steps)
    found, own, same = [], [], True
    for prompt, (tokens, exact, rounded) in zip(prompts, texts, strict=True):
        answer, steps, seconds = own_steps(engine, runner, prompt, len(tokens))
        replay(forced, steps, tokens[:-1])
        times = []
        for _ in range(WARM_UPS + TIMED):
            times.append(replay(free, steps, answer[:1]) / len(steps))
            same &= sampled.tolist() == answer[1:]
        own.append(seconds)
        both = (errors(each, exact, tokens[1:]) for each in (logits.cpu(), rounded))
        found.append((mean(times[WARM_UPS:]), *both))
    graph, ours, theirs = (np.stack(each) for each in zip(*found, strict=True))
    (kl, log), ends = (ours - theirs).mean(0), [upper_end(gaps) for gaps in (ours - theirs).T]
    verdict = "passes" if max(ends) <= 0 else "fails"
    yield f"FoloVLLM, one graph of {len(steps)} steps {1e6 * graph.mean():11.2f} {kl:+25.4e} {log:+18.4e}   {verdict}"
    yield f"FoloVLLM, the engine's steps {1e6 * mean(own):15.2f}"
    yield "upper ends of the 95% intervals: {:+.4e}, {:+.4e}".format(*ends)
    means = *ours.mean(0), *theirs.mean(0)
    yield "errors of FoloVLLM: {:.4e}, {:.4e}; of Hugging Face's bfloat16: {:.4e}, {:.4e}".format(*means)
    yield f"all replays gave the tokens of the engine's own steps: {'yes' if same else 'NO'}"


def main(arguments: list[str] | None = None) -> None:
    """Print our figures beside theirs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    args = parser.parse_args(arguments)
    rng = random.Random(0)
    prompts = [[rng.randrange(SHAPES[args.shape]["vocab_size"]) for _ in range(PROMPT)] for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        texts = references(folder, args.shape, args.device, prompts, args.answer)
        config = EngineConfig(
            model=folder, tokenizer=DEFAULT_MODEL, model_impl="native", milestone="m6", dtype="bfloat16", device=args.device,
            max_model_len=CAPACITY, max_num_seqs=1, enable_prefix_caching=False, use_tqdm=False,
        )  # fmt: skip
        with running(config) as engine, torch.inference_mode():
            print(THEIRS, *judge(engine, prompts, texts), sep="\n", flush=True)
            if args.device == "cuda":
                query = "--query-gpu=name,clocks.sm,clocks.mem,power.draw,temperature.gpu"
                subprocess.run(["nvidia-smi", query, "--format=csv"], check=True)
    if args.device == "cuda":
        print(f"a copy on this card: {measure_rates(torch.device('cuda'), torch.bfloat16).copy / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
