"""What a step with a draft head costs on a GPU, beside a plain step and a floor: `python -m tools.measure_heads`.

Weights are random, so drafts are hardly ever accepted, and each step is a whole one: k draft tokens, and k + 1 tokens to verify. The floor is the time of a
plain step times the bytes that are read: the model's once, the head's layer, input projection and output head k times each. For real acceptance: the embedded heads.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from folovllm import LLM, SamplingParams
from folovllm.apps.bench.contenders import random_model

K, TOKENS, VOCABULARY = 3, 96, 32_000


def write_eagle3(target: dict[str, Any], folder: Path) -> int:
    """Write an EAGLE-3 head of random weights for a target's config.json. Returns its bytes that each draft reads."""
    hidden, heads, kv = target["hidden_size"], target["num_attention_heads"], target["num_key_value_heads"]
    dim, inner = target["head_dim"], target["intermediate_size"]
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (VOCABULARY, hidden),
    }
    tensors = {
        name: (torch.randn(shape, device="cuda") * 0.02).to(torch.bfloat16).cpu() for name, shape in shapes.items()
    }
    size = sum(2 * t.numel() for name, t in tensors.items() if name != "fc.weight")  # fc: once a step
    for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(VOCABULARY, dtype=torch.int64)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "model_type": "llama",
    }
    (folder / "config.json").write_text(json.dumps(target | own | {"target_hidden_size": hidden}))
    return size


def step_seconds(llm: LLM, num_seqs: int) -> float:
    """Seconds of a step over so many sequences, the median of three rounds."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [[1000 + 7 * i + j for j in range(64)] for i in range(num_seqs)]
    rounds = []
    for _ in range(4):
        before, start = llm.engine.stats().steps, time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rounds.append((time.perf_counter() - start) / (llm.engine.stats().steps - before))
    return median(rounds[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["eagle3", "mtp"], default="eagle3")
    parser.add_argument("--geometry", default="qwen3-8b")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--gpus", type=int, default=1, help="of one model (tensor parallelism)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = {"max_model_len": 2048, "max_num_seqs": max(args.at_once), "tensor_parallel_size": args.gpus}
        fields = random_model(args.geometry, folder, common)
        target = json.loads((Path(fields["model"]) / "config.json").read_text())
        speculative: dict[str, Any] = {"method": args.method, "num_speculative_tokens": K, "adaptive": False}
        if args.method == "mtp":
            (Path(fields["model"]) / "config.json").write_text(json.dumps(target | {"mtp_num_hidden_layers": 1}))
        else:
            print(f"a draft reads {write_eagle3(target, folder / 'head') / 1e9:.2f} GB")
            speculative["model"] = str(folder / "head")
        with LLM(**fields) as llm:
            plain = {n: step_seconds(llm, n) for n in args.at_once}
        with LLM(**fields, speculative_config=speculative) as llm:
            for n in args.at_once:
                seconds = step_seconds(llm, n)
                print(
                    f"{n:4} at once: plain {1e3 * plain[n]:.2f} ms, with {K} drafts {1e3 * seconds:.2f} ms, {seconds / plain[n]:.2f} plain steps"
                )


if __name__ == "__main__":
    main()
