"""What K and V in 8 bits cost a model: `python tools/measure_cache_bits.py` prints perplexities on the first chapter's prose.

First the engine's, which reads a prompt 64 tokens at a time, so that nearly all K and V come out of the cache. Then what
transformers computes when its cache rounds K, V or both, to FP8 and to integers with a scale for each token and head: where
the loss comes from, and what a cache in other 8 bits would cost; with the Kullback-Leibler divergence a token, which a few
thousand tokens tell with a tenth of the noise. SmolLM2 must be there: `folovllm download smollm2`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from folovllm import LLM, SamplingParams
from folovllm.kv_format import decode, encode
from folovllm.models.files import resolve_model
from folovllm.quantization.quantizer.perplexity import perplexity, token_losses

TEXT = Path(__file__).parents[1] / "docs" / "0_what_happens.md"
ROW = 1000  # tokens of a prompt
Rounding = Callable[[Tensor], Tensor]


def fp8(x: Tensor) -> Tensor:
    return decode(encode(x, 1.0), 1.0, x.dtype)


def centred(keys: Tensor) -> Tensor:
    """FP8 of what is left of keys [rows, Hkv, T, D] without their mean, moved so that the first key is left whole."""
    first, mean = keys[:, :, :1], keys.mean(2, keepdim=True)
    offset = first - fp8(first - mean)
    return fp8(keys - offset) + offset


def int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def of_the_engine(model: str, rows: list[list[int]], **overrides: Any) -> float:
    """The perplexity of `rows` by an engine with such settings."""
    llm = LLM(model, max_model_len=2 * ROW, max_num_seqs=4, max_num_batched_tokens=64, use_tqdm=False, **overrides)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)
    told = [(row, output.prompt_logprobs or []) for row, output in zip(rows, outputs, strict=True)]
    costs = [-at[token].logprob for row, places in told for token, at in zip(row, places, strict=True) if at]
    return perplexity(torch.tensor(costs))


@torch.inference_mode()
def simulated(
    model: Any, rows: list[list[int]], of_keys: Rounding | None, of_values: Rounding | None
) -> tuple[float, list[Tensor]]:
    """The same by transformers, whose cache rounds; and each row's log-probabilities [T - 1, V]."""

    class Rounded(DynamicCache):
        def update(self, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
            keys, values = of_keys(keys) if of_keys else keys, of_values(values) if of_values else values
            return super().update(keys, values, *rest, **options)

    ids = [torch.tensor([row]) for row in rows]
    logits = [model(row, past_key_values=Rounded()).logits for row in ids]
    losses = [token_losses(x, row) for x, row in zip(logits, ids, strict=True)]
    return perplexity(torch.cat(losses)), [x[0, :-1].log_softmax(-1) for x in logits]


def divergence(of: list[Tensor], plain: list[Tensor]) -> float:
    """The Kullback-Leibler divergence of log-probabilities from the plain ones, a token."""
    return torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(plain, of, strict=True)]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=6, help=f"prompts of {ROW} tokens")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text in Markdown")
    given = parser.parse_args()
    folder = resolve_model(given.model)
    text = re.sub(r"```.*?```", "", given.text.read_text(), flags=re.DOTALL)
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: given.rows * ROW]
    rows = [ids[at : at + ROW] for at in range(0, len(ids), ROW)]
    tell("engine: as it is", plain := of_the_engine(given.model, rows), plain)
    tell("engine: FP8", of_the_engine(given.model, rows, kv_cache_dtype="fp8"), plain)
    scaled = of_the_engine(given.model, rows, kv_cache_dtype="fp8", calculate_kv_scales=True)
    tell("engine: FP8, with scales", scaled, plain)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain, whole = simulated(model, rows, None, None)
    tell("simulated: as it is", plain, plain)
    for name, of_keys, of_values in (("FP8", fp8, fp8), ("FP8, centred", centred, fp8), ("INT8", int8, int8)):
        for of, pair in (("keys", (of_keys, None)), ("values", (None, of_values)), ("both", (of_keys, of_values))):
            if of == "values" and of_keys is centred:
                continue
            found, rounded = simulated(model, rows, *pair)
            tell(f"simulated: {of} in {name}", found, plain, f"  KL {divergence(rounded, whole):.4f}")


def tell(what: str, found: float, plain: float, more: str = "") -> None:
    print(f"{what:32}{found:8.3f}  {found / plain - 1:+.2%}{more}", flush=True)


if __name__ == "__main__":
    main()
