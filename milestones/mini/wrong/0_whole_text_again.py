"""Gives the model the whole text in every step, though the cache has all of it but the newest token."""

import torch
from contract import Step
from serial import SerialEngine, transformers_model


class Wrong(SerialEngine):
    @torch.inference_mode()
    def step(self):
        request = self.waiting[0]
        if request.computed == 0:
            self.next_logits = self.begin()
        n = len(request.tokens)
        token = int(self.next_logits(request.tokens).argmax())
        request.tokens.append(token)
        request.computed = n
        if request.is_done:
            self.waiting.popleft()
        return Step([(request.id, 0, n)], {}, {request.id: token}, [])


def make(folder, limits, device):
    return Wrong(transformers_model(folder))
