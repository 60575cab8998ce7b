"""Stage 0: one request after the other, through the model of transformers and its `past_key_values`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from contract import Step
from torch import Tensor

NextLogits = Callable[[list[int]], Tensor]  # the new tokens of a sequence -> the logits [V] after the last of them


@dataclass
class Request:
    """A request, and how far it is."""

    id: str
    tokens: list[int]  # the prompt, then the answer so far
    length: int  # tokens in the end
    computed: int = 0  # tokens whose K/V are in the cache

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.length


class SerialEngine:
    """Serves one request at a time. `begin` starts an empty sequence."""

    def __init__(self, begin: Callable[[], NextLogits]) -> None:
        self.begin, self.waiting = begin, deque[Request]()

    def add(self, id: str, prompt: list[int], max_tokens: int) -> None:
        self.waiting.append(Request(id, list(prompt), len(prompt) + max_tokens))

    @torch.inference_mode()
    def step(self) -> Step:
        request = self.waiting[0]
        if request.computed == 0:
            self.next_logits = self.begin()
        start, new = request.computed, request.tokens[request.computed :]
        token = int(self.next_logits(new).argmax())
        request.tokens.append(token)
        request.computed += len(new)
        if request.is_done:
            self.waiting.popleft()
        return Step([(request.id, start, len(new))], {}, {request.id: token}, [])


def transformers_model(folder: Path) -> Callable[[], NextLogits]:
    """`begin` for the model of transformers: each sequence has a `past_key_values` of its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def begin() -> NextLogits:
        past = None

        def next_logits(new: list[int]) -> Tensor:
            nonlocal past
            output = model(torch.tensor([new]), past_key_values=past, use_cache=True)
            past = output.past_key_values
            logits: Tensor = output.logits[0, -1]
            return logits

        return next_logits

    return begin
