"""From sequences to `RequestOutput`: text as far as it is safe to show, tokens, times."""

from __future__ import annotations

from dataclasses import replace

from folovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from folovllm.request import Sequence


class RequestState:
    """A request that is being served, and how much of it was reported."""

    def __init__(self, request_id: str, prompt: str | None, seqs: list[Sequence], stream: bool, arrival: float) -> None:
        self.request_id = request_id
        self.seqs = seqs
        self.stream = stream
        self.metrics = RequestMetrics(arrival, num_prompt_tokens=seqs[0].num_prompt_tokens)
        self._prompt = prompt
        self._prompt_token_ids = list(seqs[0].prompt_token_ids)  # users may do with it as they like
        self._shown = [(0, 0)] * len(seqs)  # characters and tokens of each answer

    @property
    def finished(self) -> bool:
        """Whether all answers are over."""
        return all(seq.status.is_finished for seq in self.seqs)

    def note_progress(self, now: float) -> None:
        """Take the times of a step that ended `now`."""
        self.metrics.num_generated_tokens = sum(seq.num_output_tokens for seq in self.seqs)
        if self.metrics.first_token_time is None and self.metrics.num_generated_tokens:
            self.metrics.first_token_time = now
        if self.finished:
            self.metrics.finish_time = now

    def output(self) -> RequestOutput:
        """The request as it is, with what is new since the last call as deltas."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(i, seq) for i, seq in enumerate(self.seqs)],
            finished=self.finished,
            metrics=replace(self.metrics),  # a snapshot, as all the rest
            num_cached_tokens=self.seqs[0].num_cached_tokens or 0,
        )

    def _completion(self, i: int, seq: Sequence) -> CompletionOutput:
        text, token_ids = visible_text(seq), seq.output_token_ids.tolist()
        characters, tokens = self._shown[i]
        self._shown[i] = (len(text), len(token_ids))
        return CompletionOutput(
            index=seq.index,
            text=text,
            token_ids=token_ids,
            logprobs=list(seq.logprobs) if seq.params.logprobs is not None else None,
            finish_reason=seq.status.value if seq.status.is_finished else None,
            stop_reason=seq.stop_reason,
            delta_text=text[characters:],
            delta_token_ids=token_ids[tokens:],
        )


def visible_text(seq: Sequence) -> str:
    """The text that no later token can take back.

    While an answer grows, its last characters may turn out to begin a stop string, so that many are held back.
    """
    detokenizer = seq.detokenizer
    if seq.status.is_finished:
        detokenizer.flush()
        return detokenizer.text
    detokenizer.advance()
    held_back = max(map(len, seq.params.stop), default=1) - 1
    return detokenizer.text[: max(0, len(detokenizer.text) - held_back)]
