"""Serve the same work with FoloVLLM and with vLLM, one after the other on one machine: `python tools/beside_vllm.py`.

Random weights of some shape, fresh prompts in every pass, both engines through their `LLM` with their own defaults but for
steps of at most 16,384 tokens and, if asked, the number format of the cache or of the weights. Each work is done once to warm up and then `--passes` times; a line tells the seconds of each
pass, and the last table the ratio of the best ones (above 1: ours is faster). vLLM must be there to import.

`--speculate eagle3` (or `mtp`, for models whose checkpoints hold a head) tells what a step with three drafts costs in plain steps, in each engine: each work
is done without and with drafts, of which none is accepted. vLLM rejects all of them (`synthetic_acceptance_rates`); ours come from random weights, and those accepted are counted.

To compare the servers, start one after the other (`folovllm serve`, `vllm serve`), and load each with `folovllm bench serve --url`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from folovllm.apps.bench.workload import load_workload, mixed_workload
from tools.gpu import parser_of, print_row, random_weights

WORKS = {  # requests at once, tokens of a prompt, tokens of an answer
    **{f"{n} at once": (n, 512, 256) for n in (1, 4, 16, 64, 256)},
    "32 x 8,000": (32, 8000, 32),
    "8 x 15,000": (8, 15_000, 32),
    "1 x 8,000": (1, 8000, 1),
    **{f"{n} decoding": (n, 16, 128) for n in (2, 8, 32, 128)},
    "4 x 3,000": (4, 3000, 1),
    "1 x 16,000": (1, 16_000, 1),
}
# A `quantization_config` that both engines read; both make up the weights.
WEIGHTS: dict[str, dict[str, Any]] = {
    "fp8-blocks": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
    },
    "fp8-outputs": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
        }},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
}  # fmt: skip
STEPS = {f"{n} steps": (n, 16, 256) for n in (1, 8, 64)}
NANO, BURST = "nano-vllm", "burst"
DRAFTS, DRAFT_VOCABULARY = 3, 32_000
ENGINES = ("folovllm", "vllm")
# A plugin of vLLM. As published, vLLM stops at a Qwen3-Next without experts ("No Qwen3Next layer found in the model.layers"), and takes an EAGLE-3 head
# of made-up weights for one without an output head of its own.
# It changes a class when a process loads it, for who imports a model's module too early may start CUDA in the wrong process.
PLUGIN = """
def set_no_experts(self):
    self.moe_layers, self.num_moe_layers = [], 0


def register():
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    usual = _LazyRegisteredModel.load_model_cls

    def load_model_cls(self):
        found = usual(self)
        if found.__name__ == "Eagle3LlamaForCausalLM":
            found.has_own_lm_head = True
        if found.__name__ in WITHOUT_EXPERTS:
            found.set_moe_parameters = set_no_experts
        return found

    _LazyRegisteredModel.load_model_cls = load_model_cls
"""
COMMON: dict[str, Any] = {"max_num_batched_tokens": 16_384, "max_model_len": 16_384}


def start(engine: str, model: Path, args: argparse.Namespace) -> tuple[Any, type]:
    """The engine, and its class of sampling parameters."""
    if engine == "vllm":
        config = json.loads((model / "config.json").read_text())
        if args.speculate == "eagle3" or not config.get("num_experts", 1):
            install_plugin(model.parent, config.get("num_experts", 1) > 0)
        from vllm import LLM, SamplingParams

        own: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
        # Hybrid models: states in float32 as ours (Qwen3.5's own configuration asks for it), and kernels that need no flashinfer.
        own |= {"mamba_ssm_cache_dtype": "float32", "additional_config": {"gdn_prefill_backend": "triton"}}
    else:
        from folovllm import LLM, SamplingParams
        from folovllm.config import DEFAULT_MODEL

        own = {"random_weights": True, "tokenizer": DEFAULT_MODEL, "model_impl": "native", "milestone": "m6"}
    asked = {"tensor_parallel_size": args.gpus, "kv_cache_dtype": args.kv_cache_dtype, "dtype": "bfloat16"}
    if args.speculate and not args.plain:
        asked["speculative_config"] = speculation(engine, args.speculate, model)
    return LLM(model=str(model), **asked, **COMMON, **own), SamplingParams


def write_head(model: Path) -> Path:
    """Write the configuration of an EAGLE-3 head for a model to a folder beside it, and return that folder."""
    head, config = model.parent / "head", json.loads((model / "config.json").read_text())
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    own |= {"draft_vocab_size": DRAFT_VOCABULARY, "target_hidden_size": config["hidden_size"]}
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config | own), encoding="utf-8")
    return head


def speculation(engine: str, method: str, model: Path) -> dict[str, Any]:
    """Return an engine's `speculative_config`: so many drafts in each step, whatever comes of them."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "eagle3":
        config["model"] = str(write_head(model))
    else:
        target = json.loads((model / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (model / "config.json").write_text(json.dumps(target), encoding="utf-8")
    if engine == "vllm":
        return config | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * DRAFTS}
    return config | {"adaptive": False}


def install_plugin(folder: Path, has_experts: bool) -> None:
    """Install PLUGIN in `folder`, for this process and those that it starts."""
    names, about = (
        [] if has_experts else ["Qwen3NextForCausalLM", "Qwen3NextMTP"],
        folder / "beside_vllm_plugin-1.dist-info",
    )
    about.mkdir()
    (folder / "beside_vllm_plugin.py").write_text(f"WITHOUT_EXPERTS = {names}\n{PLUGIN}", encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: beside-vllm-plugin\nVersion: 1\n", encoding="utf-8")
    entry = "[vllm.general_plugins]\nbeside_vllm = beside_vllm_plugin:register\n"
    (about / "entry_points.txt").write_text(entry, encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def requests_of(work: str, seed: int) -> list[tuple[list[int], int]]:
    """Prompts and the lengths of their answers. Of nano-vllm and a burst, prompts of another seed have the same lengths.

    No prompt begins as one of another work or pass does, so nothing is found in a prefix cache.
    """
    rng = random.Random(f"{work}, {seed}")
    if work in (NANO, BURST):  # a burst: short and long ones at once, so that parts of prompts stand beside decodes
        load = load_workload(NANO) if work == NANO else mixed_workload(128, 0, (64, 8000), (16, 256))
        lengths = [(len(one.prompt), one.output_len) for one in load.requests]
    else:
        count, prompt, answer = (WORKS | STEPS)[work]
        lengths = [(prompt, answer)] * count
    return [([rng.randint(0, 10_000) for _ in range(prompt)], answer) for prompt, answer in lengths]


def serve(engine: str, model: Path, args: argparse.Namespace) -> None:
    """Print a line of JSON for each work: the seconds of each pass."""
    began = time.perf_counter()
    llm, params = start(engine, model, args)
    print(json.dumps({"start": round(time.perf_counter() - began, 1)}), flush=True)
    # Our drafts share the request's noise: some would be accepted.
    common = {"temperature": 0.0 if args.speculate else 0.6, "ignore_eos": True, "detokenize": False}
    for work in args.works:
        seconds = []
        for number in range(args.passes + 1):
            prompts, answers = zip(*requests_of(work, number), strict=True)
            how = [params(max_tokens=answer, **common) for answer in answers]
            began = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
            seconds.append(round(time.perf_counter() - began, 4))
            got = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert got == sum(answers), f"{engine} wrote {got} tokens"
        told: dict[str, Any] = {"work": work, "seconds": seconds[1:]}
        if args.speculate and engine == "folovllm" and not args.plain:
            told["accepted"] = llm.engine.scheduler.speculation.num_accepted
        print(json.dumps(told), flush=True)


def best_of(engine: str, *options: str) -> dict[str, float]:
    """The best seconds of each work, from a process that runs this engine alone; its lines are shown as they come."""
    best: dict[str, float] = {}
    command = [sys.executable, *sys.argv, "--engine", engine, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                print(f"{engine:9} {line.strip()}", flush=True)
                told = json.loads(line)
                best |= {told["work"]: min(told["seconds"])} if "work" in told else {}
            else:  # vLLM says there why it ends
                print(line, end="", file=sys.stderr, flush=True)
    if child.returncode:
        print(f"{engine:9} ended with code {child.returncode}", flush=True)
    return best


def print_steps(args: argparse.Namespace) -> None:
    """Run both engines without and with drafts, and print what their steps take."""
    runs = [best_of(engine, *plain) for engine in ENGINES for plain in (["--plain"], [])]
    titles = "plain step, ms", f"with {DRAFTS} drafts", "plain steps"
    print_row(f"{args.geometry}, {args.speculate}: ours, vLLM's", *titles, *titles)
    for work in args.works:
        ours, drafting, theirs, too = (1000 * best.get(work, math.nan) / (WORKS | STEPS)[work][2] for best in runs)
        print_row(work, ours, drafting, drafting / ours, theirs, too, too / theirs)


def main() -> None:
    """Run both engines, or one."""
    parser = parser_of(__doc__, "qwen3-0.6b")
    parser.add_argument("--gpus", type=int, default=1, help="of one model (tensor parallelism)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--weights", choices=WEIGHTS, help="16 bits without")
    parser.add_argument("--speculate", choices=["eagle3", "mtp"], help=f"what a step with {DRAFTS} drafts costs")
    parser.add_argument("--plain", action="store_true", help="with --engine and --speculate: the engine without drafts")
    parser.add_argument("--works", nargs="+", choices=[*WORKS, BURST, NANO, *STEPS])
    parser.add_argument("--passes", type=int, default=2, help="measured ones; the best counts")
    parser.add_argument("--engine", choices=ENGINES, help="this one alone, in this process")
    args = parser.parse_args()
    args.works = args.works or ([*STEPS] if args.speculate else [*WORKS, BURST, NANO])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.engine:
        changes = {"quantization_config": WEIGHTS[args.weights]} if args.weights else {}
        with random_weights(args.geometry, changes) as fields:
            serve(args.engine, Path(fields["model"]), args)
        return
    if args.speculate:
        print_steps(args)
        return
    ours, theirs = (best_of(engine) for engine in ENGINES)
    print_row(f"{args.geometry}, {args.gpus} GPU, {args.weights or '16 bits'}, seconds", "FoloVLLM", "vLLM", "ratio")
    for work in (work for work in args.works if work in ours and work in theirs):
        print_row(work, ours[work], theirs[work], theirs[work] / ours[work])


if __name__ == "__main__":
    main()
