"""What a sequence brings into its first step besides its tokens: how it is sampled."""

from __future__ import annotations

from folovllm.request import Sequence
from folovllm.step.schedule import SamplingSpec


def sampling_spec(seq: Sequence) -> SamplingSpec:
    """What a device must know to sample for `seq`. With a grammar, the bitmask holds the rules about allowed and stop tokens."""
    p, free = seq.params, seq.params.structured_outputs is None
    return SamplingSpec(
        seed=seq.seed,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        logprobs=p.logprobs,
        first_end=seq.num_prompt_tokens + p.min_tokens,
        forbidden=tuple(sorted({*seq.eos_token_ids, *p.stop_token_ids})) if free and p.min_tokens else (),
        num_prompt_tokens=seq.num_prompt_tokens,
        allowed=tuple(p.allowed_token_ids) if free and p.allowed_token_ids is not None else None,
        has_grammar=not free,
        bad_words=seq.request.bad_words,
        bias=tuple((p.logit_bias or {}).items()),
        history=seq.token_ids if p.has_penalties or seq.request.bad_words else seq.token_ids[:0],
    )
