"""What a sequence brings into a step besides its tokens: how it is sampled, and which tokens of its prompt are scored."""

from __future__ import annotations

from folovllm.request import Sequence
from folovllm.step.schedule import SamplingSpec, Scores


def scores_of(seq: Sequence, start: int, end: int) -> Scores | None:
    """The tokens of the prompt that tokens `start` to `end` predict, and whose scores have not come yet."""
    if not seq.num_unscored_tokens:
        return None
    first = max(start, len(seq.prompt_logprobs))  # the token behind it is the first without a score
    tokens = seq.tokens(first + 1, min(end + 1, seq.num_prompt_tokens))
    return Scores(first - start, tokens, seq.params.prompt_logprobs or 0) if len(tokens) else None


def sampling_spec(seq: Sequence) -> SamplingSpec:
    """What a device must know to sample for `seq`. With a grammar, the bitmask holds the rules about allowed and stop tokens."""
    p = seq.params
    has_grammar = p.structured_outputs is not None
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
        forbidden=() if has_grammar or not p.min_tokens else tuple(sorted({*seq.eos_token_ids, *p.stop_token_ids})),
        num_prompt_tokens=seq.num_prompt_tokens,
        allowed=None if has_grammar or p.allowed_token_ids is None else tuple(p.allowed_token_ids),
        has_grammar=has_grammar,
        bad_words=seq.request.bad_words,
        bias=tuple((p.logit_bias or {}).items()),
        history=seq.token_ids if p.has_penalties or seq.request.bad_words else seq.token_ids[:0],
    )
