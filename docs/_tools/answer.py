"""What the book shows of one answer: the text cut into tokens, the prompt, the stream through the layers, the draw.

All of it is the embedded model's, in float32 on a CPU. `excerpts.py` writes it into the pages.
"""

from __future__ import annotations

import json
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from anatomy import FOLDER, SMALL, config, letters, table
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.torch_cat import GrowingKVCache, TorchCatBackend
from folovllm.layers.attention import attention_layers
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from folovllm.step.forward_batch import ForwardBatch

QUESTION = "What is the capital of Peru?"


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def byte_pairs(word: str, merges: list[tuple[str, str]]) -> list[list[str]]:
    """How byte-pair encoding puts a word together: its pieces at the start and after every merge."""
    rank = {pair: place for place, pair in enumerate(merges)}
    pieces = list(word)
    steps = [pieces]
    while pairs := [pair for pair in pairwise(pieces) if pair in rank]:
        first, second = min(pairs, key=rank.__getitem__)  # the pair that training merged earliest
        at = next(i for i, pair in enumerate(pairwise(pieces)) if pair == (first, second))
        pieces = [*pieces[:at], first + second, *pieces[at + 2 :]]
        steps.append(pieces)
    return steps


@cache
def merges() -> list[tuple[str, str]]:
    """The merges in the order in which training made them."""
    stored = json.loads((FOLDER / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    return [(first, second) for first, second in (pair.split() if isinstance(pair, str) else pair for pair in stored)]


def merge_table() -> str:
    """A word put together, checked against the tokenizer itself."""
    word = " capital"
    steps = byte_pairs(word.replace(" ", "Ġ"), merges())
    if steps[-1] != tokenizer().tokenize(word):
        raise ValueError(f"{steps[-1]} is not what the tokenizer makes of {word!r}")
    rank = {"".join(pair): place for place, pair in enumerate(merges())}
    rows: list[tuple[object, ...]] = [
        (" ".join(f"`{piece}`" for piece in steps[0]), "the word as bytes; `Ġ` is the space")
    ]
    for before, after in pairwise(steps):
        new = next(piece for piece in after if piece not in before)
        rows.append((" ".join(f"`{piece}`" for piece in after), f"merge number {rank[new]:,} gives `{new}`"))
    return table("pieces | why", *rows)


def token_table() -> str:
    """Texts, their tokens, and how many bytes each token stands for."""
    rows = []
    for text in (" kite", "kite", " Zorimba", "é", "中", "😀"):
        ids = tokenizer()(text)["input_ids"]
        pieces = " ".join(f"`{piece}`" for piece in tokenizer().convert_ids_to_tokens(ids))
        alone = " ".join(f"`{_visible(tokenizer().decode([token]))}`" for token in ids)
        rows.append((f"`{_visible(text)}`", len(text), len(text.encode()), len(ids), pieces, alone))
    return table(
        "text | characters | bytes | tokens | pieces, in the vocabulary's spelling | each decoded alone", *rows
    )


def _visible(text: str) -> str:
    """A space at an end of code is not shown, so it gets a sign."""
    return text.replace(" ", "␣")


def prompt() -> str:
    messages = [{"role": "user", "content": QUESTION}]
    return str(tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def prompt_text() -> str:
    return f"```text\n{prompt()}```"


def prompt_ids() -> list[int]:
    return [int(token) for token in tokenizer()(prompt())["input_ids"]]


def id_table() -> str:
    pieces = tokenizer().convert_ids_to_tokens(prompt_ids())
    cells = [
        f"`{piece.replace('Ċ', chr(92) + 'n').replace('Ġ', ' ')}` {token}"
        for piece, token in zip(pieces, prompt_ids(), strict=True)
    ]
    return f"{len(cells)} tokens: " + " · ".join(cells)


class Watched:
    """The embedded model, answering greedily with a cache that grows; what its modules gave in the last step."""

    def __init__(self) -> None:
        self.model: LlamaForCausalLM = build_model(config(SMALL), torch.float32, "cpu", max_model_len=64)
        load_model(self.model, FOLDER, use_tqdm=False)
        n = letters(SMALL)
        self.backend = TorchCatBackend(
            AttentionConfig(n["Hq"], n["Hkv"], n["D"], torch.float32, torch.device("cpu"), 64, 1)
        )
        self.given: dict[str, Any] = {}
        for layer in attention_layers(self.model):
            layer.backend, layer.kv_cache = self.backend, GrowingKVCache()  # type: ignore[assignment]  # as the backend wants it
        for name, module in self.model.named_modules():
            module.register_forward_hook(partial(self._note, name))
        self.tokens = 0

    def _note(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.given[name] = output

    @torch.inference_mode()
    def step(self, ids: list[int]) -> torch.Tensor:
        """The logits after the last of these tokens, [V]."""
        start, self.tokens = self.tokens, self.tokens + len(ids)
        one = torch.tensor([len(ids)])
        batch = ForwardBatch(
            torch.tensor(ids), torch.arange(start, self.tokens), torch.arange(start, self.tokens), torch.tensor([0, len(ids)]),
            one + start, torch.zeros(1, 1), one - 1, 1, int(len(ids) == 1), len(ids), self.tokens, [len(ids)], [self.tokens],
        )  # fmt: skip
        return self.model.compute_logits(self.model(batch), batch)[0]


@cache
def watched() -> tuple[list[tuple[int, list[tuple[str, float]]]], dict[str, Any], LlamaForCausalLM]:
    """The answer with the best three tokens of every draw; what the modules gave when ` Lima` was drawn."""
    model, ids, draws, given = Watched(), prompt_ids(), [], {}
    while not draws or draws[-1][0] not in config(SMALL).eos_token_id:
        probabilities = model.step(ids).softmax(-1)
        best = probabilities.topk(3)
        names = [tokenizer().decode([token]) for token in best.indices.tolist()]
        draws.append((int(best.indices[0]), list(zip(names, best.values.tolist(), strict=True))))
        ids = [draws[-1][0]]
        if names[0] == " Lima":
            given = dict(model.given)
    return draws, given, model.model


STORY = "Once upon a time, there was a tiny boy named Tim. He"


@torch.inference_mode()
def story_table() -> str:
    """What may come next in a story, at three temperatures."""
    logits = Watched().step(tokenizer()(STORY)["input_ids"])
    best = logits.topk(6).indices
    rows = [
        (
            f"temperature {temperature:g}",
            *(f"{100 * p:.1f}%" for p in (logits / temperature).softmax(-1)[best].tolist()),
        )
        for temperature in (0.5, 1.0, 2.0)
    ]
    names = [f"`{tokenizer().decode([token])}`" for token in best.tolist()]
    logit_row = ("logit", *(f"{logit:.2f}" for logit in logits[best].tolist()))
    return table(" | ".join(["", *names]), logit_row, *rows)


def draw_table() -> str:
    """The best three at every step of the answer."""
    draws, _, _ = watched()
    rows = [
        (place, *(f"`{name}` {100 * p:.1f}%" for name, p in best))
        for place, (_, best) in enumerate(draws, len(prompt_ids()))
    ]
    return table("position | sampled | second | third", *rows)


@torch.inference_mode()
def stream_table() -> str:
    """The residual stream at the token whose successor is ` Lima`: how long it is, what is added, what the head would say."""
    _, given, model = watched()
    rms = lambda x: f"{x.square().mean().sqrt():.2f}"  # noqa: E731
    stream = given["model.embed_tokens"][-1]
    rows = [("embedding", "", "", rms(stream), *_says(model, stream))]
    for layer in range(letters(SMALL)["L"]):
        attention, mlp = (given[f"model.layers.{layer}.{part}"][-1] for part in ("self_attn", "mlp"))
        stream = stream + attention + mlp
        rows.append((f"layer {layer}", rms(attention), rms(mlp), rms(stream), *_says(model, stream)))
    return table("after | attention adds | the MLP adds | the stream | the head would say | probability of Lima", *rows)


def _says(model: LlamaForCausalLM, stream: torch.Tensor) -> tuple[str, str]:
    """The likeliest token, and the probability of ` Lima`, if this were the last layer."""
    probabilities = model.lm_head(model.model.norm(stream[None]))[0].softmax(-1)
    lima = tokenizer()(" Lima")["input_ids"][0]
    return f"`{tokenizer().decode([int(probabilities.argmax())])}`", f"{100 * probabilities[lima]:.1f}%"
